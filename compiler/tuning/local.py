"""Tuning on this machine's device. In: plans. Out: measurements and verifications. Worker processes build candidates;
one process runs them. The other runners have the same interface."""

import shutil
from contextlib import ExitStack
from pathlib import Path

from mlc_amd.compiler.tuning.build import Builder, target
from mlc_amd.compiler.tuning.database import Checked, Measured
from mlc_amd.compiler.tuning.session import BATCH
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.measure.candidate import read
from mlc_amd.runtime.measure.measurer import Measurer
from mlc_amd.schedules.operators import Operator
from mlc_amd.schedules.space import space


class Local(Closing):
    """Builds, measures and verifies plans for one arch. A context manager.

    kind: "cpu", "rocm" or "vulkan"; arch: its name. device: see `Measurer`. workers: number of processes that build.
    root: the folder for candidates, by default a temporary one. measurer: replaces the `Measurer` of this machine's
    device. `measure` raises UserError if the device cannot be used.
    """

    runner = "local"

    def __init__(
        self,
        kind: str,
        arch: str,
        device: str | None = None,
        workers: int | None = None,
        root: Path | None = None,
        measurer=None,
    ):
        self.kind, self.arch = kind, target(kind, arch).archs[0]
        self._temporary = root is None
        self._held = ExitStack()
        self.root = Path(root) if root else self._held.enter_context(temporary("tune"))
        self.builder, self.measurer = Builder(kind, arch, self.root, workers), measurer or Measurer(device)
        self._untuned: dict[tuple, Path | str] = {}  # (workload, None): the result of `Builder.build`

    def close(self) -> None:
        self.builder.close()
        self.measurer.close()
        self._held.close()

    def batch(self) -> int:
        """The number of plans to measure together."""
        return BATCH

    def measure(self, jobs, progress=lambda done, total: None) -> list[Measured | None]:
        """A Measured for each (workload, plan), in order; None if it was not measured. The plans of a workload are
        timed in turn with its untuned kernel, which is that of the default plan. progress(finished jobs, jobs): called
        after each job."""
        built = self._build(jobs)
        failed, found = sum(isinstance(made, str) for made in built), {}
        wanted = {str(made) for made in built if isinstance(made, Path)}
        references = [self._untuned[workload, None] for workload, _ in jobs]
        folders = dict.fromkeys(str(made) for made in [*references, *built] if isinstance(made, Path))

        def note(folder: str, result: dict) -> None:
            if folder in wanted:
                found[folder] = result
                progress(len(found) + failed, len(jobs))

        # References come first: the first candidate of a workload is the one with which the others are compared.
        results = dict(zip(folders, self.measurer.measure(folders, note), strict=True)) if wanted else {}
        measured = []
        for made in built:
            result = {"error": made} if isinstance(made, str) else results.get(str(made))
            measured.append(result and Measured.of(result, **self.measurer.facts, runner=self.runner))
            self._drop(made)
        return measured

    def verify(self, workload: Operator, plan) -> Checked:
        """Compares the results of a plan's kernel with those of the untuned kernel."""
        untuned, tuned = self._build([(workload, None), (workload, plan)])
        try:
            if isinstance(tuned, str):
                return Checked("", False, error=tuned)
            if isinstance(untuned, str):
                return Checked("", False, error=f"the untuned kernel does not build: {untuned}")
            try:
                self._open(tuned)
            except UserError as e:
                return Checked("", False, error=str(e))
            return Checked(**self.measurer.compare(untuned, tuned))
        finally:
            self._drop(tuned)

    def _open(self, folder: Path) -> None:
        """Raises UserError if no device of this machine can run the candidate."""
        self.measurer.start(read(folder))

    def _build(self, jobs) -> list[Path | str]:
        """Like `Builder.build`. Untuned kernels, which are also those of default plans, are built once and kept."""
        jobs = [(workload, None if self._is_default(workload, plan) else plan) for workload, plan in jobs]
        untuned = [(workload, None) for workload, _ in jobs]
        missing = list(dict.fromkeys(job for job in [*untuned, *jobs] if job not in self._untuned))
        built = self._untuned | dict(zip(missing, self.builder.build(missing), strict=True))
        self._untuned |= {job: built[job] for job in untuned}
        return [built[job] for job in jobs]

    def _is_default(self, workload: Operator, plan) -> bool:
        try:
            return plan is None or ((found := space(workload, self.arch)) is not None and plan == found.default)
        except (ValueError, UserError):  # an invalid workload: building it fails, too
            return False

    def _drop(self, made: Path | str) -> None:
        """Removes the folder of a candidate, as thousands would fill a small disk. Untuned kernels stay."""
        if self._temporary and isinstance(made, Path) and made not in self._untuned.values():
            shutil.rmtree(made, ignore_errors=True)
