"""`mlc-amd tune`: searches for the best plan of every kernel that a model needs on one GPU or CPU, and stores the
results.

Results are in the user's cache (compiler/tuning/database.py), where `mlc-amd compile` finds them. A run may be stopped
at any time. The next one continues, and measures nothing twice.
"""

import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from mlc_amd.runtime import extras
from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.errors import QUOTED, UsageError, UserError, one_line
from mlc_amd.runtime.host import cpu_flags, selected_threads
from mlc_amd.runtime.options import MANY, CompileOptions, Option, RunOptions, TargetOptions, option_of
from mlc_amd.runtime.sampling.settings import SamplingChanges
from mlc_amd.tools import target as targets
from mlc_amd.tools.hub import models
from mlc_amd.tools.measure import bandwidth
from mlc_amd.tools.options import Key, Synthetic, Tracker
from mlc_amd.tools.terminal import display

SHORT = {"o": "output"}
BUDGET = "10m"
KIT_SIZE = 64  # candidates in a kit
LEFT_OUT = {  # names of `kit.feed` for what was left out of a kit -> text
    "known": "were known",
    "stale": "are no plans any more",
    "missing": "are missing: run it again over there to continue",
}


def run(
    model: str | None = None,
    *,
    synthetic: Synthetic = None,
    budget: str | None = None,
    trials: Annotated[int | None, Option(
        "measure at most so many plans; of a kit: how many it holds",
        default="no limit; of a kit: 64", low=1, high=MANY)] = None,
    runner: Literal["local", "rpc"] = "local",
    tracker: Tracker = None,
    key: Key = None,
    device: Annotated[str | None, option_of(RunOptions, "device")] = None,
    gpus: Annotated[int, replace(option_of(CompileOptions, "gpus"), default="1")] = 1,
    mmproj: Annotated[str | None, replace(option_of(CompileOptions, "mmproj"), default="none is tuned")] = None,
    seed: Annotated[int, option_of(SamplingChanges, "seed")] = 1,
    list: bool = False,
    report: bool = False,
    output: str | None = None,
    export_kit: str | None = None,
    import_kit: str | None = None,
    plans: str | None = None,
    ship: str | None = None,
    options: TargetOptions,
) -> None:  # fmt: skip
    """Finds the fastest way to build each kernel that a model needs on one machine. `mlc-amd compile` then uses what
    was found.

    Stop it with Ctrl-C at any time and run it again to resume: no finished batch is lost or repeated. Models share what
    they have in common. Attention is timed within --ctx tokens; another --seed tries other plans. On a CPU, --device is
    the number of threads.

    For a machine that cannot be reached: --export-kit DIR writes a batch of kernels with a program that measures them,
        without TVM; run `python3 run.py` in a copy of DIR over there, bring DIR/results.json back, and give
        --import-kit DIR (and --export-kit DIR2 for another round).

    Args:
        model: the GGUF file, or OWNER/REPO:QUANT of huggingface.co (default: the bundled demo model).
        budget: for how long, as 90s, 10m or 1h30m (default: 10m, or as long as --trials takes).
        runner: who measures: local (this machine's device) or rpc (machines that run `mlc-amd tune-server`).
        list: only list the kernels: how often they are called, their share of the time, what was found.
        report: only show what was found so far, beside rooflines (those of a CPU are measured: a second a kernel), with
            -o also as a plot.
        output: for --report: the plot's file, .svg, .png or .pdf; needs matplotlib.
        export_kit: write a kit into this folder instead of measuring here.
        import_kit: take a kit's measurements.
        plans: a file of plans to measure first, a line each: {"op", "args", "plan"}, as files of shipped records have.
        ship: then write what is worth it as records for others: into DIR/ARCH.json, where DIR is dist/tuned of a
            checkout; records there that are no longer of use are removed.
    """
    seconds = time_limit(budget, trials)
    if not seed or seed < 1:  # None would mean a new seed each time, as in other commands
        raise UsageError("--seed of tune must be at least 1: the same one tries the same plans")
    if output and not report:
        why = "results of tuning need none: `mlc-amd compile` finds them"
        raise UsageError(f"-o is the plot's file, for --report; {why}")
    if (tracker or key) and runner != "rpc":
        raise UsageError("--tracker and --key are for --runner rpc")
    if runner == "rpc" and not tracker and not (list or report or export_kit or import_kit):
        raise UsageError("--runner rpc needs --tracker HOST:PORT, where `mlc-amd tune-server` has announced machines")
    kit, plot = (Path(path).expanduser() if path else None for path in (export_kit, output))
    if kit or not (list or report or import_kit):  # these search
        extras.require("xgboost")
    if plot:
        from mlc_amd.tools.measure import tune_report  # imports TVM

        tune_report.check_output(plot)
    if import_kit:
        if model or synthetic:
            raise UsageError("--import-kit knows its model from the kit: leave the model out")
        subject = _import_kit(Path(import_kit).expanduser(), kit, trials or KIT_SIZE, seed)
        if ship:
            _ship(subject, Path(ship).expanduser())
        return
    subject = Subject.of(model, synthetic, options, device, mmproj, gpus)
    subject.first = _plans(Path(plans).expanduser()) if plans else {}
    if kit:
        from mlc_amd.compiler.tuning.kit import check_folder

        check_folder(kit, subject.kind)
        with subject.session(seed) as session:
            _export_kit(subject, session, kit, trials or KIT_SIZE)
    elif list or report:
        from mlc_amd.tools.measure import tune_report

        rows = subject.rows(subject.bounds() if report else None)
        print((tune_report.listing if list else tune_report.table)(subject.shape, rows))
        if plot:
            tune_report.plot(subject.shape, rows, plot)
    else:
        _tune(subject, lambda: _runner(runner, subject, tracker, key, device), seconds, trials, seed)
    if ship:
        _ship(subject, Path(ship).expanduser())


