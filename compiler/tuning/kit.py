"""Kits: tuning for a machine that cannot be reached over the network and has no TVM. A kit is a folder of built
candidates; the user copies it to that machine, measures there, and copies the results back.

`export` writes the candidates that a session would measure next, with the program that measures them
(runtime/measure/run_kit.py) and its sources. `load` reads a measured kit, and validates what the other machine wrote.
`feed` reports its results to a session.

    run.py       starts the program       kit.json     the candidates and their tasks
    candidates/  built kernels            results.json measurements, written by the program
    copy/        a kernel that copies     lib/         the runtime's sources
"""

import json
import shutil
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NotRequired, TypedDict

import tvm
from msgspec import Meta

from mlc_amd import runtime
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.tuning import lines
from mlc_amd.compiler.tuning.build import Builder, build_copy, folder_name
from mlc_amd.compiler.tuning.database import Checked, Measured, plan_text
from mlc_amd.compiler.tuning.session import TuningSession
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.folders import unwritable
from mlc_amd.runtime.measure.run_kit import CANDIDATES, COPY, FORMAT, KIT, RESULTS
from mlc_amd.schedules.operators import VERSION, from_json
from mlc_amd.schedules.space import space

RUNNER = "kit"
TASK = ("name", "calls", "weight", "bytes", "flops")  # the fields of a Task in kit.json, besides its workload
ASSEMBLY = "*.s.gz"  # assembly text that targets write for readers; kits leave it out
KINDS = ("vulkan", "rocm")  # targets whose kernels run without TVM
SOURCES = (
    "__init__.py", "closing.py", "errors.py", "extras.py", "gpus.py", "host.py", "leftovers.py", "artifact/__init__.py",
    "artifact/io_names.py", "artifact/random_weights.py", "artifact/weight_block.py", "cache/__init__.py",
    "cache/pages.py",
    "devices/__init__.py", "devices/choice.py", "devices/hip/*.py", "devices/vulkan/*.py", "measure/*.py",
    "sampling/__init__.py", "sampling/layout.py",
)  # fmt: skip
START = '''"""Measures the kernels of this folder: python3 run.py [--device NAME].

Needs Python 3.11 or newer with numpy, and a driver.

Results go into results.json as they are measured; an interrupted run resumes.
"""

import os
import sys

here = os.path.dirname(os.path.abspath(__file__))
if sys.version_info < (3, 11):
    sys.exit("error: this needs Python 3.11 or newer")
try:
    import numpy  # noqa: F401
except ImportError:
    sys.exit(f"error: this needs numpy; install it with: {sys.executable} -m pip install numpy")
lib = os.path.join(here, "lib")
sys.path.insert(0, lib)
# of the process that measures
os.environ["PYTHONPATH"] = os.pathsep.join([lib, *filter(None, [os.environ.get("PYTHONPATH")])])
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

from pathlib import Path  # noqa: E402

from mlc_amd.runtime.measure.run_kit import main  # noqa: E402

sys.exit(main(Path(here), sys.argv[1:]))
'''


class Exported(NamedTuple):
    """A kit that was written. failed: number of candidates that could not be built; the database has their records."""

    folder: Path
    candidates: int
    failed: int
    nbytes: int


class _Version(TypedDict):
    format: Annotated[int, Meta(ge=0, le=1 << 30)]
    tvm: lines.Word
    version: Annotated[int, Meta(ge=0, le=1 << 30)]


class _TaskEntry(lines.About):
    name: str
    calls: dict[str, lines.Figure]
    weight: lines.Figure
    bytes: lines.Figure
    flops: lines.Figure


class _Candidate(TypedDict):
    task: str
    plan: lines.PlanFields
    reference: str


class _KitFile(_Version):
    id: str
    target: Literal["vulkan", "rocm"]
    arch: lines.Word
    model: str
    tasks: list[_TaskEntry]
    candidates: dict[str, _Candidate]


class _Result(TypedDict):
    error: str | None
    seconds: NotRequired[lines.Seconds]
    runs: NotRequired[list[lines.Seconds]]


