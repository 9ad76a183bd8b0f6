"""Rooflines: the shortest time that a task's call can take on a machine.

By `rates` from tables of bandwidth and arithmetic; for a CPU's kernels also measured: default kernels and their lower
bounds, timed in interleaved rounds.
"""

import shutil
from collections.abc import Callable

from mlc_amd.compiler.tuning.build import build_bounds
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.gpus import limits, peak_bandwidth
from mlc_amd.runtime.measure.measurer import Measurer

# Where neither a measurement nor a table has them: bytes and operations per second, for shares of the time.
GUESS = 50e9, 500e9, 0.0
# Operations per clock of a core, by its multipliers, and the clock: rough, from product pages. GPUs: runtime/gpus.py.
CPU_OPS = {"Vnni512": 256, "Zen4": 128, "AvxVnni": 128, "Avx2": 64, "Portable": 16}
CPU_FLOAT_OPS = {"Vnni512": 64, "Zen4": 32, "AvxVnni": 32, "Avx2": 32, "Portable": 8}  # attention's, float32
CPU_CLOCK = 3e9


def rates(arch, threads: int | None = None, bandwidth: float = 0.0) -> tuple[float, float, float]:
    """(bytes, operations, operations of attention where it has no matrix or dot product instructions) per second; 0
    where that is not known. threads, bandwidth: of a CPU."""
    if arch.api == "cpu":
        isa, clocks = arch.isa.__name__, (threads or 1) * CPU_CLOCK
        return bandwidth, clocks * CPU_OPS[isa], clocks * CPU_FLOAT_OPS[isa]
    found, unit = limits(arch), "matrix16" if arch.matrix else "dot4" if arch.dot else "fma"
    return found.bandwidth, found.rates.get(unit, 0.0), 0.0  # 0 of a profile for any GPU


def roofline(bandwidth: float, peak: float = 0.0, floats: float = 0.0) -> Callable[..., float]:
    """Seconds of a task's call at best, at `rates`. device: the name of the one that measured it, whose bandwidth
    counts where its product is known."""

    def seconds(task: Task, device: str = "") -> float:
        used = floats or peak if task.workload.name == "attention" else peak
        _, gbps = peak_bandwidth(device) or ("", bandwidth / 1e9)
        return max(task.bytes / gbps / 1e9 if gbps else 0.0, task.flops / used if used else 0.0)

    return seconds


def measure(tasks, arch, device: str | None = None, progress=lambda done, total: None) -> dict[str, float]:
    """By workload's key, the lower bound as a share of the default kernel's time, for tasks of linear layers and
    attention on a CPU. device: as for `Local`. UserError if a kernel does not run."""
    found = {}
    with temporary("rooflines") as root, Measurer(device) as measurer:
        for task in tasks:
            folder = root / task.workload.key
            found[task.workload.key] = _share(measurer, *build_bounds(task.workload, arch.name, folder))
            shutil.rmtree(folder)
            progress(len(found), len(tasks))
    return found


def _share(measurer, untuned, bounds) -> float:
    """In each case the largest kind of bound counts, of each kind the fastest kernel."""
    order = [untuned, *(candidate for kind in bounds.values() for candidate in kind)]
    default, *rest = measurer.interleaved([candidate.folder for candidate in order])
    rest, kinds = iter(rest), []
    for kind in bounds.values():
        kinds.append([min(cases) for cases in zip(*(next(rest) for _ in kind), strict=True)])
    return sum(max(cases) for cases in zip(*kinds, strict=True)) / sum(default)
