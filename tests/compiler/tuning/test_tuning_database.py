"""The database of measurements, what survives kill -9, and what a compile finds in it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from formula import GFX, Bench, Task, linear, right
from workloads import operator

from mlc_amd.compiler.tuning import database as databases
from mlc_amd.compiler.tuning import lines as lines_of
from mlc_amd.compiler.tuning.database import Checked, Database, Lookup, Measured
from mlc_amd.compiler.tuning.session import TuningSession, run
from mlc_amd.compiler.tuning.ship import ship
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import arch as archs
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.operators import Operator, from_json
from mlc_amd.schedules.space import space

pytest.importorskip("xgboost")


def test_torn_and_damaged_lines_are_dropped(tmp_path):
    task = Task(linear())
    with Database(GFX, tmp_path) as database:
        run(TuningSession([task], GFX, database), Bench(), right, trials=20, batch=lambda: 10)
    log = tmp_path / databases.LOG
    lines = log.read_bytes().splitlines(keepends=True)
    slowest = max(range(len(lines)), key=lambda i: json.loads(lines[i]).get("seconds", 0))
    log.write_bytes(b"".join([*lines[:slowest], b"\0\xff garbage\n", *lines[slowest + 1 :]]) + lines[0][:40])
    assert (
        Lookup(GFX, "user", user=tmp_path).find(task.workload)[0] is not None
    )  # reading repairs nothing and accepts damaged lines
    bench = Bench()
    with Database(GFX, tmp_path) as database:
        assert len(database.notes) == 2 and len(database.entry(task.workload).records) == 19
        run(TuningSession([task], GFX, database), bench, right, trials=1)
    assert not lines_of.read(log)[1] and len(bench.seen) == 1


def attention(ctx: int) -> Operator:
    return operator(
        "attention", {"heads": 8, "kv_heads": 2, "d": 64, "ctx": ctx, "m": 64, "single": 0, "layout": "lanes:2"}
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A database with a checked winner of `linear()`."""
    folder = tmp_path_factory.mktemp("written")
    tuned(folder, GFX)
    return folder


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"5", "expected object, got int"),
        (b"null", "expected object, got null"),
        (b'{"op":' * 5000, "expected str, got object"),
        (b"1" * 5000, "number out of range"),
        ({"seconds": 10**30}, "key seconds: expected float <= 86400"),
        ({"seconds": "fast"}, "key seconds"),
        ({"seconds": 0.0}, "key seconds: expected float > 0"),
        ({"gain": 1e300}, "key gain"),
        ({"passed": "yes"}, "key passed: expected bool"),
        ({"plan": {"rows": 1.5}}, r"key plan\['rows'\]: expected int, got float"),
        ({"plan": None}, "key plan"),
        ({"tvm": 27}, "key tvm"),
        ({"op": "attention", "args": {}}, "without a valid operator"),
        ({"op": "attention", "args": attention(0).args}, "impossible 'ctx'"),
    ],
)
def test_a_line_that_nobody_wrote_is_left_out(written, tmp_path, line, why):
    """With a note; a compile uses the others."""
    workload, log = linear(), tmp_path / databases.LOG
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    if isinstance(line, dict):
        line = json.dumps(json.loads(log.read_text().splitlines()[0]) | line, default=str).encode()
    log.write_bytes(log.read_bytes() + line + b"\n")
    lookup = Lookup(GFX, "user", user=tmp_path)
    assert lookup.find(workload)[1] == "user"
    (note,) = lookup.notes
    assert re.search(why, note) and "\n" not in note and len(note) < 1000
    with Database(GFX, tmp_path) as database:
        assert database.notes == [note]
    with Database(GFX, tmp_path) as database:
        assert not database.notes