def time_limit(budget: str | None, trials: int | None) -> float | None:
    """The seconds after which to stop; None: when `trials` are done. Raises UsageError for a budget that is no time, or
    is 0."""
    if trials and budget is None:
        return None
    text = budget or BUDGET
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip().lower())
    given = parts.groups() if parts else (0, 0, 0)
    seconds = sum(float(part or 0) * unit for part, unit in zip(given, (3600, 60, 1), strict=True))
    if seconds <= 0:
        raise UsageError(f"--budget {text!r} is not a time: write 90s, 10m or 1h30m")
    return seconds


class PlanLine(TypedDict):
    """A line of --plans."""

    op: str
    args: dict[str, Any]
    plan: dict[str, int]


@dataclass
class Subject:
    """What is tuned: a model's tasks on one arch. name: of the model. kind: of the target. tasks: all tasks, including
    those without choices. threads: number of a CPU's threads, None for a GPU. first: for a session."""

    name: str
    kind: str
    arch: Any
    tasks: list
    threads: int | None = None
    first: dict[str, list[dict]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: str | None,
        synthetic: str | None,
        options: TargetOptions,
        device: str | None,
        encoder: str | None = None,
        gpus: int = 1,
    ) -> "Subject":
        """encoder: the file of the model's image encoder. gpus: number of GPUs that share the model by tensor. Raises
        UserError for an unknown arch, or for several."""
        path = models.source_path(model, synthetic)
        if path and models.is_artifact(path):
            raise UserError(f"{path} is a folder: give the GGUF file that it was made from")
        kind, arch = targets.resolve(options.target, options.arch, device)
        with models.open_source(path, synthetic, encoder) as source:
            from mlc_amd.compiler.codegen.target import make_target
            from mlc_amd.compiler.pipeline import check_divided, divided
            from mlc_amd.compiler.tuning.tasks import extract

            backend = make_target(kind, arch)
            if len(backend.archs) > 1:
                raise UsageError(f"--arch {arch}: tune for one of them at a time")
            threads = selected_threads(device) if kind == "cpu" else None
            check_divided(source, gpus, kind)
            tasks = extract(divided(source, gpus), backend, options.ctx)
            return cls(path.name if path else synthetic or "", kind, backend.archs[0], tasks, threads)

    @property
    def shape(self) -> str:
        """A description for people."""
        return f"{self.name} on {self.kind} {self.arch.name}"

    @cached_property
    def rates(self) -> tuple[float, float, float]:
        """The result of `rooflines.rates`. A CPU's bandwidth is measured, if this machine can run its code."""
        from mlc_amd.compiler.tuning.rooflines import rates

        return rates(self.arch, self.threads, bandwidth.measure(self.threads) if self.here else 0.0)

    @property
    def here(self) -> bool:
        """Whether the arch is a CPU like this machine's."""
        return self.kind == "cpu" and cpu_flags().issuperset(self.arch.flags)

    @contextmanager
    def session(self, seed: int):
        """A TuningSession on the arch's database."""
        from mlc_amd.compiler.tuning.database import Database
        from mlc_amd.compiler.tuning.rooflines import roofline
        from mlc_amd.compiler.tuning.session import TuningSession

        with Database(self.arch) as database:
            for note in database.notes:
                display.message(note)
            try:
                yield TuningSession(self.tasks, self.arch, database, roofline(*self.rates), seed, self.first)
            except ValueError as error:
                raise UserError(f"--plans: {error}") from error

    def rows(self, bounds: dict[str, float] | None = None) -> list:
        """The result of `summary.rows`."""
        from mlc_amd.compiler.tuning.rooflines import GUESS, roofline
        from mlc_amd.compiler.tuning.summary import rows

        guess = roofline(*(rate or other for rate, other in zip(self.rates, GUESS, strict=True)))
        return rows(self.tasks, self.arch, roofline(*self.rates), guess, bounds)

    def bounds(self) -> dict[str, float]:
        """The measured lower bounds (`rooflines.measure`) of tasks with measurements, if the arch is a CPU like this
        machine's. Takes about a second for each kernel."""
        from mlc_amd.compiler.tuning import rooflines, summary

        if not self.here:
            return {}
        with display.compile_progress("measuring rooflines") as progress:
            tasks = summary.measured(self.tasks, self.arch)
            return rooflines.measure(tasks, self.arch, str(self.threads), partial(progress, "rooflines"))


