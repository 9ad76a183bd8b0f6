"""`mlc-amd tune`: searches for the best plan of every kernel that a model needs on one GPU or CPU, and keeps what it
finds.

The winners are in the user's cache (schedules/tuning/database.py), where `mlc-amd compile` looks. A run may be stopped
at any time; the next one goes on, and measures nothing twice.
"""

import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import threads_asked
from mlc_amd.tools import display, models

SHORT = {"o": "output"}
BUDGET = "10m"
KIT_SIZE = 64  # candidates of a kit
SLICE = 8  # plans that are measured together on this machine: what Ctrl-C may lose


def run(
    model: str | None = None,
    *,
    target: str = "cpu",
    arch: str = "native",
    ctx: int | None = None,
    synthetic: str | None = None,
    budget: str | None = None,
    trials: int | None = None,
    runner: Literal["local", "rpc", "static"] = "local",
    tracker: str | None = None,
    key: str | None = None,
    device: str | None = None,
    seed: int = 1,
    list: bool = False,
    report: bool = False,
    output: str | None = None,
    export_kit: str | None = None,
    import_kit: str | None = None,
) -> None:
    """Finds the fastest way to build each kernel that a model needs on one machine. `mlc-amd compile` then uses what
    was found.

    Stop it with Ctrl-C at any time and run it again to go on: no measurement is lost or repeated. Models share what
    they have in common.

    For a machine that cannot be reached: --export-kit DIR writes a batch of kernels with a program that measures them,
        without TVM; run `python3 run.py` in a copy of DIR over there, bring DIR/results.json back, and give
        --import-kit DIR (and --export-kit DIR2 for another round).

    Args:
        model: the GGUF file (default: the bundled demo model).
        target: what to tune for: cpu, rocm or vulkan.
        arch: native (this machine's) or a name, see `mlc-amd compile --help`.
        ctx: tokens that the KV cache holds, as for compile: attention depends on it.
        synthetic: instead of a file, a model of that shape: PRESET:FORMAT as llama3-8b:q4_0
        budget: for how long, as 90s, 10m or 1h30m (default: 10m, or as long as --trials takes).
        trials: measure so many plans; for a kit, its size (default there: 64).
        runner: who measures: local (this machine's device), rpc (machines that run `mlc-amd tune-server`), static
            (nobody: a model of the GPU looks at the compiled code).
        tracker: HOST:PORT of the tracker, for runner rpc.
        key: the servers to use, for runner rpc (default: the arch's name).
        device: the GPU, for target vulkan: its number in `mlc-amd doctor` or a part of its name; for cpu, how many
            threads to use.
        seed: of the search: another one tries other plans.
        list: only list the kernels: how often they are called, their share of the time, what was found.
        report: only show what was found so far, beside rooflines (those of a CPU are measured: a second a kernel), with
            -o also as a plot.
        output: for --report: the plot's file, .svg, .png or .pdf; needs matplotlib.
        export_kit: write a kit into this folder instead of measuring here.
        import_kit: take over what a kit measured.
    """
    limits = Limits.of(budget, trials)
    if seed < 1:
        raise UserError(f"--seed is {seed}: it must be at least 1")
    if output and not report:
        raise UserError(
            "-o is the plot's file, for --report; results of tuning need none: `mlc-amd compile` finds them"
        )
    if (tracker or key) and runner != "rpc":
        raise UserError("--tracker and --key are for --runner rpc")
    if runner == "rpc" and not tracker and not (list or report or export_kit or import_kit):
        raise UserError("--runner rpc needs --tracker HOST:PORT, where `mlc-amd tune-server` has announced machines")
    if import_kit or export_kit:
        from mlc_amd.tools import tune_kit

        if import_kit:
            if model or synthetic:
                raise UserError("--import-kit knows its model from the kit: leave the model out")
            tune_kit.bring(
                Path(import_kit).expanduser(), export_kit and Path(export_kit).expanduser(), trials or KIT_SIZE, seed
            )
        else:
            subject = Subject.of(model, synthetic, target, arch, ctx, device)
            tune_kit.export(subject, Path(export_kit).expanduser(), trials or KIT_SIZE, seed)
        return
    subject = Subject.of(model, synthetic, target, arch, ctx, device)
    if list or report:
        from mlc_amd.tools import tune_report

        if output:
            tune_report.check_output(Path(output).expanduser())
        rows = tune_report.rows(subject, tune_report.rooflines(subject) if report else None)
        print((tune_report.listing if list else tune_report.table)(subject, rows))
        if output:
            tune_report.plot(subject, rows, Path(output).expanduser())
        return
    slices = SLICE if runner == "local" else None
    _tune(subject, lambda: RUNNERS[runner](subject, tracker, key, device), slices, limits, seed)


