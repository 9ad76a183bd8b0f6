"""Kits: tuning for a machine that cannot be reached and has no TVM. A folder of built candidates goes there,
measurements come back.

`export` writes what a session would measure next, with the program that measures it (runtime/measure/
run_kit.py) and its sources. `load` reads a kit that came back and validates what the other machine wrote, `feed` gives
its results to a session.

    run.py       starts the program       kit.json     which candidates, for which tasks
    candidates/  built kernels            results.json what the program measured
    copy/        a kernel that copies     lib/         the runtime's sources
"""

import json
import math
import shutil
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import tvm

from mlc_amd import runtime
from mlc_amd.compiler.tuning.build import Builder, build_copy, folder_name
from mlc_amd.compiler.tuning.database import Checked, Measured, plan_text
from mlc_amd.compiler.tuning.session import TuningSession
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.measure.run_kit import CANDIDATES, COPY, FORMAT, KIT, RESULTS
from mlc_amd.schedules.plans.workload import VERSION, Workload

RUNNER = "kit"
TASK = ("name", "calls", "weight", "bytes", "flops")  # what kit.json has of a Task besides its workload
ASSEMBLY = "*.s.gz"  # which targets add for readers
KINDS = ("vulkan", "rocm")  # targets whose kernels run without TVM
SOURCES = (
    "__init__.py", "closing.py", "errors.py", "gpus.py", "host.py", "random_weights.py", "weight_block.py",
    "devices/__init__.py", "devices/choice.py", "devices/hip/*.py", "devices/vulkan/*.py", "measure/*.py",
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
    """A kit that was written. failed: candidates that could not be built; the database knows them."""

    folder: Path
    candidates: int
    failed: int
    nbytes: int


@dataclass
class Kit:
    """A kit that was measured. tasks: of compiler/tuning/tasks.py. candidates: of kit.json; found: results.json."""

    folder: Path
    target: str
    arch: str
    model: str
    tasks: list[Task]
    candidates: dict[str, dict]
    found: dict


def check_folder(folder: Path, kind: str) -> None:
    """UserError for a folder that is not empty, or a target whose kernels a kit cannot measure."""
    if kind not in KINDS:
        raise UserError(
            f"a kit holds no TVM, which kernels of target {kind} need to run: tune on that machine, or use --runner rpc"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: choose another folder for the kit")


def export(
    session: TuningSession, folder: Path, kind: str, arch: str, model: str, count: int, progress=lambda done, of: None
) -> Exported:
    """Writes the next round of `session`, `count` candidates and their untuned kernels, into the new folder `folder`.

    kind, arch: names of target and arch. model: its name, for the reader. Candidates that do not build are reported to
    the session as failed. UserError if there is nothing left to measure, or for the folder.
    """
    check_folder(folder, kind)
    chosen = session.round(count)
    if not chosen:
        raise UserError("every plan of every task is measured: there is nothing to export")
    # the default plan's kernel is the untuned one
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
        facts |= {"tvm": tvm.__version__, "version": VERSION, "tasks": [_task_entry(task) for task in session.tasks]}
        (folder / KIT).write_text(json.dumps(facts | {"candidates": candidates}, indent=1))
    except OSError as e:
        raise UserError(f"cannot write {folder}: {e.strerror or e}; free some space or choose another place") from e
    nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Exported(folder, len(candidates), len(errors), nbytes)


def _task_entry(task: Task) -> dict:
    return {name: getattr(task, name) for name in TASK} | {"op": task.workload.op, "args": task.workload.args}


def _copy_sources(folder: Path) -> None:
    """The runtime's sources, as far as measuring needs them."""
    root = Path(runtime.__file__).parent
    for file in sorted(file for pattern in SOURCES for file in root.glob(pattern)):
        place = folder / "mlc_amd" / "runtime" / file.relative_to(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)


def load(folder: Path) -> Kit:
    """A kit that was measured. UserError for anything else, or one whose files are invalid."""
    kit = _read(folder / KIT, "is no kit of this version; export it again", _kit_fault)
    if (kit["tvm"], kit["version"]) != (tvm.__version__, VERSION):
        made = f"TVM {kit['tvm']} and plans of version {kit['version']}"
        raise UserError(f"{folder} was made with {made}, this is {tvm.__version__} and {VERSION}: export it again")
    if not (folder / RESULTS).exists():
        raise UserError(
            f"{folder} holds no {RESULTS}: run `python3 run.py` in it on the machine that it is for, and take that "
            "file back"
        )
    advice = "is damaged or was changed; measure the kit again"
    found = _read(folder / RESULTS, advice, lambda data: _results_fault(data, kit))
    tasks = [Task(Workload.from_json(entry), *(entry[name] for name in TASK)) for entry in kit["tasks"]]
    return Kit(folder, kit["target"], kit["arch"], kit["model"], tasks, kit["candidates"], found)


def feed(kit: Kit, session: TuningSession) -> Counter:
    """Gives the kit's new measurements and verifications to a session of its tasks. Counts of "measured", of these
    "failed"; "known" to the database; "missing": not measured; "stale": not in the space today; "checked", of these
    "wrong"."""
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
        # a race may have been won once: a later kit may refute what passed
        if check and (not records[text].checked or (records[text].passed and not check["passed"])):
            session.check(task, plan, Checked(**check))
            fed["checked"] += 1
            fed["wrong"] += not check["passed"]
    return fed


def _read(path: Path, advice: str, fault) -> dict:
    """A JSON file of a kit. fault(data): what is wrong with its content, "" if nothing is."""
    try:
        data = json.loads(path.read_text())
        wrong = fault(data)
    except OSError as e:
        why = f"{e.strerror or e}; give the folder of a kit that `mlc-amd tune --export-kit` made"
        raise UserError(f"{path}: {why}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
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
    if (found["format"], found["kit"]) != (FORMAT, kit["id"]):
        return "it belongs to another kit"
    if strange := sorted({*found["results"], *found["checks"]} - kit["candidates"].keys()):
        return f"no candidate is called {strange[0]!r}"
    if not all(isinstance(found["facts"].get(key, ""), str) for key in ("device", "driver")):
        return "the device has no name"
    for name, result in found["results"].items():
        error = result["error"]
        if not (_times(result["seconds"], *result["runs"]) if error is None else error and isinstance(error, str)):
            return f"{name} has neither seconds nor an error"
    for name, check in found["checks"].items():
        deviation, gain = check["deviation"], check["gain"]
        good = isinstance(check["error"], str) and check["checked"] in ("device", "lavapipe")
        good &= isinstance(check["passed"], bool) and check.keys() == Checked.__dataclass_fields__.keys()
        if not good or not (deviation in (None, 0) or _times(deviation)) or not (gain is None or _times(gain)):
            return f"the check of {name} says nothing"
    return ""


def _times(*values) -> bool:
    """Whether all are positive, finite numbers."""
    return all(type(value) in (int, float) and 0 < value < math.inf for value in values)
