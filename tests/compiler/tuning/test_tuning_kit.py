"""Kits: written, measured by a process without TVM on Mesa's CPU driver, taken over; what comes back damaged is
refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vulkan_harness import gpu

from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.tuning import kit as kits
from mlc_amd.compiler.tuning.database import Database, Measured
from mlc_amd.compiler.tuning.session import TuningSession
from mlc_amd.compiler.tuning.tasks import extract
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import cli

pytest.importorskip("xgboost")
ARCH, SPEC, COUNT = "lavapipe", "tiny:q4_0", 4
CHECK = {"checked": "device", "passed": True, "deviation": 0.0, "error": "", "gain": 1.1}


@pytest.fixture(scope="module")
def tasks():
    """Two small decode kernels only: the driver is slow."""
    found = extract(synthetic(SPEC), make_target("vulkan", ARCH), 64)
    small = [task for task in found if task.workload.args.get("m") == 1]
    linear, norms = ([task for task in small if task.workload.name == op] for op in ("linear", "rms_norm"))
    return [linear[0], norms[0]]


@pytest.fixture
def opened(tasks, tmp_path):
    """A session on an empty database."""
    arch = make_target("vulkan", ARCH).archs[0]
    with Database(arch, tmp_path / "database") as database:
        yield TuningSession(tasks, arch, database)


@pytest.fixture(scope="module")
def measured(tasks, tmp_path_factory) -> tuple[Path, str]:
    """A kit after its run, and what the run printed."""
    gpu()
    arch, folder = make_target("vulkan", ARCH).archs[0], tmp_path_factory.mktemp("kit") / "kit"
    with Database(arch, tmp_path_factory.mktemp("database")) as database:
        made = kits.export(TuningSession(tasks, arch, database), folder, "vulkan", ARCH, SPEC, COUNT)
    assert made.candidates == COUNT and made.failed == 0
    assert made.nbytes < 40e6 * COUNT / 64
    done = run_kit(folder, tmp_path_factory.mktemp("blocked"))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def run_kit(folder: Path, blocked: Path) -> subprocess.CompletedProcess:
    """run.py in a Python that has numpy, but neither this project nor what else that needs."""
    for name in ("tvm", "tvm_ffi", "msgspec"):
        (blocked / f"{name}.py").write_text("raise ImportError('this machine has numpy only')")
    (blocked / "sitecustomize.py").write_text(
        "import os, sys\n"
        "sys.path[:] = [path for path in sys.path if not os.path.exists(os.path.join(path, 'mlc_amd/__init__.py'))]"
    )
    command = [sys.executable, str(folder / "run.py")]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(blocked)}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def returned(measured, tmp_path) -> Path:
    """A copy of the measured kit's two files, to be changed."""
    folder = tmp_path / "returned"
    folder.mkdir()
    for name in ("kit.json", "results.json"):
        (folder / name).write_text((measured[0] / name).read_text())
    return folder


def change(folder: Path, edit) -> None:
    path = folder / "results.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def test_a_kit_is_measured_without_tvm(measured, tasks):
    folder, printed = measured
    kit, found = (json.loads((folder / name).read_text()) for name in ("kit.json", "results.json"))
    assert found["results"].keys() == kit["candidates"].keys()
    assert all(result["error"] is None and result["seconds"] > 0 for result in found["results"].values())
    assert f"{COUNT} of {COUNT} measured" in printed
    assert found["facts"]["copy_bandwidth"] > 0
    # each task has its untuned kernel, and what is faster than that was compared with it
    references = {name: entry["reference"] for name, entry in kit["candidates"].items()}
    assert sum(not reference for reference in references.values()) == len(
        {entry["task"] for entry in kit["candidates"].values()}
    )
    times = {name: result["seconds"] for name, result in found["results"].items()}
    assert found["checks"].keys() == {name for name, of in references.items() if of and times[name] < times[of]}
    assert all(check["passed"] and check["checked"] == "lavapipe" for check in found["checks"].values())
    assert not list((folder / "lib").rglob("compiler*")) and not list((folder / "lib").rglob("schedules*"))


def test_a_second_run_goes_on(measured, tmp_path):
    folder, _ = measured
    before = json.loads((folder / "results.json").read_text())
    lost = list(before["results"])[-1]
    change(folder, lambda data: (data["results"].pop(lost), data["checks"].pop(lost, None)))
    done = run_kit(folder, tmp_path)
    assert done.returncode == 0, done.stderr
    after = json.loads((folder / "results.json").read_text())
    assert after["results"].keys() == before["results"].keys()
    assert all(after["results"][name] == before["results"][name] for name in before["results"] if name != lost)
    assert done.stdout.count("GB/s") == 1 and lost in done.stdout


