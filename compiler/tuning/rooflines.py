"""Rooflines: lower bounds of the time of a task's call on a machine.

`rates` and `roofline` compute them from tables of bandwidth and arithmetic. `measure` measures them for kernels of a
CPU: default kernels and kernels that do less work are timed in interleaved rounds.
"""

import shutil
from collections.abc import Callable

from mlc_amd.compiler.tuning.build import build_bounds
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.gpus import limits, peak_bandwidth
from mlc_amd.runtime.measure.measurer import Measurer

# Rates (see `rates`) to estimate shares of the time if neither a measurement nor a table has them.
GUESS = 50e9, 500e9, 0.0
# Operations per clock of a core, by its instruction set, and its clock in Hz: rough, from product pages. GPUs have
# theirs in runtime/gpus.py.
CPU_OPS = {"Vnni512": 256, "Zen4": 128, "AvxVnni": 128, "Avx2": 64, "Portable": 16}
CPU_FLOAT_OPS = {"Vnni512": 64, "Zen4": 32, "AvxVnni": 32, "Avx2": 32, "Portable": 8}  # float32, for attention
CPU_CLOCK = 3e9


def rates(arch, threads: int | None = None, bandwidth: float = 0.0) -> tuple[float, float, float]:
    """(bytes, operations, operations of attention) per second; 0 if unknown. The third is 0 for archs whose attention
    uses the same units as other kernels. threads, bandwidth (bytes per second): of a CPU."""
    if arch.api == "cpu":
        isa, clocks = arch.isa.__name__, (threads or 1) * CPU_CLOCK
        return bandwidth, clocks * CPU_OPS[isa], clocks * CPU_FLOAT_OPS[isa]
    found, unit = limits(arch), "matrix16" if arch.matrix else "dot4" if arch.dot else "fma"
    return found.bandwidth, found.rates.get(unit, 0.0), 0.0  # a profile for any GPU has no rates


def roofline(bandwidth: float, peak: float = 0.0, floats: float = 0.0) -> Callable[..., float]:
    """A function that returns the lower bound of a task's call in seconds. bandwidth, peak, floats: the result of
    `rates`. Its argument `device` is the name of the device that measured the task: if its product is known, its
    bandwidth counts."""

    def seconds(task: Task, device: str = "") -> float:
        used = floats or peak if task.workload.name == "attention" else peak
        _, gbps = peak_bandwidth(device) or ("", bandwidth / 1e9)
        return max(task.bytes / gbps / 1e9 if gbps else 0.0, task.flops / used if used else 0.0)

    return seconds


def measure(tasks, arch, device: str | None = None, progress=lambda done, total: None) -> dict[str, float]:
    """{key of a workload: lower bound as a share of the default kernel's time}, for linear layers and attention on a
    CPU. device: as for `Local`. Raises UserError if a kernel does not run."""
    found = {}
    with temporary("rooflines") as root, Measurer(device) as measurer:
        for task in tasks:
            folder = root / task.workload.key
            found[task.workload.key] = _share(measurer, *build_bounds(task.workload, arch.name, folder))
            shutil.rmtree(folder)
            progress(len(found), len(tasks))
    return found


def _share(measurer, untuned, bounds) -> float:
    """The lower bound as a share of the default kernel's time. For each case: of each kind of bound, the fastest
    kernel; of all kinds, the largest time."""
    order = [untuned, *(candidate for kind in bounds.values() for candidate in kind)]
    default, *rest = measurer.interleaved([candidate.folder for candidate in order])
    rest, kinds = iter(rest), []
    for kind in bounds.values():
        kinds.append([min(cases) for cases in zip(*(next(rest) for _ in kind), strict=True)])
    return sum(max(cases) for cases in zip(*kinds, strict=True)) / sum(default)