@dataclass(frozen=True)
class Limits:
    """When to stop. None: no such limit."""

    seconds: float | None
    trials: int | None

    @classmethod
    def of(cls, budget: str | None, trials: int | None) -> "Limits":
        """UserError for a budget that is no time, or nothing to do."""
        if trials is not None and trials < 1:
            raise UserError(f"--trials is {trials}: it must be at least 1")
        if budget is None:
            return cls(None if trials else _duration(BUDGET), trials)
        return cls(_duration(budget), trials)


def _duration(text: str) -> float:
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower())
    seconds = (
        sum(float(part or 0) * unit for part, unit in zip(parts.groups(), (3600, 60, 1), strict=True)) if parts else 0.0
    )
    if seconds <= 0:
        raise UserError(f"--budget wants a time as 90s, 10m or 1h30m, not {text!r}")
    return seconds


@dataclass(frozen=True)
class Subject:
    """What is tuned: a model's tasks on one arch. name: the model's; kind: the target's; tasks: all of them, also
    without choices; threads: how many of a CPU's are used, None for a GPU."""

    name: str
    kind: str
    arch: object
    tasks: list
    threads: int | None = None

    @classmethod
    def of(
        cls, model: str | None, synthetic: str | None, kind: str, arch: str, ctx: int | None, device: str | None
    ) -> "Subject":
        """UserError for what is not known, or more than one arch."""
        if model and synthetic:
            raise UserError("give a model or --synthetic, not both")
        path = None if synthetic else Path(model).expanduser() if model else models.default_model()
        if path and models.is_artifact(path):
            raise UserError(f"{path} is a folder: give the GGUF file that it was made from")
        if kind == "vulkan" and arch in ("native", "auto"):
            from mlc_amd.runtime.devices.vulkan.gpu import profile_here

            arch = profile_here(device)
        with models.open_source(path, synthetic) as source:
            from mlc_amd.compiler.pipeline import make_target
            from mlc_amd.compiler.tuning.tasks import extract

            backend = make_target(kind, arch)
            if len(backend.archs) > 1:
                raise UserError(f"--arch {arch}: tune for one of them at a time")
            threads = threads_asked(device) if kind == "cpu" else None
            return cls(synthetic or path.name, kind, backend.archs[0], extract(source, backend, ctx), threads)

    @property
    def shape(self) -> str:
        """For people."""
        return f"{self.name} on {self.kind} {self.arch.name}"

    @property
    def names(self) -> tuple[str, str, str]:
        """Of target, arch and model."""
        return self.kind, self.arch.name, self.name


# ---- who measures


def _local(subject: Subject, tracker, key, device):
    from mlc_amd.compiler.tuning.local import Local

    return Local(subject.kind, subject.arch.name, device)


def _rpc(subject: Subject, tracker, key, device):
    from mlc_amd.compiler.tuning.rpc import Remote, Tracker, address

    key = key or subject.arch.name
    try:  # servers may come later and are waited for, a tracker is not
        Tracker(address(tracker)).servers(key)
    except OSError as e:
        advice = "check --tracker, or start one: mlc-amd tune-server --tracker-only HOST:PORT"
        raise UserError(f"no tracker at {tracker} ({e.strerror or e}): {advice}") from e
    return Remote(*subject.names[:2], tracker=tracker, key=key, say=display.message)


def _static(subject: Subject, tracker, key, device):
    from mlc_amd.compiler.tuning.static import Static

    return Static(subject.kind, subject.arch.name)


RUNNERS: dict[str, Callable] = {"local": _local, "rpc": _rpc, "static": _static}