def test_measurements_and_checks_come_into_the_database(returned, opened):
    kit = kits.load(returned)
    fed = kits.feed(kit, opened)
    assert [fed[name] for name in ("measured", "failed", "known", "missing", "stale")] == [COUNT, 0, 0, 0, 0]
    assert (fed["checked"], fed["wrong"]) == (len(kit.found["checks"]), 0)
    entries = opened.database.entries.values()
    records = [record for entry in entries for record in entry.records.values()]
    assert len(records) == COUNT and {record.runner for record in records} == {"kit"}
    assert sum(record.default for record in records) == len(entries)
    assert sorted(record.seconds for record in records) == sorted(
        result["seconds"] for result in kit.found["results"].values()
    )
    assert not opened.unchecked()
    again = kits.feed(kit, opened)
    assert (again["measured"], again["known"]) == (0, COUNT)


def test_the_next_round_has_other_plans(returned, opened, tmp_path):
    kits.feed(kits.load(returned), opened)
    first = {(entry["task"], json.dumps(entry["plan"])) for entry in kits.load(returned).candidates.values()}
    kits.export(opened, tmp_path / "next", "vulkan", ARCH, SPEC, 6)
    kit = json.loads((tmp_path / "next" / "kit.json").read_text())
    fresh = {(entry["task"], json.dumps(entry["plan"])) for entry in kit["candidates"].values() if entry["reference"]}
    assert len(fresh) == 6 and not fresh & first


def test_wrong_results_disqualify_a_plan(returned, opened):
    kit = json.loads((returned / "kit.json").read_text())
    name, entry = next((name, entry) for name, entry in kit["candidates"].items() if entry["reference"])

    def spoil(data):
        data["results"][name] |= {"seconds": 1e-9, "runs": [1e-9]}
        data["checks"][name] = {
            "checked": "lavapipe",
            "passed": False,
            "deviation": 7.0,
            "error": "Y0 differs",
            "gain": None,
        }

    change(returned, spoil)
    fed = kits.feed(kits.load(returned), opened)
    assert fed["wrong"] == 1 and opened.refuted == 1
    found = next(e for e in opened.database.entries.values() if e.workload.key == entry["task"])
    assert found.winner.seconds > 1e-9


def test_a_later_kit_may_refute_what_passed(returned, opened):
    kit = json.loads((returned / "kit.json").read_text())
    name, entry = next((name, entry) for name, entry in kit["candidates"].items() if entry["reference"])
    for passed in (True, False, True):
        change(returned, lambda data, passed=passed: data["checks"].update({name: CHECK | {"passed": passed}}))
        kits.feed(kits.load(returned), opened)
    found = next(e for e in opened.database.entries.values() if e.workload.key == entry["task"])
    assert [record.passed for record in found.records.values() if record.plan == entry["plan"]] == [False]


def test_a_failed_candidate_is_kept_as_failed(returned, opened):
    def fail(data):
        name = next(iter(data["checks"].keys() ^ data["results"].keys()))
        data["results"][name] = {"error": "ended by SIGSEGV"}

    change(returned, fail)
    fed = kits.feed(kits.load(returned), opened)
    assert (fed["measured"], fed["failed"]) == (COUNT, 1)


def first_result(data) -> dict:
    return next(iter(data["results"].values()))


def check_first(data, **facts) -> None:
    data["checks"][next(iter(data["results"]))] = CHECK | facts


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.pop("results"),
        lambda data: data.update(kit="0" * 32),
        lambda data: data.update(format=99),
        lambda data: data.update(facts=[]),
        lambda data: data["results"].update({"../../etc": {"error": None, "seconds": 1.0, "runs": [1.0]}}),
        lambda data: first_result(data).update(seconds="fast"),
        lambda data: first_result(data).update(seconds=-1.0),
        lambda data: first_result(data).update(seconds=float("nan")),
        lambda data: first_result(data).update(seconds=True),
        lambda data: first_result(data).update(runs="none"),
        lambda data: first_result(data).update(error=""),
        lambda data: data["results"].update({next(iter(data["results"])): None}),
        lambda data: check_first(data, checked="trust me"),
        lambda data: check_first(data, passed=1),
        lambda data: check_first(data, deviation="none"),
        lambda data: check_first(data, gain=-1),
        lambda data: check_first(data, gain="much"),
        lambda data: check_first(data, error=None),
    ],
)
def test_what_no_measuring_program_wrote_is_refused(returned, edit):
    change(returned, edit)
    with pytest.raises(UserError, match="measure the kit again"):
        kits.load(returned)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1', "\x00\xff"])
