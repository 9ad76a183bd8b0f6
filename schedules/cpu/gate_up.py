"""The first half of a feed-forward layer on the CPU in one launch: y = silu(gate(x)) * up(x), quantized for the down
projection.

In and out as in `linear.py`: `state`, activations, the planes of two weights of f rows; y leaves as the activation
planes A and S of `quantize.py` or as float32. A task makes 32 columns of y (two tiles of gate, two of up) for a tile of
tokens: one activation block.
"""

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.linear import (
    act_params,
    check_tiles,
    default_plan,
    emit_acts,
    emit_planes,
    emit_tile,
    emit_weights,
    token_tiles,
)
from mlc_amd.schedules.cpu.planes import BLOCK, ROWS
from mlc_amd.schedules.cpu.quantize import act_shapes, emit_quantize_tile
from mlc_amd.schedules.cpu.vector import LANES, at, local, silu, store
from mlc_amd.schedules.formats import lookup

TILES = BLOCK // ROWS  # tiles of a weight that make a block of the output


def gate_up_swiglu(fmt_gate, fmt_up, f, k, m, p, quantize, isa, name, plan=None):
    """PrimFunc (state, A, S | X, planes of gate, planes of up, then A, S of [m, f] | Y f32 [m, f]).

    The weights are f x k, f a multiple of 32, both int8 or both float formats. p: tokens of an activation tile, a
    divisor of m (1: decode). quantize: the output is int8 activation planes in tiles of p. With m > 1, only the tiles
    that hold the first state[1] tokens are computed. plan: as in `linear`. ValueError for weights that cannot share a
    launch.
    """
    fmt_gate, fmt_up = lookup(fmt_gate), lookup(fmt_up)
    check_tiles(m, p)
    if fmt_gate.kind != fmt_up.kind or f % BLOCK:
        raise ValueError(f"gate {fmt_gate.name} and up {fmt_up.name} of {f} rows do not make one launch")
    plan = plan or default_plan(isa, m, p, [(fmt_gate, f), (fmt_up, f)], k)
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state, params = T.arg("state", T.buffer((4,), "int32")), act_params(m, k, p, fmt_gate.kind)
        weights = [(fmt_gate, emit_planes(fmt_gate, f, k, "G_")), (fmt_up, emit_planes(fmt_up, f, k, "U_"))]
        if quantize:
            a_shape, s_shape = act_shapes(m, f, p)
            A, S = T.arg("A_out", T.buffer(a_shape, "int8")), T.arg("S_out", T.buffer(s_shape, "float32"))
        else:
            Y = T.arg("Y", T.buffer((m, f), "float32"))
        acts = emit_acts(params, p, k)
        with T.parallel(f // BLOCK) as block:
            tiles = token_tiles(state, m, p)

            def emit(sources):
                with T.serial(tiles) as token_tile:
                    made = local(2, p, BLOCK)  # gate and up of the block
                    # one weight after the other: its two tiles lie side by side, so that the first one's prefetches
                    # serve the second
                    for i, ((fmt, _), source) in enumerate(zip(weights, sources, strict=True)):
                        with T.serial(TILES) as half:

                            def keep(token, row, x, i=i, half=half):
                                store(made, x, i, token, at(half * ROWS + row, isa.lanes))

                            emit_tile(fmt, source(half), acts, token_tile, plan, isa, keep)
                    # Short loops: the processor works on several tokens at once, as far as it looks ahead.
                    with T.serial(p) as token:
                        for c in range(0, BLOCK, LANES):
                            store(made, silu(made[0, token, at(c)], isa) * made[1, token, at(c)], 0, token, at(c))
                    if quantize:
                        emit_quantize_tile(lambda token, c: made[0, token, at(c)], A, S, token_tile, block, p)
                    else:
                        with T.serial(p) as token:
                            for c in range(0, BLOCK, LANES):
                                store(Y, made[0, token, at(c)], token_tile * p + token, at(block * BLOCK + c))

            emit_weights(weights, T.Bind(block * TILES), TILES, k, plan, isa, tiles, emit)
    return ir.get()
