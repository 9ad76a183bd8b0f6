"""The first half of a feed-forward layer on the CPU in one launch: y = act(gate(x)) * up(x), quantized for the down
projection.

In and out as in `linear.py`: `state`, activations, the planes of two weights of f rows; y leaves as the activation
planes A and S of `quantize.py` or as float32. A task makes 32 columns of y (two tiles of gate, two of up) for a tile of
tokens: one activation block.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.base.activation import ACTIVATIONS
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.base.vector import LANES, at, local, store
from mlc_amd.schedules.cpu.linear.linear_plan import default_plan, few_plan
from mlc_amd.schedules.cpu.linear.linear_tile import (
    act_params,
    check_tiles,
    emit_acts,
    emit_part,
    emit_tile,
    emit_weights,
    token_tiles,
    weight_args,
)
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.formats import lookup

TILES = BLOCK // ROWS  # tiles of a weight that make a block of the output


def emit_block(
    weights, sources, acts, token_tile, live, sizes, output, tile, block, activation, biases, plan, ahead, isa
):
    """A block of 32 columns of y for the `live` tokens of a tile; the others' have no meaning.

    weights: [(format, planes)] of gate and up; sources, sizes: as `emit_weights` gives them; tile: of the output;
    biases: (c, i) -> what is added to columns c .. c+15 of the block of gate (i = 0) or up (1), or None; ahead: as of
    `emit_tile`.
    """
    made = local(2, acts.p, BLOCK)  # gate and up of the block
    # One weight after the other: its two tiles are adjacent, so that the first one's prefetches serve the second.
    for i, ((fmt, _), source) in enumerate(zip(weights, sources, strict=True)):

        def part(tokens, i=i, fmt=fmt, source=source):
            with T.serial(TILES) as half:

                def keep(token, row, x):
                    store(made, x, i, token, at(half * ROWS + row, isa.lanes))

                emit_tile(fmt, source(half), acts, token_tile, tokens, plan, ahead, isa, keep)

        emit_part(live, sizes, part)
    # Short loops: the processor overlaps several rows, as far as it looks ahead.
    with T.serial(live) as token:
        for c in range(0, BLOCK, LANES):
            gate, up = (made[i, token, at(c)] + biases(c, i) if biases else made[i, token, at(c)] for i in range(2))
            store(made, activation(gate, up, isa), 0, token, at(c))
    output.store_tile(lambda token, c: made[0, token, at(c)], tile, block, live)


def gate_up_swiglu(fmt_gate, fmt_up, f, k, m, p, quantize, isa, name, plan=None, act="silu"):
    """PrimFunc (state, A, S | X, planes of gate, planes of up, then A, S of [m, f] | Y f32 [m, f]).

    The weights are f x k, f a multiple of 32, both int8 or both float formats. p: rows of an activation tile, a divisor
    of m (1: decode). quantize: the output is int8 activation planes in tiles of p. act: a key of ACTIVATIONS. With m >
    1, only the parts of tiles that hold live rows are computed. plan: as in `linear`. ValueError for weights that
    cannot share a launch.
    """
    fmt_gate, fmt_up, activation = lookup(fmt_gate), lookup(fmt_up), ACTIVATIONS[act]
    check_tiles(m, p)
    if fmt_gate.kind != fmt_up.kind or f % BLOCK:
        raise ValueError(f"gate {fmt_gate.name} and up {fmt_up.name} of {f} rows do not make one launch")
    segments = [(fmt_gate, f), (fmt_up, f)]
    plan = plan or default_plan(isa, m, p, segments, k)
    few = plan if m == 1 else few_plan(isa, segments, k)
    with kernel(name) as (builder, state):
        params = act_params(m, k, p, fmt_gate.kind)
        weights = [(fmt_gate, weight_args(fmt_gate, f, k, "G_")), (fmt_up, weight_args(fmt_up, f, k, "U_"))]
        output = Output(m, f, p, quantize, "Y", "_out")
        acts = emit_acts(params, p, k)
        with T.parallel(f // BLOCK) as block:
            tiles, live = token_tiles(state, m, p)

            def emit(sources, sizes):
                with T.serial(tiles) as tile:
                    emit_block(
                        weights, sources, acts, tile, live(tile), sizes, output, tile, block, activation, None, plan,
                        few, isa,
                    )  # fmt: skip

            emit_weights(weights, T.Bind(block * TILES), TILES, acts, plan, isa, tiles, emit)
    return builder.get()