# ---- runners


def _runner(name: str, subject: Subject, tracker: str | None, key: str | None, device: str | None):
    kind, arch = subject.kind, subject.arch.name
    if name == "rpc":
        from mlc_amd.compiler.tuning.rpc import Remote

        return Remote(kind, arch, tracker=tracker or "", key=key or arch, say=display.message)
    from mlc_amd.compiler.tuning.local import Local

    return Local(kind, arch, device)


def _tune(subject: Subject, make: Callable, seconds: float | None, trials: int | None, seed: int) -> None:
    from mlc_amd.compiler.tuning.session import Interruptible, run
    from mlc_amd.compiler.tuning.summary import gain

    started = time.monotonic()
    title = f"tuning {subject.shape}"
    with (
        display.budget_progress(title, seconds, trials) as progress,
        Interruptible(make, display.message, progress) as measuring,
        subject.session(seed) as session,
    ):
        if not session.tasks:
            raise UserError(f"no kernel of {subject.shape} has anything to choose")
        try:
            run(
                session,
                measuring.measure,
                lambda workload, plan: measuring.runner.verify(workload, plan),
                trials,
                seconds,
                measuring.runner.batch,
                lambda session: progress(session.trials),
            )
        except KeyboardInterrupt:
            measuring.stopped = True
    rows = subject.rows()
    failed, known = sum(row.failed for row in rows), sum(len(row.history) for row in rows)
    left = len(session.unchecked())
    checked = f"{session.refuted} wrong{_unverified(session)}{f', {left} to be verified in the next run' * bool(left)}"
    counts = f"{session.trials} plans measured, {checked}; {known} so far, {failed} failed"
    print(f"{subject.shape}: {counts}; {display.clock(time.monotonic() - started)}; {gain(rows)}")
    if measuring.stopped:
        display.message("stopped; everything measured is kept: run it again to continue")
        raise KeyboardInterrupt
    if not session.trials and session.unmeasured:
        raise UserError("nothing was measured: give a longer --budget")
    if known and not any(record.seconds for row in rows for record in row.history):
        why = next(record.error for row in rows for record in row.history)
        raise UserError(f"no plan could be measured: {one_line(why, QUOTED)}")


