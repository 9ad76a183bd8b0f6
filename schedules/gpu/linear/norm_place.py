"""The rule that decides where an RMS norm before linear layers of few tokens is computed (`NormPlace`):

"launch"    in a kernel of its own
"computed"  in every workgroup of the layers that read it (`gemv_rows.emit_norm`); for one token and int8 formats
"deferred"  partly in the layer or exchange before it, partly in the layers that read it (`deferred_norm.py`)
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

CACHE = 1.5  # bandwidth of caches divided by that of memory
# The same factor for reading sums of squares, by layout. With "lanes" they are read between loads of weights. (A gate
# and up of 14336 rows of 8192 columns and 16 tokens, and the exchange before it, take 1.8 us more with them on an
# H200.)
SUMS = {"rows": CACHE, "lanes": 3.0}
# Upper limit of the tokens for deferred norms in the layout "lanes". With them, the kernels of steps of 8, 16, 32 and
# 64 tokens take 12, 9, 6 and 3 % less time on an H100.
LANES_ROWS = 64


@functools.cache  # layers are alike, and two passes ask
def place(before: Linear | AllReduce | None, readers: tuple[Linear | GateUp, ...], arch: Device) -> NormPlace:
    """The place that takes the least time on an arch, among those for which there are kernels. before: the layer or
    exchange that computes the norm's input, or None for other operators. readers: the layers that read the norm. The
    estimates, in microseconds:

        launch    launch_us: the time of a launch that depends on the launch before it
        computed  sum over readers of workgroups * k * 8 bytes / (CACHE * bandwidth): each reads x and g in float32
        deferred  sum over readers of workgroups * m * k / SUMMED * 4 bytes / (SUMS * bandwidth), to read the sums of
                  squares; plus, for a layer before, bytes of its weights / bandwidth * (idle with whole blocks - idle),
                  where idle = max(1, units / workgroups) is the factor by which compute units without work slow it down

    The norm's round trip to memory is left out, because the readers have it in any case. On an H200 a norm of 4096
    columns takes 4 us among the launches of a step; computed in the readers, it adds 1.5 us to q, k and v, and 2.8 us
    to gate and up."""
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
    """The microseconds by which a layer takes longer if it prepares a norm in a layout, as its workgroups must then
    have whole blocks of rows; see `place`."""
    return idle_us(op, [_workgroups(one, arch) for one in (replace(op, norm_out=layout), op)], arch)


def idle_us(op: Linear | ExpertDown, workgroups: Sequence[int], arch: Device) -> float:
    """The microseconds by which a layer of one token takes longer with workgroups[0] workgroups than with
    workgroups[1]; see `place`."""
    idle = [max(1.0, arch.units / count) for count in workgroups]
    weights = sum(n * op.k / BLOCK * block_bytes(fmt) for fmt, n in op.weights)
    weights *= op.used if isinstance(op, ExpertDown) else 1
    return _us(weights, arch.bandwidth) * (idle[0] - idle[1])


def _defers(before: Linear | AllReduce, readers: Sequence[Linear | GateUp], layout: str, arch: Device) -> bool:
    """Whether there are kernels for a deferred norm in a layout. In the layout "rows", a workgroup of the layer before
    must have a block of 32 rows, which excludes devices whose GEMVs should have workgroups of a single wave."""
    layers = [before, *readers] if isinstance(before, Linear) else readers
    if kind_of(layout) == "lanes":
        same = before.m <= LANES_ROWS and all(op.layout_read == layout for op in layers)
        return same and all(engine(product_of(op, arch)).completes_norms for op in layers)
    if layout != "rows" or before.m > FEW or (arch.lone_waves and isinstance(before, Linear)):
        return False
    return all(module_of(op, arch) is gemv for op in layers)


def _workgroups(op: Linear | GateUp, arch: Device) -> int:
    """The number of workgroups of the kernel with its default plan."""
    space = plans(op, arch)
    return space.kernel(space.default).workgroups


def _us(size: float, bandwidth: float) -> float:
    """The microseconds for `size` bytes at `bandwidth` GB/s."""
    return size / bandwidth * 1e-3
