"""A tuning session: the searches of all tasks over one database, and which of them measures next.

The next batch goes to the task where it promises most: what its calls lose against the roofline, weighted by how often
they happen, times the chance that more measurements help, which falls with every measurement that did not. Whatever is
reported is in the database before anything else happens, so a session that ends, however, loses nothing; a new one on
the same database goes on.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from mlc_amd.schedules.tuning.database import Checked, Database, Measured, Record, known
from mlc_amd.schedules.tuning.search import Models, Search
from mlc_amd.schedules.tuning.spaces import Space, as_dict

BATCH = 16  # plans that are measured together
FIRST = 2  # measurements of a first batch, where there is a time limit
BEATEN = 4  # of a task's plans that were slower than the default after all: then no others of it are checked
CHECKING = 8  # measurements that take as long as checking a winner, roughly
PATIENCE = 32  # measurements without a better plan that halve a task's chance


class Row(NamedTuple):
    """Where a task stands. Times in seconds of a call, None where nothing is known.

    share     of the tasks' time with the best plans known, weighted; of those that were measured
    default   without tuning
    best      of the plans that ran; `plan` is it
    roofline  what the machine's bandwidth and arithmetic allow at best
    measured, failed, plans: numbers of plans that were measured, of those without a usable result, and of all there are
    """

    task: object
    share: float | None
    default: float | None
    best: float | None
    roofline: float
    plan: object | None
    measured: int
    failed: int
    plans: int


class _Task(NamedTuple):
    task: object
    space: Space
    search: Search


class Session:
    """tasks: of compiler/tuning/tasks.py (`workload`, `weight`); those without choices are left out. roofline: seconds
    of a task's call at best. seed: 1 or more."""

    def __init__(
        self, tasks, arch, database: Database, roofline: Callable[[object], float] = lambda task: 0.0, seed: int = 1
    ):
        self.arch, self.database, self.roofline = arch, database, roofline
        self.trials = 0  # measurements reported to this session
        self.refuted = 0  # plans whose results were wrong
        self.beaten = Counter()  # task's key: plans that were not faster than the default when both were timed in turns
        self.unverified: dict[
            tuple[str, object], str
        ] = {}  # (task's key, plan) whose results nothing could check: why not
        self._tasks: dict[str, _Task] = {}
        models = Models()
        for task in tasks:
            found = database.space(task.workload)
            if found:
                past = known(database.entry(task.workload), found)
                search = Search(task.workload, found, arch, models, past, seed + len(self._tasks))
                self._tasks[task.workload.key] = _Task(task, found, search)

    @property
    def tasks(self) -> list:
        """The tasks that have choices."""
        return [found.task for found in self._tasks.values()]

    def space(self, task) -> Space:
        """What there is to choose for one of `tasks`."""
        return self._tasks[task.workload.key].space

    # ---- what to measure

    def next(self, count: int) -> list[tuple[object, object]]:
        """Up to `count` (task, plan): default plans of tasks without measurements, else plans of one task. Empty: all
        is measured."""
        new = [t for t in self._tasks.values() if not t.search.seconds and t.search.unmeasured == len(t.space.plans)]
        if new:
            return [(t.task, plan) for t in new[:count] for plan in t.search.propose(1)]
        for found in sorted(self._tasks.values(), key=self.promise, reverse=True):
            if plans := found.search.propose(count):
                return [(found.task, plan) for plan in plans]
        return []

    def round(self, count: int) -> list[tuple[object, object]]:
        """`count` (task, plan) to be measured together, where no answer comes before the last: default plans of tasks
        without measurements, then plans of all tasks, more where more is promised; fewer when there are no more."""
        chosen = []
        while len(chosen) < count and (new := [t for t in self._tasks.values() if not self._begun(t)]):
            chosen += [(t.task, plan) for t in new[: count - len(chosen)] for plan in t.search.propose(1)]
        # the square root: small tasks get some, too. Without measurements what a task moves stands for its time
        worth = {
            key: math.sqrt(self.promise(t) or t.task.weight * t.task.bytes * 1e-15) for key, t in self._tasks.items()
        }
        seats = dict.fromkeys(self._tasks, 0)
        for _ in range(count - len(chosen)):
            free = [key for key, t in self._tasks.items() if t.search.unmeasured > seats[key]]
            if not free:
                break
            seats[max(free, key=lambda key: worth[key] / (seats[key] + 1))] += 1
        return chosen + [
            (t.task, plan)
            for key, t in self._tasks.items()
            for plan in (t.search.propose(seats[key]) if seats[key] else [])
        ]

    @staticmethod
    def _begun(found: _Task) -> bool:
        return bool(found.search.seconds) or found.search.unmeasured < len(found.space.plans)

    def promise(self, found: _Task) -> float:
        """Seconds, weighted, that another batch may save."""
        search = found.search
        if not search.unmeasured:
            return 0.0
        reference = search.best[1] if search.best else 0.0
        gap = max(reference - self.roofline(found.task), 0.01 * reference)
        return found.task.weight * gap * 0.5 ** (search.since_best / PATIENCE)

    def report(self, task, plan, measured: Measured) -> None:
        """A measurement of a plan that `next` gave, or of any plan of the task's space."""
        found = self._tasks[task.workload.key]
        plan = found.space.equal(plan)
        record = Record(as_dict(plan), **asdict(measured), default=plan == found.space.default, at=time.time())
        self.database.add(task.workload, record)
        found.search.report([(plan, measured.seconds)])
        self.trials += 1

    def withdraw(self, task, plan) -> None:
        """A plan that `next` gave will not be measured now."""
        self._tasks[task.workload.key].search.withdraw(plan)

    # ---- which results are right

    def unchecked(self) -> list[tuple[object, object]]:
        """(task, plan) of each task's best plan if it is better than the default and nobody has checked its results.
        One that could not be checked is passed over; where another could not be for the same reason, so it is not the
        plan's fault, its task is."""
        reasons = Counter(self.unverified.values())
        hopeless = {key for (key, _), why in self.unverified.items() if reasons[why] > 1}
        hopeless |= {key for key, count in self.beaten.items() if count >= BEATEN}
        wanted = []
        for key, (task, choices, search) in self._tasks.items():
            best = next((plan for plan in search.ranked if (key, plan) not in self.unverified), choices.default)
            if (
                key not in hopeless
                and best != choices.default
                and not self.database.record(task.workload, as_dict(best)).checked
            ):
                wanted.append((task, best))
        return wanted

    def check(self, task, plan, checked: Checked) -> None:
        """What checking a measured plan found. A wrong one is out; the task's next best plan takes its place, also that
        of one that is not as fast as it looked. One that could not be checked is neither: it cannot be used, and a
        later session asks again."""
        found = self._tasks[task.workload.key]
        plan = found.space.equal(plan)
        self.database.check(task.workload, as_dict(plan), checked)
        if not checked.checked:
            self.unverified[task.workload.key, plan] = checked.error
        elif not checked.passed:
            self.refuted += 1
            found.search.disqualify(plan)
        elif checked.gain:
            record = self.database.record(task.workload, as_dict(plan))
            found.search.correct(plan, self.database.entry(task.workload).seconds(record))
            self.beaten[task.workload.key] += checked.gain <= 1

    # ---- how far it is

    def rows(self) -> list[Row]:
        """The tasks, those with the largest share of the time first."""
        times = {
            key: found.task.weight * found.search.best[1] for key, found in self._tasks.items() if found.search.best
        }
        total = sum(times.values())
        rows = []
        for key, (task, choices, search) in self._tasks.items():
            plan, best = search.best or (None, None)
            failed = sum(seconds is None for seconds in search.seconds.values())
            share = times[key] / total if key in times and total else None
            counts = len(search.seconds), failed, len(choices.plans)
            rows.append(Row(task, share, search.seconds.get(choices.default), best, self.roofline(task), plan, *counts))
        return sorted(rows, key=lambda row: -(row.share or 0))


