"""Tuning sessions: what is measured next, and which plans win, with a formula in the place of a device."""

import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from formula import GFX, NVIDIA, Bench, Task, cost, linear, right

from mlc_amd.compiler.tuning import database as databases
from mlc_amd.compiler.tuning import session as sessions
from mlc_amd.compiler.tuning.database import Checked, Database, Lookup, Measured, Record
from mlc_amd.compiler.tuning.session import MAX_SLOWER, TuningSession, run
from mlc_amd.compiler.tuning.tasks import Task as ModelTask
from mlc_amd.schedules.space import space

pytest.importorskip("xgboost")


# ---- sessions and the database


def clock(now: list[float]) -> SimpleNamespace:
    """In the place of the module `time`, whose own clock other threads of this process wait on."""
    return SimpleNamespace(monotonic=lambda: now[0], time=time.time)


def test_session_measures_defaults_first_then_where_the_time_is(tmp_path):
    tasks = [Task(linear(1024), 1), Task(linear(8192), 50)]
    bench = Bench()
    with Database(GFX, tmp_path) as database:
        session = TuningSession(tasks, GFX, database)
        run(session, bench, right, trials=34, batch=lambda: 16)
    assert [key for key, _ in bench.seen[:2]] == [task.workload.key for task in tasks]
    heavy = sum(key == tasks[1].workload.key for key, _ in bench.seen)
    assert heavy > 30 and len(bench.seen) == 34


def test_a_second_session_goes_on_without_repeating(tmp_path):
    tasks, bench = [Task(linear())], Bench(fails=lambda plan: plan.rows == 16)
    for trials in (40, 40):
        with Database(GFX, tmp_path) as database:
            run(TuningSession(tasks, GFX, database), bench, right, trials=trials, batch=lambda: 8)
    assert len(bench.seen) == len(set(bench.seen)) == 80
    with Database(GFX, tmp_path) as database:
        records = database.entry(tasks[0].workload).records.values()
        assert len(records) == 80 and any(record.error == "no" for record in records)


def test_a_round_leaves_out_tasks_that_are_not_worth_a_plan(tmp_path):
    """Of more plans than the cost model ranks one by one, where a search that proposes none would fail."""
    small, large = (linear(n, m=64, layout="lanes:4") for n in (1024, 8192))
    tasks = [ModelTask(workload, "", {}, weight, 1e6, 0) for workload, weight in ((small, 1e-9), (large, 50))]
    with Database(NVIDIA, tmp_path) as database:
        session = TuningSession(tasks, NVIDIA, database)
        for task, plan in session.round(2):
            session.report(task, plan, Measured(1e-5, runs=[1e-5, 1e-5]))
        assert [task for task, _ in session.round(3)] == [tasks[1]] * 3


def test_the_wrong_winner_is_dropped_and_the_next_best_checked(tmp_path):
    task, refused = Task(linear()), []

    def verify(workload, plan):
        if len(refused) < 2:
            refused.append(plan)
            return Checked("emulator", False, 3.5, "off by 3.5")
        return right(workload, plan)

    with Database(GFX, tmp_path) as database:
        session = TuningSession([task], GFX, database)
        run(session, Bench(), verify, trials=40)
        winner = database.entry(task.workload).winner
        assert session.refuted == 2 and winner.checked == "emulator"
        faster = [r for r in database.entry(task.workload).records.values() if r.seconds < winner.seconds]
        assert sorted(databases.plan_text(r.plan) for r in faster) == sorted(
            databases.plan_text(asdict(plan)) for plan in refused
        )
    with Database(GFX, tmp_path) as database:  # also when read again
        assert TuningSession([task], GFX, database).unchecked() == []


def test_a_winner_that_was_only_lucky_is_none(tmp_path):
    """Plans that looked faster than the default, and are not in interleaved rounds."""
    task, timed = Task(linear()), []

    def verify(workload, plan):
        timed.append(plan)
        return Checked("device", True, 0.0, gain=1.25 if len(timed) == 3 else 0.9)

    with Database(GFX, tmp_path) as database:
        session = TuningSession([task], GFX, database)
        run(session, Bench(), verify, trials=40)
        entry = database.entry(task.workload)
        assert entry.winner.plan == asdict(timed[2]) and 3 <= len(timed) <= 1 + MAX_SLOWER and session.refuted == 0
        assert entry.seconds(entry.winner) == entry.untuned.seconds / 1.25
    with Database(GFX, tmp_path) as database:  # also when read again
        assert not {plan for _, plan in TuningSession([task], GFX, database).unchecked()} & set(timed)
    assert Lookup(GFX, "user", user=tmp_path).find(task.workload)[0] == timed[2]


def test_a_time_limit_leaves_time_for_the_checks(tmp_path, monkeypatch):
    """On a clock that measurements (a second) and checks (eight) move forward."""
    tasks, now = [Task(linear(n)) for n in (4096, 8192, 2048)], [0.0]
    monkeypatch.setattr(sessions, "time", clock(now))

    def measure(pairs):
        now[0] += len(pairs)
        return Bench()(pairs)

    def verify(workload, plan):
        now[0] += 8
        return right(workload, plan)

    with Database(GFX, tmp_path) as database:
        session = TuningSession(tasks, GFX, database)
        run(session, measure, verify, seconds=60)
        assert not session.unchecked() and session.trials >= 30 and 50 <= now[0] <= 68