def test_a_garbled_file_is_refused(returned, text):
    (returned / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"results\.json"):
        kits.load(returned)


def test_a_kit_that_was_not_measured_and_a_folder_that_is_none(returned, tmp_path):
    (returned / "results.json").unlink()
    with pytest.raises(UserError, match=r"run\.py"):
        kits.load(returned)
    with pytest.raises(UserError, match="export-kit"):
        kits.load(tmp_path / "nothing")


def test_a_kit_of_another_version_is_refused(returned):
    kit = json.loads((returned / "kit.json").read_text())
    kit["version"] = 0
    (returned / "kit.json").write_text(json.dumps(kit))
    with pytest.raises(UserError, match="export it again"):
        kits.load(returned)


def test_kits_are_for_gpus_and_new_folders(tmp_path):
    with pytest.raises(UserError, match="holds no TVM"):
        kits.check_folder(tmp_path / "new", "cpu")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="another folder"):
        kits.check_folder(tmp_path, "vulkan")


def test_everything_measured_leaves_nothing_to_export(opened, tmp_path):
    for task in opened.tasks:
        for plan in opened.space(task).plans:
            opened.report(task, plan, Measured(1e-3))
    with pytest.raises(UserError, match="nothing to export"):
        kits.export(opened, tmp_path / "kit", "vulkan", ARCH, SPEC, 5)


def test_a_round_gives_every_task_its_default_and_the_heavy_ones_more(opened):
    chosen = opened.round(COUNT)
    assert len(chosen) == COUNT and len({(task.workload.key, plan) for task, plan in chosen}) == COUNT
    counts = {task: sum(other is task for other, _ in chosen) for task in opened.tasks}
    assert min(counts.values()) >= 1
    for task in opened.tasks:
        assert opened.space(task).default in [plan for other, plan in chosen if other is task]
    heavy = max(opened.tasks, key=lambda task: task.weight * task.bytes)
    assert counts[heavy] == max(counts.values()) > 1


def test_checks_of_an_earlier_session_stay(returned, opened):
    kits.feed(kits.load(returned), opened)
    checked = [
        record for entry in opened.database.entries.values() for record in entry.records.values() if record.checked
    ]
    fed = kits.feed(kits.load(returned), opened)
    assert fed["checked"] == 0 and all(isinstance(record.checked, str) and record.passed for record in checked)


def _without_results(kit: Path, folder: Path) -> None:
    folder.mkdir()
    for name in ("kit.json", "results.json"):
        (folder / name).write_text((kit / name).read_text())
    change(folder, lambda data: data.update(results={}, checks={}))


def test_where_nothing_runs_the_program_fails(measured, tmp_path):
    folder = shutil.copytree(measured[0], tmp_path / "kit")
    (folder / "results.json").unlink()
    kit = json.loads((folder / "kit.json").read_text())
    name = next(name for name, entry in kit["candidates"].items() if not entry["reference"])
    (folder / "kit.json").write_text(json.dumps(kit | {"candidates": {name: kit["candidates"][name]}}))
    for file in folder.glob(f"candidates/{name}/*.spv"):
        file.write_bytes(b"")
    done = run_kit(folder, tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: no kernel could be measured"), done.stdout


def test_the_commands(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert (
        cli.main(["tune", "--import-kit", str(measured[0]), "--export-kit", str(tmp_path / "next"), "--trials", "3"])
        == 0
    )
    out = capsys.readouterr().out
    assert f"{COUNT} measurements (0 failed)" in out and "python3 run.py" in out
    assert (tmp_path / "next" / "run.py").is_file()
    assert cli.main(["tune", "--import-kit", str(tmp_path / "next")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    _without_results(measured[0], tmp_path / "empty")
    assert cli.main(["tune", "--import-kit", str(tmp_path / "empty")]) == 1
    assert capsys.readouterr().err.endswith("has no measurement that can be used\n")
    assert cli.main(["tune", "some.gguf", "--import-kit", str(measured[0])]) == 2
    assert "leave the model out" in capsys.readouterr().err