def run(
    session: Session,
    measure,
    gate,
    trials: int | None = None,
    seconds: float | None = None,
    batch: int | Callable[[], int] = BATCH,
    progress=lambda session: None,
) -> None:
    """Measures and checks until the budget is spent (`trials` measurements, `seconds` for both) or every plan is
    measured.

    measure: callable([(workload, plan)]) -> [Measured], in that order, None for what was not measured after all. gate:
    callable(workload, plan) -> Checked. batch: how many plans to measure together; asked before each batch if it is
    callable. progress: called with the session after each batch. The winners are checked at the end, whatever ends it;
    Ctrl-C passes on after that. Where a winner was not what it seemed, the next best plan is checked, too, unless time
    is up or the run was stopped; a later session goes on there.
    """
    started = time.monotonic()

    def fit() -> int:
        """How many measurements fit into what is left of the time, if the winners so far are still to be checked."""
        spent = time.monotonic() - started
        if not session.trials:  # nobody knows how long the first ones take
            return FIRST if spent < seconds else 0
        each = spent / session.trials
        rest = seconds - spent - len(session.unchecked()) * CHECKING * each
        return max(1, int(rest / each)) if rest > 0 else 0

    stopped = True
    try:
        while True:
            size = batch() if callable(batch) else batch
            size = size if trials is None else min(size, trials - session.trials)
            size = size if seconds is None else min(size, fit())
            if size <= 0:
                break
            chosen = session.next(size)
            if not chosen:
                break
            for (task, plan), found in zip(
                chosen, measure([(task.workload, plan) for task, plan in chosen]), strict=True
            ):
                if found is None:
                    session.withdraw(task, plan)
                else:
                    session.report(task, plan, found)
            progress(session)
        stopped = False
    finally:
        while wanted := session.unchecked():
            for task, plan in wanted:
                session.check(task, plan, gate(task.workload, plan))
            if stopped or (seconds is not None and time.monotonic() - started >= seconds):
                break
