"""How near a CPU's default kernels are to what the machine can do, measured: each is timed in turns with its bounds.

In: tasks and an arch whose code runs here. Out: for each task the share of its kernel's time that could not be saved.
"""

import shutil
import tempfile
from pathlib import Path

from mlc_amd.compiler.tuning.build import build_bounds
from mlc_amd.runtime.measure.session import Session


def measure(tasks, arch, device: str | None = None, progress=lambda done, total: None) -> dict[str, float]:
    """Workload's key -> the roofline's time as a share of the default kernel's, for tasks of linear layers and
    attention. device: as for `Local`. UserError if a kernel does not run."""
    found, root = {}, Path(tempfile.mkdtemp(prefix="mlc-amd-rooflines-"))
    try:
        with Session(device) as session:
            for task in tasks:
                found[task.workload.key] = _share(
                    session, *build_bounds(task.workload, arch.name, root / task.workload.key)
                )
                shutil.rmtree(root / task.workload.key)
                progress(len(found), len(tasks))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found


def _share(session, untuned, bounds) -> float:
    """In each case the slower kind of bound counts, of each kind the fastest."""
    order = [untuned, *(candidate for kind in bounds.values() for candidate in kind)]
    default, *rest = session.turns([candidate.folder for candidate in order])
    rest, kinds = iter(rest), []
    for kind in bounds.values():
        kinds.append([min(cases) for cases in zip(*(next(rest) for _ in kind), strict=True)])
    return sum(max(cases) for cases in zip(*kinds, strict=True)) / sum(default)
