"""Multiplication by the Hadamard matrix H / sqrt(size), which is its own inverse, in log2(size) steps."""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, store
from mlc_amd.schedules.tir import Buffer, Expr


def hadamard(x: Buffer, count: int, size: int) -> None:
    """Multiplies each block of `size` elements among the first `count` elements of x by the matrix, in place. x:
    float32. size: a power of two, at least 32."""
    with T.serial(count // LANES) as i:
        v = T.Bind(x[at(i * LANES)] * f32(size**-0.5))
        for step in (1, 2, 4, 8):
            lanes = [T.int32(lane ^ step) for lane in range(LANES)]
            signs = T.Shuffle([T.float32(-1 if lane & step else 1) for lane in range(LANES)], list(range(LANES)))
            v = T.Bind(v * signs + T.Shuffle([v], lanes))
        store(x, v, at(i * LANES))
    step = LANES
    while step < size:
        _butterflies(x, count, step)
        step *= 2


def _butterflies(x: Buffer, count: int, step: int) -> None:
    """Replaces each pair (a, b) of elements that are `step` apart by (a + b, a - b). step: a multiple of LANES."""
    with T.serial(count // (2 * step)) as block, T.serial(step // LANES) as i:
        first: Expr = T.Bind(block * (2 * step) + i * LANES)
        a, b = (T.Bind(x[at(first + other)]) for other in (0, step))
        store(x, a + b, at(first))
        store(x, a - b, at(first + step))