@pytest.mark.parametrize("seconds", [10**30, float("nan"), float("inf"), -1.0, 0])
def test_a_measurement_that_makes_no_sense_is_kept_as_a_failed_one(tmp_path, seconds):
    task = Task(linear())
    with Database(GFX, tmp_path) as database:
        session = TuningSession([task], GFX, database)
        (_, plan), *_ = session.next(1)
        session.report(task, plan, Measured(seconds, runner="kit"))
    with Database(GFX, tmp_path) as database:
        (record,) = database.entry(task.workload).records.values()
    assert record.seconds is None and "makes no sense" in record.error


@pytest.mark.parametrize("name", [databases.LOG, databases.HEADER])
def test_what_is_no_file_is_told(tmp_path, name):
    tuned(tmp_path, GFX)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert "is not a file" in Lookup(GFX, "user", user=tmp_path).notes[0]
    with pytest.raises(UserError, match="is not a file"):
        Database(GFX, tmp_path)


def test_one_process_at_a_time(tmp_path):
    with Database(GFX, tmp_path), pytest.raises(UserError, match="another process is tuning"):
        Database(GFX, tmp_path)
    Database(GFX, tmp_path).close()


KILLED = """
import sys, time
from formula import Bench, Task, linear, right, GFX
from mlc_amd.compiler.tuning.ship import ship
from mlc_amd.compiler.tuning.database import Database
from mlc_amd.compiler.tuning.session import TuningSession, run
bench = Bench()
def slow(pairs):
    out = bench(pairs)
    print(len(bench.seen), flush=True)
    time.sleep(0.01)
    return out
from pathlib import Path
with Database(GFX, Path(sys.argv[1])) as database:
    run(TuningSession([Task(linear()), Task(linear(8192))], GFX, database), slow, right, batch=lambda: 4)
"""


def test_kill_9_loses_nothing_and_repeats_nothing(tmp_path):
    support = Path(__file__).parents[2] / "support"
    reported = []
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=support
        )
        for line in child.stdout:
            if int(line) >= 8:
                time.sleep(0.004 * len(reported))
                child.send_signal(signal.SIGKILL)
                break
        rest = child.stdout.read().split()
        child.wait()
        reported.append(int(rest[-1]) if rest else int(line))
    tasks = [Task(linear()), Task(linear(8192))]
    with Database(GFX, tmp_path) as database:
        kept = sum(len(database.entry(task.workload).records) for task in tasks)
        # all batches but the last were reported before the next was measured
        assert sum(reported) - 2 * 4 <= kept <= sum(reported)
        bench = Bench()
        run(TuningSession(tasks, GFX, database), bench, right, trials=30)
        total = sum(len(database.entry(task.workload).records) for task in tasks)
    assert total == kept + 30 and len(set(bench.seen)) == 30


# ---- what a compile uses


def tuned(folder, arch, workload=None) -> Operator:
    """A database with a checked winner."""
    workload = workload or linear()
    with Database(arch, folder) as database:
        run(TuningSession([Task(workload)], arch, database), Bench(), right, trials=16)
    return workload


def test_lookup_prefers_the_users_record_and_obeys_the_mode(tmp_path):
    workload = tuned(tmp_path / "user", GFX)
    shipped = tmp_path / "gfx1100.json"
    with Database(GFX, tmp_path / "other") as database:
        session = TuningSession([Task(workload)], GFX, database)
        (task, default), *_ = session.next(1)
        session.report(task, default, Measured(1.0))
        plan = replace(default, rows=1, waves=1)
        session.report(task, plan, Measured(0.5))
        session.check(task, plan, Checked("device", True, gain=1.9))
        assert ship(database, shipped.parent, "a test").added == 1
    lookup = {mode: Lookup(GFX, mode, tmp_path / "user", shipped).find(workload) for mode in databases.MODES}
    assert lookup["none"] == (None, "default")
    assert lookup["shipped"] == (plan, "shipped")
    assert lookup["user"] == lookup["auto"] and lookup["user"][1] == "user" and lookup["user"][0] != plan
    assert Lookup(GFX, "auto", tmp_path / "nothing", shipped).find(workload) == (plan, "shipped")
    assert Lookup(GFX, "auto", tmp_path / "user", shipped).find(linear(4112)) == (None, "default")
    with pytest.raises(UserError, match="--tuned"):
        Lookup(GFX, "always")


