"""The first half of a feed-forward layer on the CPU in one launch: y = act(gate(x)) * up(x), quantized for the down
projection.

In and out as in `linear.py`: `state`, activations, the planes of two weights of f rows; y leaves as the activation
planes A and S of `quantize.py` or as float32. A task makes 32 columns of y (two tiles of gate, two of up) for a tile of
tokens: one activation block.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.activation import ACTIVATIONS
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.base.vector import LANES, at, local, store
from mlc_amd.schedules.cpu.linear.linear_plan import AnyPlan, token_tile
from mlc_amd.schedules.cpu.linear.linear_tile import (
    Matrix,
    Products,
    Source,
    TokenTiles,
    act_params,
    emit_part,
    emit_products,
    token_tiles,
    weight_args,
)
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.operators import GateUp
from mlc_amd.schedules.tir import Expr

TILES = BLOCK // ROWS  # tiles of a weight that make a block of the output


class Gated(NamedTuple):
    """What becomes of the results of gate and up.

    act   a key of ACTIVATIONS
    bias  (c, i) -> what is added to columns c .. c+15 of the block of gate (i = 0) or up (1)
    """

    output: Output
    act: str
    bias: Callable[[int, int], Expr] | None = None


def emit_block(
    products: Products, weights: list[Matrix], first: Expr, block: Expr, tiles: TokenTiles, gated: Gated
) -> None:
    """A task: block number `block` of 32 columns of y, of the live tokens of the tiles; the others' have no meaning.
    weights: gate and up, their rows from tile `first` on."""
    isa, activation = products.isa, ACTIVATIONS[gated.act]

    def emit(sources: Sequence[Source], sizes: list[int]) -> None:
        def body(tile: Expr, live: Expr) -> None:
            found = local(2, products.acts.p, BLOCK)  # gate and up of the block
            # One weight after the other: its two tiles are adjacent, so that the first one's prefetches serve the
            # second.
            for i, source in enumerate(sources):

                def part(tokens: int, i: int = i, source: Source = source) -> None:
                    with T.serial(TILES) as half:

                        def keep(token: Expr, row: int, x: Expr) -> None:
                            store(found, x, i, token, at(half * ROWS + row, isa.lanes))

                        products.emit_tile(source(half), tile, tokens, keep)

                emit_part(live, sizes, part)
            # Short loops: the processor overlaps several rows, as far as it looks ahead.
            with T.serial(live) as token:
                for c in range(0, BLOCK, LANES):
                    gate, up = (
                        found[i, token, at(c)] + gated.bias(c, i) if gated.bias else found[i, token, at(c)]
                        for i in range(2)
                    )
                    store(found, activation(gate, up, isa), 0, token, at(c))
            gated.output.store_tile(lambda token, c: found[0, token, at(c)], tile, block, live)

        tiles.each(body)

    products.emit_task(weights, first, TILES, tiles, emit)


@registry.builds(GateUp)
def gate_up(op: GateUp, arch: Arch, name: str, plan: AnyPlan | None = None) -> tirx.PrimFunc:
    """PrimFunc (state, A, S | X, planes of gate, planes of up, then A, S of [m, f] | Y f32 [m, f]).

    The weights are f x k, f a multiple of 32, both int8 or both float formats. With a `layout` the output is int8
    activation planes. With m > 1, only the parts of tiles that hold live rows are computed. ValueError for weights that
    cannot share a launch.
    """
    m, f, k, p = op.m, op.n, op.k, token_tile(op, arch)
    if f % BLOCK:
        raise ValueError(f"gate and up of {f} rows do not make one launch")
    with kernel(name) as (builder, state):
        params = act_params(op, arch, m, k)
        weights = [weight_args(fmt, f, k, prefix) for (fmt, _), prefix in zip(op.weights, ("G_", "U_"), strict=True)]
        gated = Gated(Output(m, f, p, bool(op.layout), "Y", "_out"), op.act)
        products = emit_products(op, arch, plan, params)
        with T.parallel(f // BLOCK) as block:
            tiles = token_tiles(state, m, p)
            emit_block(products, weights, T.Bind(block * TILES), block, tiles, gated)
    return builder.get()