def _unverified(session) -> str:
    """ ", 3 could not be verified (why)", with the most frequent reason; empty if all were verified."""
    if not session.unverified:
        return ""
    (why, _), *others = Counter(session.unverified.values()).most_common()
    reason = (why.splitlines() or ["no reason given"])[0] + ("; and others" if others else "")
    return f", {len(session.unverified)} could not be verified ({reason})"


# ---- kits


def _import_kit(folder: Path, onward: Path | None, count: int, seed: int) -> Subject:
    """Reads a kit's measurements. Writes the next round into `onward`."""
    from mlc_amd.compiler.codegen.target import make_target
    from mlc_amd.compiler.tuning import kit as kits
    from mlc_amd.compiler.tuning.summary import gain

    kit = kits.load(folder)
    if onward:
        kits.check_folder(onward, kit.target)
    subject = Subject(kit.model, kit.target, make_target(kit.target, kit.arch).archs[0], kit.tasks)
    with subject.session(seed) as session:
        fed = kits.feed(kit, session)
        parts = [f"{fed['measured']} measurements ({fed['failed']} failed)"]
        parts += [f"{fed['checked']} compared with untuned kernels ({fed['wrong']} wrong)"]
        parts += [f"{fed[name]} {what}" for name, what in LEFT_OUT.items() if fed[name]]
        device = kit.found["facts"].get("device", "no device")
        print(f"{subject.shape}, measured on {device}: {'; '.join(parts)}; {gain(subject.rows())}")
        if not any(fed[name] for name in ("measured", "known", "checked")):
            raise UserError(f"{folder} has no measurement that can be used")
        if onward:
            _export_kit(subject, session, onward, count)
    return subject


def _export_kit(subject: Subject, session, folder: Path, count: int) -> None:
    from mlc_amd.compiler.tuning import kit as kits

    with display.compile_progress(f"building a kit for {subject.shape}") as progress:
        names = subject.kind, subject.arch.name, subject.name
        made = kits.export(session, folder, *names, count, partial(progress, "kernels"))
    failed = f", {made.failed} could not be built" if made.failed else ""
    print(f"{made.folder}: {made.candidates} kernels, {display.size(made.nbytes)}{failed}")
    print(
        "on the machine that it is for: python3 run.py in a copy of it; bring results.json back, then: mlc-amd tune "
        "--import-kit FOLDER"
    )


# ---- plans from files, and records for other users


def _plans(path: Path) -> dict[str, list[dict]]:
    """The plans in the lines of a file, by the key of their workload. Raises UserError, with the number of the
    line, for an invalid line."""
    from mlc_amd.schedules.operators import from_json

    found: dict[str, list[dict]] = {}
    for number, line in enumerate(json_files.read_bytes(path).splitlines(), 1):
        data = json_files.decode(line, PlanLine, f"{path}, line {number},", "give a file of plans")
        try:
            found.setdefault(from_json(data).key, []).append(data["plan"])
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    return found


def _ship(subject: Subject, folder: Path) -> None:
    from mlc_amd.compiler.tuning.database import Database
    from mlc_amd.compiler.tuning.ship import ship

    with Database(subject.arch) as database:
        made = ship(database, folder, shlex.join(["mlc-amd", *sys.argv[1:]]))
    counts = f"{made.added} new, {made.replaced} replaced, {made.stayed} unchanged, {made.pruned} removed"
    print(f"{made.path}: {counts}")