class _Check(TypedDict):
    """The fields of database.Checked."""

    checked: Literal["device", "lavapipe"]
    passed: bool
    deviation: lines.Figure | None
    error: str
    gain: lines.Ratio | None


class _Facts(TypedDict):
    device: NotRequired[str]
    driver: NotRequired[str]


class _Results(TypedDict):
    format: int
    kit: str
    facts: _Facts
    results: dict[str, _Result]
    checks: dict[str, _Check]


@dataclass
class Kit:
    """A kit that was measured. tasks: see compiler/tuning/tasks.py. candidates: from kit.json. found: results.json."""

    folder: Path
    target: str
    arch: str
    model: str
    tasks: list[Task]
    candidates: dict[str, _Candidate]
    found: _Results


def check_folder(folder: Path, kind: str) -> None:
    """Raises UserError for a folder that is not empty, and for a target whose kernels a kit cannot measure."""
    if kind not in KINDS:
        raise UserError(
            f"a kit holds no TVM, which kernels of target {kind} need to run: tune on that machine, or use --runner rpc"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: choose another folder for the kit")


def export(
    session: TuningSession, folder: Path, kind: str, arch: str, model: str, count: int, progress=lambda done, of: None
) -> Exported:
    """Writes a kit into the new folder `folder`: the next `count` candidates of `session`, and their untuned kernels.

    kind, arch: names of target and arch. model: its name, for the reader. Candidates that do not build are reported to
    the session as failed. Raises UserError if there is nothing left to measure, and if the folder cannot be used.
    """
    check_folder(folder, kind)
    chosen = session.round(count)
    if not chosen:
        raise UserError("every plan of every task is measured: there is nothing to export")
    # The untuned kernel (None) is that of the default plan.
    jobs = [(task, None) for task in dict.fromkeys(task for task, _ in chosen)]
    jobs += [(task, plan) for task, plan in chosen if plan != session.space(task).default]
    try:
        with Builder(kind, arch, folder / CANDIDATES) as builder:
            built = builder.build([(task.workload, plan) for task, plan in jobs], progress)
        candidates, errors = {}, [made for made in built if isinstance(made, str)]
        for (task, plan), made in zip(jobs, built, strict=True):
            used = plan or session.space(task).default
            if isinstance(made, str):
                session.report(task, used, Measured(None, made, runner=RUNNER))
                continue
            for file in made.glob(ASSEMBLY):
                file.unlink()
            reference = folder_name(task.workload, None) if plan else ""
            candidates[made.name] = {"task": task.workload.key, "plan": asdict(used), "reference": reference}
        # a plan without its reference cannot be verified
        candidates = {name: entry for name, entry in candidates.items() if (entry["reference"] or name) in candidates}
        if not candidates:
            raise UserError(f"none of {len(errors)} candidates could be built: {errors[0]}")
        if kind == "vulkan":
            build_copy(arch, folder / COPY)
        _copy_sources(folder / "lib")
        (folder / "run.py").write_text(START)
        facts = {"format": FORMAT, "id": uuid.uuid4().hex, "target": kind, "arch": arch, "model": model}
        tasks = [
            {name: getattr(task, name) for name in TASK} | {"op": task.workload.name, "args": task.workload.args}
            for task in session.tasks
        ]
        facts |= {"tvm": tvm.__version__, "version": VERSION, "tasks": tasks}
        (folder / KIT).write_text(json.dumps(facts | {"candidates": candidates}, indent=1))
    except OSError as e:
        raise UserError(unwritable(folder, e, "choose another place")) from e
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Exported(folder, len(candidates), len(errors), nbytes)


def _copy_sources(folder: Path) -> None:
    """Copies the sources of the runtime that measuring needs."""
    root = Path(runtime.__file__).parent
    for file in sorted(file for pattern in SOURCES for file in root.glob(pattern)):
        place = folder / "mlc_amd" / "runtime" / file.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


def load(folder: Path) -> Kit:
    """Reads a kit that was measured. Raises UserError for another folder, and for invalid files."""
    if not (folder / KIT).exists():
        raise UserError(f"{folder} holds no {KIT}; give the folder of a kit that `mlc-amd tune --export-kit` made")
    again = "export the kit again"
    made = json_files.read(folder / KIT, _Version, again)
    if (made["format"], made["tvm"], made["version"]) != (FORMAT, tvm.__version__, VERSION):
        theirs = f"format {made['format']}, TVM {made['tvm']} and plans of version {made['version']}"
        ours = f"format {FORMAT}, {tvm.__version__} and {VERSION}"
        raise UserError(f"{folder} was made with {theirs}, this is {ours}: export it again")
    kit = json_files.read(folder / KIT, _KitFile, again)
    tasks = [
        Task(from_json(of), of["name"], of["calls"], of["weight"], of["bytes"], of["flops"]) for of in kit["tasks"]
    ]
    if strange := {entry["task"] for entry in kit["candidates"].values()} - {task.workload.key for task in tasks}:
        raise UserError(f"{folder / KIT} is damaged (no task is called {shorten(min(strange))}); {again}")
    _check_tasks(folder / KIT, kit["target"], kit["arch"], tasks)
    if not (folder / RESULTS).exists():
        raise UserError(
            f"{folder} holds no {RESULTS}: run `python3 run.py` in it on the machine that it is for, and copy that "
            "file back"
        )
    advice = "measure the kit again"
    found = json_files.read(folder / RESULTS, _Results, advice)
    if wrong := _results_fault(found, kit):
        raise UserError(f"{folder / RESULTS} is damaged or was changed ({wrong}); {advice}")
    return Kit(folder, kit["target"], kit["arch"], kit["model"], tasks, kit["candidates"], found)


def _check_tasks(path: Path, target: str, arch_name: str, tasks: list[Task]) -> None:
    """Raises UserError for tasks that have no kernels."""
    (arch,) = make_target(target, arch_name).archs
    for task in tasks:
        try:
            space(task.workload, arch)
        except UserError:
            raise
        except Exception as error:  # damaged arguments can cause any exception
            what = f"{shorten(task.name)} cannot be tuned ({type(error).__name__}: {shorten(str(error))})"
            raise UserError(f"{path} is damaged: {what}; export the kit again") from error


def feed(kit: Kit, session: TuningSession) -> Counter:
    """Reports the kit's new measurements and verifications to a session of its tasks. Returns counts: "measured", of
    these "failed"; "known": already in the database; "missing": not measured; "stale": not in the current space;
    "checked", of these "wrong"."""
    fed, tasks = Counter(), {task.workload.key: task for task in session.tasks}
    facts = {name: kit.found["facts"].get(name, "") for name in ("device", "driver")} | {"runner": RUNNER}
    for name, entry in kit.candidates.items():
        result, check = kit.found["results"].get(name), kit.found["checks"].get(name)
        if result is None:
            fed["missing"] += 1
            continue
        try:
            task = tasks[entry["task"]]
            choices = session.space(task)
            plan = choices.equal(choices.parse(entry["plan"]))
        except (KeyError, ValueError):
            fed["stale"] += 1
            continue
        records, text = session.database.entry(task.workload).records, plan_text(asdict(plan))
        if text in records:
            fed["known"] += 1
        else:
            measured = Measured.of(result, **facts)
            session.report(task, plan, measured)
            fed["measured"] += 1
            fed["failed"] += measured.seconds is None
        # A kernel with a race may pass once, so a later kit can refute a plan that passed.
        if check and (not records[text].checked or (records[text].passed and not check["passed"])):
            session.check(task, plan, Checked(**check))
            fed["checked"] += 1
            fed["wrong"] += not check["passed"]
    return fed


def _results_fault(found: _Results, kit: _KitFile) -> str:
    if (found["format"], found["kit"]) != (FORMAT, kit["id"]):
        return "it belongs to another kit"
    if strange := sorted({*found["results"], *found["checks"]} - kit["candidates"].keys()):
        return f"no candidate is called {shorten(strange[0])}"
    for name, result in found["results"].items():
        if result["error"] == "" or (result["error"] is None and not ("seconds" in result and "runs" in result)):
            return f"{name} has neither seconds nor an error"
    return ""
