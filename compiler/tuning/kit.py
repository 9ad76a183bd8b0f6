"""Tuning for a machine that cannot be reached and has no TVM: a folder of built candidates goes there, measurements
come back.

`export` writes what a session wants to have measured next, with the program that measures it (runtime/measure/kit.py)
and the sources that this needs. `load` reads a kit that came back, `feed` gives what it found to a session. What the
measuring machine wrote is checked before any of it is believed.

    run.py       starts the program       kit.json     which candidates, for which tasks
    candidates/  built kernels            results.json what the program found
    copy/        a kernel that copies     lib/         the runtime's sources
"""

import importlib.util
import json
import math
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import tvm

from mlc_amd.compiler.tuning.build import Builder, build_copy, folder_name
from mlc_amd.compiler.tuning.gate import states
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.candidate import read
from mlc_amd.runtime.measure.kit import CANDIDATES, COPY, FORMAT, KIT, RESULTS
from mlc_amd.schedules.tuning.database import Checked, Measured, plan_text
from mlc_amd.schedules.tuning.session import Session
from mlc_amd.schedules.tuning.spaces import as_dict
from mlc_amd.schedules.tuning.workload import Workload

RUNNER = "kit"
TASK = ("name", "calls", "weight", "bytes", "flops")  # what kit.json has of a Task besides its workload
LIST = "kernel.s"  # the assembly that a builder leaves beside: for readers
KINDS = ("vulkan", "rocm")  # whose kernels run without TVM
SOURCES = (
    "__init__.py", "artifact.py", "errors.py", "host.py", "random_weights.py",
    "devices/__init__.py", "devices/hip*.py", "devices/vulkan/*.py", "measure/*.py",
)  # fmt: skip
START = '''"""Measures the kernels of this folder: python3 run.py [--device NAME].

Needs Python 3.11 or newer with numpy, and a driver.

Results come into results.json as they are found; a run that was stopped goes on where it was.
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

from mlc_amd.runtime.measure.kit import main  # noqa: E402

sys.exit(main(Path(here), sys.argv[1:]))
'''


@dataclass
class Exported:
    """A kit that was written. failed: candidates that could not be built; the database knows them."""

    folder: Path
    candidates: int
    failed: int
    nbytes: int


@dataclass
class Kit:
    """A kit that was read. tasks: of compiler/tuning/tasks.py. found: the content of results.json, checked."""

    folder: Path
    target: str
    arch: str
    model: str
    tasks: list[Task]
    candidates: dict[str, dict]
    found: dict


@dataclass
class Fed:
    """What a kit brought: measurements that are new, those of them that failed, those that the database had; candidates
    that were not measured; plans that are none any more; checks, and those that failed."""

    measured: int = 0
    failed: int = 0
    known: int = 0
    missing: int = 0
    stale: int = 0
    checked: int = 0
    wrong: int = 0


# ---- out


