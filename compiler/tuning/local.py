"""Tuning on this machine's device: plans -> measurements and checks, through worker processes that build and one that
runs.

`Local` is what the search is driven with. `PlanBuilder` and `PlanRunner` are the same for MetaSchedule, whose builders
and runners see the reference of a workload with a plan's annotations instead of a kernel.
"""

import shutil
import tempfile
from pathlib import Path

from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
from tvm.s_tir.meta_schedule.runner import PyRunner, PyRunnerFuture, RunnerResult

from mlc_amd.compiler.tuning.build import Builder, target
from mlc_amd.compiler.tuning.gate import check
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.session import Session
from mlc_amd.schedules.tuning.database import Checked, Measured
from mlc_amd.schedules.tuning.session import BATCH
from mlc_amd.schedules.tuning.spaces import space
from mlc_amd.schedules.tuning.traces import plan_of
from mlc_amd.schedules.tuning.workload import Workload


class Local:
    """Builds, measures and checks plans for one arch. A context manager.

    kind: "cpu", "rocm" or "vulkan"; arch: its name. device: which one, as `Session` takes it. workers: processes that
    build. root: where candidates go; default a folder that goes with this. UserError, when something is measured, if no
    device here fits.
    """

    runner = "local"

    def __init__(
        self, kind: str, arch: str, device: str | None = None, workers: int | None = None, root: Path | None = None
    ):
        self.kind, self.arch = kind, arch
        self._temporary = tempfile.mkdtemp(prefix="mlc-amd-tune-") if root is None else None
        self.root = Path(root or self._temporary)
        self.builder, self.session = Builder(kind, arch, self.root, workers), Session(device)
        self._untuned: dict[Workload, tuple[Path | None, str | None]] = {}
        self._defaults: dict[Workload, object] = {}

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.builder.close()
        self.session.close()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def batch(self) -> int:
        """How many plans to measure together."""
        return BATCH

    def measure(self, jobs, progress=lambda done, total: None) -> list[Measured]:
        """A Measured for each (workload, plan), in order. Each workload's plans are timed beside its untuned kernel,
        which is the default plan's. progress(jobs done, jobs) as they are."""
        built = self._build(jobs)
        wanted = {str(folder) for folder, error in built if error is None}
        references = [self._untuned[workload] for workload in dict.fromkeys(workload for workload, _ in jobs)]
        folders = dict.fromkeys(str(folder) for folder, error in [*references, *built] if error is None)
        found, failed = {}, sum(error is not None for _, error in built)

        def note(folder: str, result: dict) -> None:
            if folder in wanted:
                found[folder] = result
                progress(len(found) + failed, len(jobs))

        # references first: the first of a workload is what its others are timed beside
        results = dict(zip(folders, self.session.measure(folders, note), strict=True)) if wanted else {}
        measured = [self._measured(error, results.get(str(folder))) for folder, error in built]
        for folder, _ in built:
            self._drop(folder)
        return measured

    def _measured(self, error: str | None, result: dict | None) -> Measured:
        facts = {
            "device": self.session.facts.get("device", ""),
            "driver": self.session.facts.get("driver", ""),
            "runner": self.runner,
        }
        if error or result["error"] is not None:
            return Measured(None, error or result["error"], **facts)
        return Measured(result["seconds"], runs=result["runs"], **facts)

    def gate(self, workload: Workload, plan) -> Checked:
        """Whether a plan's kernel computes what the untuned one does, on this device; see gate.py."""
        [(tuned, error)] = self._build([(workload, plan)])
        untuned, reason = self._untuned[workload]
        try:
            if reason or error:
                return Checked("", False, error=f"the untuned kernel does not build: {reason}" if reason else error)
            return check(self.session, untuned, tuned)
        finally:
            self._drop(tuned)

    def _build(self, jobs) -> list[tuple[Path | None, str | None]]:
        """As `Builder.build`; the default plan's kernel is the untuned one, which each workload needs and keeps."""
        missing = [
            workload for workload in dict.fromkeys(workload for workload, _ in jobs) if workload not in self._untuned
        ]
        others = [(workload, plan) for workload, plan in jobs if not self._is_default(workload, plan)]
        built = self.builder.build([*((workload, None) for workload in missing), *others])
        self._untuned |= zip(missing, built, strict=False)
        tuned = iter(built[len(missing) :])
        return [self._untuned[workload] if self._is_default(workload, plan) else next(tuned) for workload, plan in jobs]

    def _is_default(self, workload: Workload, plan) -> bool:
        if plan is None:
            return True
        if workload not in self._defaults:
            choices = space(workload, target(self.kind, self.arch).arch)
            self._defaults[workload] = choices and choices.default
        return plan == self._defaults[workload]

    def _drop(self, folder: Path | None) -> None:
        """Thousands of candidates would fill a small disk. Untuned kernels stay."""
        if folder and self._temporary and all(folder != kept for kept, _ in self._untuned.values()):
            shutil.rmtree(folder, ignore_errors=True)


# ---- MetaSchedule's interfaces


@derived_object
class PlanBuilder(PyBuilder):
    """MetaSchedule's builder: the plan that a module's annotations say, built. The artifact's path is the candidate's
    folder."""

    def __init__(self, builder: Builder, arch):
        super().__init__()
        self.builder, self.arch = builder, arch

    def build(self, build_inputs) -> list:
        jobs = []
        for item in build_inputs:
            workload = Workload.of(item.mod)
            jobs.append((workload, plan_of(Schedule(item.mod), space(workload, self.arch))))
        built = self.builder.build(jobs)
        return [BuilderResult(None if error else str(folder), error) for folder, error in built]


@derived_object
class Done(PyRunnerFuture):
    """A result that is there."""

    def __init__(self, result):
        super().__init__()
        self._result = result

    def done(self) -> bool:
        return True

    def result(self):
        return self._result


@derived_object
class PlanRunner(PyRunner):
    """MetaSchedule's runner: measures candidates' folders."""

    def __init__(self, session: Session):
        super().__init__()
        self.session = session

    def run(self, runner_inputs) -> list:
        try:
            results = self.session.measure([str(item.artifact_path) for item in runner_inputs])
        except UserError as e:  # MetaSchedule knows results only
            results = [{"error": str(e)}] * len(runner_inputs)
        return [Done(RunnerResult(None if r["error"] else r["runs"], r["error"])) for r in results]
