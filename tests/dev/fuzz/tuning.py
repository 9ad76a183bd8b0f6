"""Fuzzes what tuning reads of other machines: kits, their results, files of measurements: python -m
tests.dev.fuzz.tuning --journal FILE.

A kit, its results and a file of measurements are written once, as a tuning of random numbers would. Each case changes
one of them, its bytes or its values, and reads it as `tune --import-kit`, `tune` and `compile` do. Files of
measurements are never refused: what cannot be used is left out with a note, and a compile finds plans of the space.
What is accepted of a kit goes into a database, which a compile then reads.
"""

import importlib
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlc_amd.compiler.tuning import kit as kits
from mlc_amd.compiler.tuning.database import HEADER, LOG, Checked, Database, Lookup, Measured
from mlc_amd.compiler.tuning.session import TuningSession
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.runtime.measure.run_kit import FORMAT, KIT, RESULTS
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.operators import VERSION, Linear
from mlc_amd.schedules.space import space
from tests.dev.fuzz import fuzzing, mutations
from tests.dev.fuzz.fuzzing import Case, Limits

ARCH = "generic"
OP = Linear(segments=(("q4_0", 2048),), k=2048, m=1, layout="rows", biases=(False,))
PLANS = 12
# What is imported late by what is fuzzed.
PRELOADED = ("mlc_amd.compiler.codegen.vulkan_target", "mlc_amd.schedules.gpu.linear.linear", "xgboost")


def written(place: Path) -> Path:
    """A folder with a kit that was measured, and `tuned/` with a file of measurements."""
    import tvm

    arch, draw = profiles.resolve(ARCH), random.Random(0)
    task = Task(OP, "linear", {"decode": 1.0}, 128.0, 1e6, 1e6)
    choices = space(task.workload, arch)
    assert choices is not None, "the kernel has plans to choose from"
    plans = choices.plans[:PLANS]
    folder = place / "kit"
    (folder / "tuned").mkdir(parents=True)
    with Database(arch, folder / "tuned") as database:
        session = TuningSession([task], arch, database)
        for plan in plans:
            session.report(task, plan, Measured(draw.uniform(1e-5, 1e-4), runs=[1e-5], device="a GPU", runner="local"))
        session.check(task, plans[-1], Checked("device", True, 0.1, gain=1.5))
    about = {name: getattr(task, name) for name in kits.TASK} | {"op": task.workload.name, "args": OP.args}
    names = [f"plan-{i}" for i in range(len(plans))]
    kit = {"format": FORMAT, "id": "1" * 32, "target": "vulkan", "arch": ARCH, "model": "m", "tvm": tvm.__version__}
    kit |= {"version": VERSION, "tasks": [about], "candidates": {}}
    for name, plan in zip(names, plans, strict=True):
        reference = "" if name == names[0] else names[0]
        kit["candidates"][name] = {"task": task.workload.key, "plan": asdict(plan), "reference": reference}
    results = {name: {"error": None, "seconds": draw.uniform(1e-5, 1e-4), "runs": [1e-5, 2e-5]} for name in names}
    results[names[3]] = {"error": "it crashed"}
    checks = {names[1]: asdict(Checked("device", True, 0.2, gain=1.25))}
    facts = {"device": "a GPU", "driver": "1.0", "copy_bandwidth": 1e11}
    (folder / KIT).write_text(json.dumps(kit))
    (folder / RESULTS).write_text(
        json.dumps({"format": FORMAT, "kit": kit["id"], "facts": facts, "results": results, "checks": checks})
    )
    return folder


# ---- reading


def import_kit(folder: Path) -> None:
    """As `tune --import-kit` does; what a compile then finds must be a plan of the space."""
    kit, arch = kits.load(folder), profiles.resolve(ARCH)
    with Database(arch, folder / "imported") as database:
        kits.feed(kit, TuningSession(kit.tasks, arch, database))
    compile_with(folder / "imported")


def compile_with(folder: Path) -> tuple[Any, list[str]]:
    """The plan of a compile, and the notes. AssertionError for records whose times are no times."""
    arch = profiles.resolve(ARCH)
    lookup = Lookup(arch, "user", user=folder)
    plan, _ = lookup.find(OP)
    for note in lookup.notes:
        assert not fuzzing.unclean(note), f"{fuzzing.unclean(note)}: {note!r}"
    return plan, lookup.notes