def check_folder(folder: Path, kind: str) -> None:
    """UserError for a folder that is taken, or a target whose kernels cannot be measured by a kit."""
    if kind not in KINDS:
        raise UserError(
            f"a kit holds no TVM, which kernels of target {kind} need to run: tune on that machine, or use --runner rpc"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: choose another folder for the kit")


def export(
    session: Session, folder: Path, kind: str, arch: str, model: str, count: int, progress=lambda done, total: None
) -> Exported:
    """Writes the next round of `session`, `count` candidates and the untuned kernels beside them, into the new folder
    `folder`.

    kind, arch: names of target and arch. model: what it is for, for the reader. progress(built, of how many).
    Candidates that do not build are reported to the session as failed. UserError if there is nothing left to measure,
    or no place.
    """
    check_folder(folder, kind)
    chosen = session.round(count)
    if not chosen:
        raise UserError("every plan of every task is measured: there is nothing to export")
    try:
        with Builder(kind, arch, folder / CANDIDATES) as builder:
            jobs = [
                (task, plan)
                for task in dict.fromkeys(task for task, _ in chosen)
                for plan in (None, *_plans(session, chosen, task))
            ]
            built = builder.build([(task.workload, plan) for task, plan in jobs], progress)
        candidates, failed = {}, 0
        for (task, plan), (made, error) in zip(jobs, built, strict=True):
            if error:
                session.report(task, plan or session.space(task).default, Measured(None, error, runner=RUNNER))
                failed += 1
                continue
            (made / LIST).unlink(missing_ok=True)
            candidates[made.name] = _entry(session, task, plan, made)
        # what has nothing to be compared with cannot win
        candidates = {name: entry for name, entry in candidates.items() if (entry["reference"] or name) in candidates}
        if not candidates:
            raise UserError(f"none of {failed} candidates could be built: {next(error for _, error in built if error)}")
        if kind == "vulkan":
            build_copy(arch, folder / COPY)
        _sources(folder / "lib")
        (folder / "run.py").write_text(START)
        tasks = [_task_entry(task) for task in session.tasks]
        facts = {
            "format": FORMAT,
            "id": uuid.uuid4().hex,
            "target": kind,
            "arch": arch,
            "model": model,
            "tvm": tvm.__version__,
        }
        (folder / KIT).write_text(json.dumps(facts | {"tasks": tasks, "candidates": candidates}, indent=1))
    except OSError as e:
        raise UserError(f"cannot write {folder}: {e.strerror or e}; free some space or choose another place") from e
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Exported(folder, len(candidates), failed, nbytes)


def _plans(session: Session, chosen, task) -> list:
    """What was chosen for a task, without the default plan: that is the untuned kernel."""
    default = session.space(task).default
    return [plan for other, plan in chosen if other is task and plan != default]


def _entry(session: Session, task, plan, made: Path) -> dict:
    reference = "" if plan is None else folder_name(task.workload, None)
    values = as_dict(session.space(task).default if plan is None else plan)
    return {"task": task.workload.key, "plan": values, "reference": reference, "states": states(read(made))}


def _task_entry(task: Task) -> dict:
    return {name: getattr(task, name) for name in TASK} | {
        "op": task.workload.op,
        "args": task.workload.args,
        "hash": task.workload.hash,
    }


def _sources(folder: Path) -> None:
    """The runtime's sources, as far as measuring needs them."""
    root = Path(importlib.util.find_spec("mlc_amd.runtime").origin).parent
    for file in sorted(file for pattern in SOURCES for file in root.glob(pattern)):
        place = folder / "mlc_amd" / "runtime" / file.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


# ---- in


def load(folder: Path) -> Kit:
    """A kit that was measured. UserError for anything else, or one whose files are not as they should be."""
    kit = _read(folder / KIT, "is no kit of this version; export it again", _kit_fault)
    if kit["tvm"] != tvm.__version__:
        raise UserError(f"{folder} was made with TVM {kit['tvm']}, this is {tvm.__version__}: export it again")
    tasks = [Task(Workload.from_json(entry), *(entry[name] for name in TASK)) for entry in kit["tasks"]]
    if any(task.workload.hash != entry["hash"] for task, entry in zip(tasks, kit["tasks"], strict=True)):
        raise UserError(
            f"{folder} was made by another version of mlc-amd, whose plans mean something else: export it again"
        )
    if not (folder / RESULTS).exists():
        raise UserError(
            f"{folder} holds no {RESULTS}: run `python3 run.py` in it on the machine that it is for, and take that "
            "file back"
        )
    found = _read(
        folder / RESULTS, "is damaged or was changed; measure the kit again", lambda data: _results_fault(data, kit)
    )
    return Kit(folder, kit["target"], kit["arch"], kit["model"], tasks, kit["candidates"], found)


def feed(kit: Kit, session: Session) -> Fed:
    """Gives the kit's measurements and checks to a session of its tasks; those that the database has already are left
    out."""
    fed, tasks = Fed(), {task.workload.key: task for task in session.tasks}
    facts = {
        "device": kit.found["facts"].get("device", ""),
        "driver": kit.found["facts"].get("driver", ""),
        "runner": RUNNER,
    }
    for name, entry in kit.candidates.items():
        result, check = kit.found["results"].get(name), kit.found["checks"].get(name)
        if result is None:
            fed.missing += 1
            continue
        task = tasks.get(entry["task"])
        if task is None or (plan := _plan(session.space(task), entry["plan"])) is None:
            fed.stale += 1
            continue
        records, text = session.database.entry(task.workload).records, plan_text(as_dict(plan))
        if text in records:
            fed.known += 1
        else:
            failed = result["error"] is not None
            values = (
                {"seconds": None, "error": result["error"]}
                if failed
                else {"seconds": result["seconds"], "runs": result["runs"]}
            )
            session.report(task, plan, Measured(**values, **facts))
            fed.measured, fed.failed = fed.measured + 1, fed.failed + failed
        # what was right once may be a race that was won: a later kit may still refute it
        if check and (not records[text].checked or (records[text].passed and not check["passed"])):
            session.check(task, plan, Checked(**check))
            fed.checked, fed.wrong = fed.checked + 1, fed.wrong + (not check["passed"])
    return fed


def _plan(space, values: dict):
    """The plan of the space that these values make; None if it is none today."""
    try:
        return space.equal(space.plan(values))
    except (TypeError, KeyError, ValueError, UserError):
        return None


def _read(path: Path, advice: str, fault) -> dict:
    """A JSON file of a kit. fault(data) says what is wrong with its content, "" if nothing is."""
    try:
        data = json.loads(path.read_text())
    except OSError as e:
        raise UserError(
            f"{path}: {e.strerror or e}; give the folder of a kit that `mlc-amd tune --export-kit` made"
        ) from e
    except ValueError as e:
        raise UserError(f"{path} {advice} ({e})") from e
    try:
        wrong = fault(data)
    except (KeyError, TypeError, AttributeError) as e:
        wrong = f"{type(e).__name__}: {e}"
    if wrong:
        raise UserError(f"{path} {advice} ({wrong})")
    return data


def _kit_fault(kit: dict) -> str:
    if kit.get("format") != FORMAT:
        return f"format {kit.get('format')}, not {FORMAT}"
    keys = {Workload.from_json(task).key for task in kit["tasks"]}
    named = {entry["task"] for entry in kit["candidates"].values()}
    return "" if named <= keys else f"no task {min(named - keys)}"


def _results_fault(found: dict, kit: dict) -> str:
    """What is wrong with the content of a results.json, which another machine wrote."""
    if (found["format"], found["kit"]) != (FORMAT, kit["id"]):
        return "it belongs to another kit"
    strange = sorted({*found["results"], *found["checks"]} - kit["candidates"].keys())
    if strange:
        return f"no candidate is called {strange[0]!r}"
    if any(not isinstance(value, str) for key, value in found["facts"].items() if key in ("device", "driver")):
        return "the device has no name"
    for name, result in found["results"].items():
        if result["error"] is not None:
            good = isinstance(result["error"], str) and result["error"] != ""
        else:
            good = _time(result["seconds"]) and isinstance(result["runs"], list) and all(map(_time, result["runs"]))
        if not good:
            return f"{name} has neither seconds nor an error"
    for name, check in found["checks"].items():
        texts = isinstance(check["error"], str) and check["checked"] in ("device", "lavapipe")
        deviation = check["deviation"]
        numbers = (deviation is None or (_number(deviation) and deviation >= 0)) and (
            check["gain"] is None or _time(check["gain"])
        )
        if (
            not texts
            or not isinstance(check["passed"], bool)
            or not numbers
            or check.keys() != Checked.__dataclass_fields__.keys()
        ):
            return f"the check of {name} says nothing"
    return ""


def _number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _time(value) -> bool:
    return _number(value) and value > 0