class _Measuring:
    """A runner whose work Ctrl-C ends: in slices, of which those that are done count. `stopped`: somebody has asked for
    that.

    An exception that is raised while TVM calls Python would come out as another one: it is only raised while the runner
    works.
    """

    def __init__(self, make: Callable, slices: int | None, progress: Callable[[int], None]):
        """slices: plans in one, None: all there are."""
        self._make, self._slices, self._progress = make, slices, progress
        self._runner, self._done, self._waiting = make(), 0, False
        self.stopped = False
        self._before = signal.signal(signal.SIGINT, self._interrupt)

    def close(self) -> None:
        signal.signal(signal.SIGINT, self._before)
        self._runner.close()

    def _interrupt(self, *_) -> None:
        again, self.stopped = self.stopped, True
        if self._waiting or again:
            raise KeyboardInterrupt

    def measure(self, jobs) -> list:
        """As the runner's; None for what Ctrl-C has left undone. KeyboardInterrupt when nothing more is to be done."""
        if self.stopped:
            raise KeyboardInterrupt
        found = []
        try:
            self._waiting = True
            while len(found) < len(jobs):
                part, before = jobs[len(found) : len(found) + (self._slices or len(jobs))], self._done
                results = self._runner.measure(
                    part, progress=lambda done, total, before=before: self._progress(before + done)
                )
                found, self._done = found + results, before + len(part)
        except KeyboardInterrupt:
            self._waiting = False
            display.message("stopping: checking the best plans so far ...")
            self._runner.close()  # what its processes were doing is nobody's answer any more
            self._runner = self._make()
        finally:
            self._waiting = False
        return found + [None] * (len(jobs) - len(found))

    def gate(self, workload, plan):
        return self._runner.gate(workload, plan)

    def batch(self) -> int:
        """As the runner's."""
        return self._runner.batch()


def _tune(subject: Subject, make: Callable, slices: int | None, limits: Limits, seed: int) -> None:
    from mlc_amd.compiler.tuning.tasks import roofline
    from mlc_amd.schedules.tuning.database import Database
    from mlc_amd.schedules.tuning.session import Session, run
    from mlc_amd.tools import tune_report

    started = time.monotonic()
    with Database(subject.arch) as database:
        if database.torn:
            display.message(f"{database.folder}: the end of the last measurement's line was missing; it was dropped")
        session = Session(subject.tasks, subject.arch, database, roofline(*tune_report.machine(subject)), seed)
        if not session.tasks:
            raise UserError(f"no kernel of {subject.shape} has anything to choose")
        with display.budget_progress(f"tuning {subject.shape}", limits.seconds, limits.trials) as progress:
            measuring = _Measuring(make, slices, progress)
            try:
                limit = limits.trials, limits.seconds
                run(
                    session,
                    measuring.measure,
                    measuring.gate,
                    *limit,
                    measuring.batch,
                    lambda session: progress(session.trials),
                )
            except KeyboardInterrupt:
                measuring.stopped = True
            finally:
                measuring.close()
        rows = tune_report.rows(subject)
        failed, known = sum(row.failed for row in rows), sum(row.measured for row in rows)
        checked = f"{session.refuted} wrong{_unverified(session)}{_left(session)}"
        counts = f"{session.trials} plans measured, {checked}; {known} so far, {failed} failed"
        print(f"{subject.shape}: {counts}; {display.clock(time.monotonic() - started)}; {tune_report.gain(rows)}")
    if measuring.stopped:
        display.message("stopped; everything measured is kept: run it again to continue")
        raise KeyboardInterrupt


def _left(session) -> str:
    """ ", 3 to be checked in the next run" where there was no time for it."""
    left = len(session.unchecked())
    return f", {left} to be checked in the next run" if left else ""


def _unverified(session) -> str:
    """ ", 3 could not be checked (why)": of several reasons the one that was given most often. Empty where all could
    be."""
    if not session.unverified:
        return ""
    (why, _), *others = Counter(session.unverified.values()).most_common()
    reason = (why.splitlines() or ["no reason given"])[0] + ("; and others" if others else "")
    return f", {len(session.unverified)} could not be checked ({reason})"