def test_what_there_was_no_time_to_check_is_checked_by_the_next_run(tmp_path, monkeypatch):
    """Plans are fast by luck, the first that is checked and the next; it is the checks that take time."""
    task, now, checks = Task(linear()), [0.0], []
    monkeypatch.setattr(sessions, "time", clock(now))

    def measure(pairs):
        now[0] += 0.01 * len(pairs)
        return Bench()(pairs)

    def verify(workload, plan):
        now[0] += 60
        checks.append(plan)
        return Checked("device", True, 0.0, gain=0.9)

    with Database(GFX, tmp_path) as database:
        session = TuningSession([task], GFX, database)
        run(session, measure, verify, seconds=30, trials=20)
        assert len(checks) == 1 and len(session.unchecked()) == 1
    assert Lookup(GFX, "user", user=tmp_path).find(task.workload)[0] in (None, space(task.workload, GFX).default)
    with Database(GFX, tmp_path) as database:
        now[0] = 0.0
        run(TuningSession([task], GFX, database), measure, verify, seconds=1000, trials=1)
        assert len(checks) > 1 and len(set(checks)) == len(checks)


def test_a_plan_that_was_the_default_once_is_one_like_others(tmp_path):
    task = Task(linear())
    choices = space(task.workload, GFX)
    former = next(plan for plan in choices.plans if plan != choices.default)
    with Database(GFX, tmp_path) as database:
        database.add(task.workload, Record(plan=asdict(former), seconds=1.0, default=True))
        session = TuningSession([task], GFX, database)
        session.report(task, choices.default, Measured(2.0))
        assert session.unchecked() == [(task, former)]
        assert database.entry(task.workload).winner.plan == asdict(choices.default)
        session.check(task, former, Checked("device", True, 0.0, gain=1.5))
        entry = database.entry(task.workload)
        assert entry.seconds(entry.winner) == 2.0 / 1.5
        third = next(plan for plan in choices.plans if plan not in (former, choices.default))
        session.report(task, third, Measured(3.0))
        entry.refresh(
            replace(choices, default=third)
        )  # another day, another default: what was gained over the old one is past
        assert (
            entry.untuned.plan == asdict(third)
            and entry.seconds(entry.records[databases.plan_text(asdict(former))]) == 1.0
        )
    assert Lookup(GFX, "user", user=tmp_path).find(task.workload)[0] == former


def test_where_no_plan_is_faster_in_interleaved_rounds_the_default_stays(tmp_path):
    task, timed = Task(linear()), []

    def verify(workload, plan):
        timed.append(plan)
        return Checked("device", True, 0.0, gain=0.99)

    with Database(GFX, tmp_path) as database:
        run(TuningSession([task], GFX, database), Bench(), verify, trials=40)
        assert len(timed) == MAX_SLOWER and database.entry(task.workload).winner.default
    assert Lookup(GFX, "user", user=tmp_path).find(task.workload)[0] is None


NOTHING_TO_CHECK_WITH = "there is no GPU here"


def test_what_nothing_can_check_is_not_wrong_and_never_used(tmp_path):
    tasks, verified = [Task(linear()), Task(linear(8192))], []

    def verify(workload, plan):
        verified.append((workload.key, plan))
        return Checked("", False, error=NOTHING_TO_CHECK_WITH)

    with Database(GFX, tmp_path) as database:
        session = TuningSession(tasks, GFX, database)
        run(session, Bench(), verify, trials=50)
        unverified = {(task.workload.key, plan) for task, plan in session.unverified}
        assert session.refuted == 0 and unverified == set(verified)
        assert (
            len(verified) == len(session.unverified) == 2
        )  # not every plan that is faster than the default: they would fare the same
        assert set(session.unverified.values()) == {NOTHING_TO_CHECK_WITH}
        records = [record for task in tasks for record in database.entry(task.workload).records.values()]
        assert not any(record.refuted for record in records) and all(
            database.entry(task.workload).winner.default for task in tasks
        )
    assert Lookup(GFX, "user", user=tmp_path).find(tasks[0].workload)[0] is None
    with Database(GFX, tmp_path) as database:  # the next run verifies again, and here they can be checked
        session = TuningSession(tasks, GFX, database)
        assert {(task.workload.key, plan) for task, plan in session.unchecked()} == set(verified)
        run(session, Bench(), right, trials=1)
        assert not session.unverified and not any(database.entry(task.workload).winner.default for task in tasks)


def test_where_one_plan_cannot_be_checked_the_next_best_is(tmp_path):
    task, verified = Task(linear()), []

    def verify(workload, plan):
        verified.append(plan)
        return Checked("", False, error="it does not build again") if len(verified) == 1 else right(workload, plan)

    with Database(GFX, tmp_path) as database:
        session = TuningSession([task], GFX, database)
        run(session, Bench(), verify, trials=40)
        ranked = sorted(database.entry(task.workload).records.values(), key=lambda record: record.seconds)
        assert [record.plan for record in ranked[:2]] == [asdict(plan) for plan in verified]
        assert (
            database.entry(task.workload).winner == ranked[1] and session.refuted == 0 and len(session.unverified) == 1
        )


def test_a_batch_may_grow(tmp_path):
    sizes, bench = [], Bench()

    def measure(pairs):
        sizes.append(len(pairs))
        return bench(pairs)

    with Database(GFX, tmp_path) as database:
        run(
            TuningSession([Task(linear())], GFX, database),
            measure,
            right,
            trials=40,
            batch=lambda: 16 if len(sizes) < 2 else 64,
        )
    assert sizes == [1, 16, 23]


def test_an_unchecked_plan_is_never_used(tmp_path):
    task = Task(linear())
    with Database(GFX, tmp_path) as database:
        session = TuningSession([task], GFX, database)
        for found, plan in session.next(1) + session.next(20):
            session.report(found, plan, Measured(cost(task.workload, plan)))
    assert Lookup(GFX, "user", user=tmp_path).find(task.workload)[0] is None
