"""The kernel of `Gate` on GPUs: Y = X * sigmoid(Z), or X * silu(Z), where X may be normalized first, head by head.

A head is `size` columns. A group of adjacent lanes has a head; a lane has four columns in each step.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import exp2, fma, launch, rcp, rsqrt, wave_sum
from mlc_amd.schedules.gpu.base.norm import scaled
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import LANES, WIDTH, act_args, emit_store, load_columns
from mlc_amd.schedules.gpu.base.step import builds, if_live
from mlc_amd.schedules.operators import Gate
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.operators.layouts import kind_of
from mlc_amd.schedules.tir import Buffer, declared

WAVES = 4  # largest number of waves of a workgroup


def _lanes(size: int, wave: int) -> int:
    """The number of lanes of a head: a power of two, so that they are in one wave."""
    lanes = 1
    while lanes < wave and size % (2 * lanes * WIDTH) == 0:
        lanes *= 2
    return lanes


@builds(Gate)
def gate(op: Gate, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, X and Z float32 [m, k], [G float32 [size], the weights of the norm, with eps], then A, S | H | Y
    of [m, k] in `layout`). Raises ValueError unless k is a multiple of 32, and for heads that do not fit the layout's
    blocks."""
    k, m, eps, layout = op.k, op.m, op.eps, op.layout
    size = op.size if eps is not None else BLOCK
    lanes = _lanes(size, arch.wave)
    splits_blocks = kind_of(layout) in ("rows", "pairs", "lanes") and lanes < LANES and size != lanes * WIDTH
    if k % BLOCK or size % WIDTH or splits_blocks:
        raise ValueError(f"a gate of {k} columns in heads of {size} does not fit blocks of {BLOCK}")
    threads = arch.wave * min(WAVES, arch.threads // arch.wave)
    heads, steps = threads // lanes, size // (lanes * WIDTH)
    X, Z, G = declared(X=(m, k), Z=(m, k), G=(size,) if eps is not None else None)
    out = act_args(m, k, layout, None if layout else ["Y"])
    count = k // size
    with launch((-(-count // heads), m), (threads,)) as (part, row, thread), if_live(state, m, row):
        head = T.Bind(part * heads + thread // lanes)
        inside = None if count % heads == 0 else head < count
        first = T.Bind(T.min(head, T.int32(count - 1)) * size + thread % lanes * WIDTH)
        places = [T.Bind(first + step * lanes * WIDTH) for step in range(steps)]
        x = [load_columns(X, row, place) for place in places]
        if eps is not None:
            total = T.float32(0)
            for value in (value for values in x for value in values):
                total = fma(value, value, total)
            scale = rsqrt(fma(wave_sum(arch, T.Bind(total), lanes), T.float32(1 / size), T.float32(eps)))
            weights = [load_columns(G, T.Bind(place % size)) for place in places]
            x = [scaled(values, scale, own) for values, own in zip(x, weights, strict=True)]
        for values, place in zip(x, places, strict=True):
            found = []
            for value, z in zip(values, load_columns(Z, row, place), strict=True):
                share = rcp(T.float32(1) + exp2(z * T.float32(-LOG2E)))
                found.append(T.Bind(value * T.Bind(z * share if op.silu else share)))
            emit_store(arch, layout, out, found, row, place, inside)