def test_records_of_another_arch_are_never_used(tmp_path):
    workload = tuned(tmp_path / "gfx1100", GFX)
    with Database(GFX, tmp_path / "gfx1100") as database:
        ship(database, tmp_path, "a test")
    for other in (archs.resolve("gfx1101"), profiles.resolve("rdna3")):
        lookup = Lookup(other, "auto", tmp_path / "gfx1100", tmp_path / "gfx1100.json")
        assert lookup.find(workload) == (None, "default")
        assert len(lookup.notes) == 2 and all("gfx1100" in note for note in lookup.notes)
        with pytest.raises(UserError, match="holds records of gfx1100"):
            Database(other, tmp_path / "gfx1100")
    assert Lookup(GFX, "auto", tmp_path / "gfx1100", tmp_path / "no").find(workload)[1] == "user"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tvm": "0.20.0"}, "made with TVM 0.20.0"),
        ({"version": 0}, "the kernels' plans have changed"),
        ({"plan": {"rows": 2, "waves": 2, "lanes": 8, "unroll": 3}}, "unroll of its plan is not among the choices"),
        ({"plan": {"rows": 2, "warps": 2}}, "has the fields"),
    ],
)
def test_stale_records_are_ignored_with_a_note(tmp_path, change, reason):
    workload = tuned(tmp_path, GFX)
    log = tmp_path / databases.LOG
    (winner,) = [line["plan"] for line in lines_of.read(log)[0] if line.get("passed")]
    lines = [line for line in lines_of.read(log)[0] if line["plan"] == winner]
    log.write_text("".join(json.dumps(line | change) + "\n" for line in lines))
    lookup = Lookup(GFX, "user", tmp_path)
    assert lookup.find(workload) == (None, "default")
    assert len(lookup.notes) == 1 and reason in lookup.notes[0]
    bench = Bench()  # and tuning goes on beside them
    with Database(GFX, tmp_path) as database:
        run(TuningSession([Task(workload)], GFX, database), bench, right, trials=12)
    assert len(bench.seen) == 12
    assert Lookup(GFX, "user", tmp_path).find(workload)[0] is not None


# ---- other capacities of the KV cache


def decode(ctx: int) -> Operator:
    args = {"heads": 8, "kv_heads": 2, "d": 64, "ctx": ctx, "neox": True, "rotary": 64, "eps": None, "layout": "rows"}
    return operator("rope_attention", args)


def record_winner(folder, workload, plan, seconds=1.0) -> None:
    with Database(GFX, folder) as database:
        session = TuningSession([Task(workload)], GFX, database)
        (task,) = session.tasks
        session.report(task, space(workload, GFX).default, Measured(2.0))
        session.report(task, plan, Measured(seconds))
        session.check(task, plan, Checked("device", True, 0.0))


@pytest.mark.parametrize("make", [attention, decode], ids=lambda make: make.__name__)
def test_a_record_of_one_capacity_serves_another(tmp_path, make):
    """Its own records have precedence, then the nearest ones."""
    plans = [plan for plan in space(make(4096), GFX).plans if plan != space(make(4096), GFX).default]
    assert make(4096).key == make(8192).key and make(4096) != make(8192)
    record_winner(tmp_path, make(4096), plans[0])
    lookup = Lookup(GFX, "user", tmp_path)
    assert lookup.find(make(4096)) == lookup.find(make(8192)) == (plans[0], "user") and not lookup.notes
    record_winner(tmp_path, make(16384), plans[1])
    lookup = Lookup(GFX, "user", tmp_path)
    found = [lookup.find(make(ctx))[0] for ctx in (1024, 4096, 16384, 65536)]
    assert found == [plans[0], plans[0], plans[1], plans[1]]
    with Database(GFX, tmp_path) as database:  # times of different capacities are not compared
        assert [len(database.entry(make(ctx)).records) for ctx in (4096, 8192, 16384)] == [2, 0, 2]


