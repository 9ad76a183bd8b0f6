"""How many threads a workgroup has whose threads have a few columns of a row each: the plan of these kernels, and the
plans worth measuring."""

from collections.abc import Callable
from dataclasses import dataclass

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.operators import Embed, Quantize
from mlc_amd.schedules.space import Kernel, Space, planned

WAVES = (1, 2, 4, 8)  # choices of the waves of a workgroup
SUMS = 256  # float32 accumulators of a lane, at most: more leave no registers for anything else
CHOICES = {"threads": (32, 64, 128, 256, 512, 1024)}


@dataclass(frozen=True)
class ThreadsPlan:
    threads: int  # of a workgroup; whole waves


def checked_threads(arch: Device, threads: int) -> int:
    """The number itself. ValueError for what a workgroup cannot have."""
    if threads > arch.threads or threads % arch.wave:
        raise ValueError(
            f"{arch.name} has workgroups of up to {arch.threads} threads in waves of {arch.wave}, not of {threads}"
        )
    return threads


def threads_of(arch: Device, plan: ThreadsPlan | None = None) -> int:
    """Threads of a workgroup: the plan's, by default as many as the arch allows. ValueError as of `checked_threads`."""
    return checked_threads(arch, plan.threads if plan else arch.threads)


planned_threads = planned(CHOICES, lambda op, arch: ThreadsPlan(threads_of(arch)))


def columns_space(width: int) -> Callable[[Embed | Quantize, Device], Space]:
    """The plans of a kernel in which a thread has `width` of the columns of a row."""

    @planned_threads
    def kernel(op: Embed | Quantize, arch: Device, plan: ThreadsPlan) -> Kernel:
        threads = threads_of(arch, plan)
        return Kernel(threads, -(-op.k // (threads * width)) * op.m, threads, width * 4)

    return kernel
