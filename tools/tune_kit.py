"""The part of `mlc-amd tune` that works with kits: batches of kernels that are measured elsewhere
(compiler/tuning/kit.py)."""

from pathlib import Path

from mlc_amd.compiler.pipeline import make_target
from mlc_amd.compiler.tuning import kit as kits
from mlc_amd.compiler.tuning.tasks import roofline
from mlc_amd.schedules.tuning.database import Database
from mlc_amd.schedules.tuning.session import Session
from mlc_amd.tools import display, tune_report
from mlc_amd.tools.tune import Subject


def export(subject: Subject, folder: Path, count: int, seed: int) -> None:
    """Writes the first round, or the next one where the database has measurements. UserError for a folder that is
    taken."""
    kits.check_folder(folder, subject.kind)
    with Database(subject.arch) as database:
        session = Session(subject.tasks, subject.arch, database, roofline(*tune_report.machine(subject)), seed)
        _write(subject, session, folder, count)


def bring(folder: Path, onward: Path | None, count: int, seed: int) -> None:
    """Takes over what a kit measured; writes the next round into `onward`. UserError for a kit that was not measured,
    or is damaged."""
    kit = kits.load(folder)
    if onward:
        kits.check_folder(onward, kit.target)
    arch = make_target(kit.target, kit.arch).archs[0]
    subject = Subject(kit.model, kit.target, arch, kit.tasks)
    with Database(arch) as database:
        session = Session(subject.tasks, arch, database, roofline(*tune_report.machine(subject)), seed)
        fed = kits.feed(kit, session)
        parts = [
            f"{fed.measured} measurements ({fed.failed} failed)",
            f"{fed.checked} compared with untuned kernels ({fed.wrong} wrong)",
        ]
        parts += [f"{fed.known} were known"] if fed.known else []
        parts += [f"{fed.stale} are no plans any more"] if fed.stale else []
        parts += [f"{fed.missing} are missing: run it again over there to go on"] if fed.missing else []
        device = kit.found["facts"].get("device", "no device")
        print(
            f"{subject.shape}, measured on {device}: {'; '.join(parts)}; {tune_report.gain(tune_report.rows(subject))}"
        )
        if onward:
            _write(subject, session, onward, count)


def _write(subject: Subject, session: Session, folder: Path, count: int) -> None:
    with display.compile_progress(f"building a kit for {subject.shape}") as progress:
        made = kits.export(session, folder, *subject.names, count, lambda done, of: progress("kernels", done, of))
    failed = f", {made.failed} could not be built" if made.failed else ""
    print(f"{made.folder}: {made.candidates} kernels, {display.size(made.nbytes)}{failed}")
    print(
        "on the machine that it is for: python3 run.py in a copy of it; bring results.json back, then: mlc-amd tune "
        "--import-kit FOLDER"
    )