# ---- records for others


def shipped(tmp_path, gains: dict[int, float], folder=None):
    """What `ship` did with plans of linear layers of so many rows, as fast as these gains say."""
    with Database(GFX, folder or tmp_path / "measured") as database:
        for rows, gain in gains.items():
            session = TuningSession([Task(linear(rows))], GFX, database)
            (task,) = session.tasks
            default = space(task.workload, GFX).default
            plan = replace(default, rows=1, waves=1)
            session.report(task, default, Measured(1.0, device="a GPU", driver="1.2"))
            session.report(task, plan, Measured(1.0 / gain, device="a GPU", driver="1.2"))
            session.check(task, plan, Checked("device", True, gain=gain))
        return ship(database, tmp_path / "tuned", "mlc-amd tune x --ship tuned")


def records(tmp_path) -> list[dict]:
    return json.loads((tmp_path / "tuned" / "gfx1100.json").read_text())["records"]


def test_only_clear_gains_are_shipped_with_their_origin(tmp_path):
    made = shipped(tmp_path, {4096: 1.5, 4112: 1.01, 4128: 0.9})
    assert (made.added, made.replaced, made.stayed, made.pruned) == (1, 0, 0, 0)
    (record,) = records(tmp_path)
    assert (
        record["args"] == linear(4096).args and record["gain"] == 1.5 and record["command"].startswith("mlc-amd tune")
    )
    assert (record["device"], record["driver"]) == ("a GPU", "1.2") and record["at"] > 0
    plan, origin = Lookup(GFX, "auto", tmp_path / "nobody", made.path).find(linear(4096))
    assert origin == "shipped" and (plan.rows, plan.waves) == (1, 1)


def test_better_records_replace_shipped_ones_and_useless_ones_go(tmp_path):
    shipped(tmp_path, {4096: 1.5, 4112: 1.4, 4144: 1.3})
    path = tmp_path / "tuned" / "gfx1100.json"
    data = json.loads(path.read_text())
    default = asdict(space(linear(4112), GFX).default)
    # what the rule makes by now, and what was faster than another rule's
    changes = {linear(4112).key: {"plan": default}, linear(4144).key: {"over": default | {"rows": 2}}}
    data["records"] = [line | changes.get(from_json(line).key, {}) for line in data["records"]]
    path.write_text(json.dumps(data))
    made = shipped(tmp_path, {4096: 1.3, 4128: 1.2}, tmp_path / "second")
    assert (made.added, made.replaced, made.stayed, made.pruned) == (1, 0, 1, 2)
    made = shipped(tmp_path, {4096: 1.7}, tmp_path / "third")
    assert (made.added, made.replaced, made.stayed, made.pruned) == (0, 1, 1, 0)
    assert sorted(line["gain"] for line in records(tmp_path)) == [1.2, 1.7]


def test_plans_from_elsewhere_are_measured_first(tmp_path):
    found = space(linear(), GFX)
    wanted = [replace(found.default, rows=1, waves=1), replace(found.default, rows=4, waves=2)]
    first = {linear().key: [asdict(plan) for plan in wanted]}
    with Database(GFX, tmp_path) as database:
        session = TuningSession([Task(linear())], GFX, database, first=first)
        jobs = session.next(8)
        assert [plan for _, plan in jobs] == [found.default, *map(found.equal, wanted)]
        session.report(*jobs[0], Measured(1e-5))
        again = TuningSession([Task(linear())], GFX, database, first=first)
        assert [plan for _, plan in again.next(8)] == [*map(found.equal, wanted)]  # the default is measured
        with pytest.raises(ValueError, match="has the fields"):
            TuningSession([Task(linear())], GFX, database, first={linear().key: [{"rows": 1}]})
