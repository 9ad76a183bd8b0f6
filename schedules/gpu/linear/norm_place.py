"""Where an RMS norm before linear layers of few tokens is computed: a `NormPlace`, the rule.

"launch"    by a kernel of its own
"computed"  by every workgroup of the layers that read it (`gemv_rows.emit_norm`): of one token, in int8 formats
"deferred"  by the layer or exchange before it and the layers that read it (`deferred_norm.py`)
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import FEW
from mlc_amd.schedules.gpu.linear import gemv
from mlc_amd.schedules.gpu.linear.gemm import engine
from mlc_amd.schedules.gpu.linear.gemm_tile import product_of
from mlc_amd.schedules.gpu.linear.gemv_rows import holds_norm
from mlc_amd.schedules.gpu.linear.linear import module_of, plans
from mlc_amd.schedules.gpu.linear.load import block_bytes
from mlc_amd.schedules.operators import AllReduce, ExpertDown, GateUp, Linear, NormPlace
from mlc_amd.schedules.operators.layouts import SUMMED, kind_of

CACHE = 1.5  # how much faster caches are than memory
# The same of sums of squares, by layout: those of "lanes" are added up between loads of weights. A gate and up of 14336
# rows of 8192 columns and 16 tokens, and the exchange before it, take an H200 1.8 us more with them.
SUMS = {"rows": CACHE, "lanes": 3.0}
# Tokens of the layout "lanes", at most: with deferred norms the kernels of steps of 8, 16, 32 and 64 take an H100 12,
# 9, 6 and 3 % less.
LANES_ROWS = 64


@functools.cache  # layers are alike, and two passes ask
def place(before: Linear | AllReduce | None, readers: tuple[Linear | GateUp, ...], arch: Device) -> NormPlace:
    """The place that takes the least time on an arch, of those that the kernels have. before: the layer that computes
    the norm's input, or the exchange that adds it up, if it is one; readers: all that reads the norm. In microseconds:

        launch    launch_us: of a launch that depends on the one before it
        computed  sum over readers of workgroups * k * 8 bytes / (CACHE * bandwidth): each reads x and g in float32
        deferred  sum over readers of workgroups * m * k / SUMMED * 4 bytes / (SUMS * bandwidth): the sums of squares;
                  and bytes of weights before / bandwidth * (idle with whole blocks - idle), where idle is how many
                  times as long a kernel takes because of compute units without work: max(1, units / workgroups).
                  An exchange takes no longer

    What a norm takes besides, a round trip to memory, the readers take instead. On an H200 a norm of 4096 columns takes
    4 us among the launches of a step; computed, it adds 1.5 and 2.8 us to q, k and v and to gate and up."""
    if not readers or not arch.launch_us:
        return "launch"
    k, m, layout = readers[0].k, readers[0].m, readers[0].layout_read
    if any(reader.layout_read != layout for reader in readers):
        return "launch"
    times: dict[NormPlace, float] = {"launch": arch.launch_us}
    if m == 1 and layout == "rows" and holds_norm(k, arch):
        groups = sum(_workgroups(replace(reader, eps=0.0), arch) for reader in readers)
        times["computed"] = _us(groups * k * 8, CACHE * arch.bandwidth)
    if before is not None and _defers(before, readers, layout, arch):
        sums = sum(_workgroups(reader, arch) for reader in readers) * m * k / SUMMED[kind_of(layout)] * 4
        times["deferred"] = _us(sums, SUMS[kind_of(layout)] * arch.bandwidth)
        if isinstance(before, Linear):
            times["deferred"] += blocks_us(before, layout, arch)
    return min(times, key=lambda name: times[name])


def blocks_us(op: Linear, layout: str, arch: Device) -> float:
    """Microseconds that a layer takes more as one that prepares a norm in a layout, whose workgroups have whole blocks:
    see `place`."""
    return idle_us(op, [_workgroups(one, arch) for one in (replace(op, norm_out=layout), op)], arch)


def idle_us(op: Linear | ExpertDown, workgroups: Sequence[int], arch: Device) -> float:
    """Microseconds that a layer of one token takes more with so many workgroups than with another number of them: see
    `place`."""
    idle = [max(1.0, arch.units / count) for count in workgroups]
    weights = sum(n * op.k / BLOCK * block_bytes(fmt) for fmt, n in op.weights)
    weights *= op.used if isinstance(op, ExpertDown) else 1
    return _us(weights, arch.bandwidth) * (idle[0] - idle[1])


def _defers(before: Linear | AllReduce, readers: Sequence[Linear | GateUp], layout: str, arch: Device) -> bool:
    """Whether there are kernels for it. In the layout "rows" a workgroup of the layer before has a block of 32 rows:
    none for devices whose workgroups of GEMVs are to be single waves."""
    layers = [before, *readers] if isinstance(before, Linear) else readers
    if kind_of(layout) == "lanes":
        same = before.m <= LANES_ROWS and all(op.layout_read == layout for op in layers)
        return same and all(engine(product_of(op, arch)).completes_norms for op in layers)
    if layout != "rows" or before.m > FEW or (arch.lone_waves and isinstance(before, Linear)):
        return False
    return all(module_of(op, arch) is gemv for op in layers)


def _workgroups(op: Linear | GateUp, arch: Device) -> int:
    """Of the kernel with its default plan."""
    space = plans(op, arch)
    return space.kernel(space.default).workgroups


def _us(size: float, bandwidth: float) -> float:
    """Microseconds for so many bytes at so many GB/s."""
    return size / bandwidth * 1e-3
