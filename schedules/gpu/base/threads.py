"""How many threads a workgroup has whose threads have a few columns of a row each: the plan of these kernels, and the
plans worth measuring."""

from collections.abc import Callable
from dataclasses import dataclass

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.space import Kernel, Space

WAVES = (1, 2, 4, 8)  # choices of the waves of a workgroup
SUMS = 256  # float32 accumulators of a lane, at most: more leave no registers for anything else
CHOICES = {"threads": (32, 64, 128, 256, 512, 1024)}


@dataclass(frozen=True)
class ThreadsPlan:
    """threads: of a workgroup; whole waves."""

    threads: int


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


def threads_space(arch: Device, kernel: Callable[[ThreadsPlan], Kernel]) -> Space:
    return Space(ThreadsPlan, CHOICES, ThreadsPlan(threads_of(arch)), kernel)


def columns_space(k: int, m: int, width: int, arch: Device) -> Space:
    """The space of a kernel in which a thread has `width` of the k columns of one of m rows."""

    def kernel(plan: ThreadsPlan) -> Kernel:
        threads = threads_of(arch, plan)
        return Kernel(threads, -(-k // (threads * width)) * m, threads, width * 4)

    return threads_space(arch, kernel)