def tune(folder: Path) -> None:
    """As `tune` and then `compile` read measurements. Afterwards no line is left that must be left out."""
    before = compile_with(folder)
    task = Task(OP, "linear", {"decode": 1.0}, 128.0, 1e6, 1e6)
    arch = profiles.resolve(ARCH)
    with Database(arch, folder) as database:
        session = TuningSession([task], arch, database)
        choices = session.space(task)  # not what the session would choose: training its model takes seconds
        session.report(task, choices.plans[PLANS], Measured(1e-5, runner="local"))
        for record in database.entry(task.workload).ranked:
            assert record.seconds and math.isfinite(record.seconds)
    after = compile_with(folder)
    stay = [note for note in after[1] if "made with TVM" not in note and "plans have changed" not in note]
    assert before is not None and not stay, f"notes stay: {stay}"


# ---- changes


def damage(name: str, folder: Path, draw: random.Random) -> str:
    data, what = mutations.bytes_changed((folder / name).read_bytes(), draw)
    (folder / name).write_bytes(data)
    return what


def change(name: str, folder: Path, draw: random.Random) -> str:
    """Values of a JSON file."""
    changed, what = mutations.json_changed(json.loads((folder / name).read_text()), draw)
    (folder / name).write_text(json.dumps(changed))
    return what


def change_line(folder: Path, draw: random.Random) -> str:
    """Values of one line of the measurements, or a line that is none."""
    path = folder / "tuned" / LOG
    lines = path.read_text().splitlines()
    number = draw.randrange(len(lines))
    if draw.random() < 0.1:
        lines[number] = draw.choice(("5", "null", "[]", '"x"', "{}", "[" * 5000, "1" * 5000, "\x00", "{" * 5000, ""))
        what = f"= {lines[number]!r:.20}"
    else:
        changed, what = mutations.json_changed(json.loads(lines[number]), draw)
        lines[number] = json.dumps(changed)
    path.write_text("\n".join(lines) + draw.choice(("\n", "\n", "\n", "")))
    return f"line {number}: {what}"


# By kind: how often it comes, the change, what reads it.
KINDS: dict[str, tuple[int, Callable[[Path, random.Random], str], Callable[[Path], object]]] = {
    "damaged kit": (2, partial(damage, KIT), import_kit),
    "damaged results": (2, partial(damage, RESULTS), import_kit),
    "damaged measurements": (2, partial(damage, f"tuned/{LOG}"), lambda folder: tune(folder / "tuned")),
    "kit": (4, partial(change, KIT), import_kit),
    "results": (6, partial(change, RESULTS), import_kit),
    "measurements": (6, change_line, lambda folder: tune(folder / "tuned")),
    "header": (1, partial(change, f"tuned/{HEADER}"), lambda folder: tune(folder / "tuned")),
}


def make(base: Path, draw: random.Random) -> Case:
    kind = draw.choices(list(KINDS), [weight for weight, _, _ in KINDS.values()])[0]
    _, changes, reads = KINDS[kind]
    folder = Path(tempfile.mkdtemp(dir=base.parent)) / "kit"
    shutil.copytree(base, folder)
    try:
        what = changes(folder, draw)
    except (ValueError, RecursionError) as error:
        what = f"cannot be written: {type(error).__name__}"
    return Case(kind, what, partial(_act, folder, reads))


def control(base: Path) -> Case:
    folder = Path(tempfile.mkdtemp(dir=base.parent)) / "kit"
    shutil.copytree(base, folder)

    def both(folder: Path) -> None:
        import_kit(folder)
        tune(folder / "tuned")

    return Case("control", "", partial(_act, folder, both))


def _act(folder: Path, reads: Callable[[Path], object]) -> None:
    try:
        reads(folder)
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mlc-amd-fuzz-") as place:
        base = fuzzing.once(partial(written, Path(place)))
        return fuzzing.main(__doc__, partial(make, base), partial(control, base), Limits(), argv)


if __name__ == "__main__":
    sys.exit(main())
