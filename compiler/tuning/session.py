"""A tuning session: the searches of all tasks over one database, and the choice of the task to measure next.

The next batch goes to the task with the largest expected saving: the time of its calls above the roofline, weighted by
the number of calls, times a probability that decays with every measurement without improvement. Reported results are
written to the database first. So a session loses nothing however it ends, and a new session on the same database
continues.
"""

import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from mlc_amd.compiler.tuning.database import Checked, Database, Measured, Record
from mlc_amd.compiler.tuning.search import CostModel, Search
from mlc_amd.compiler.tuning.tasks import Task
from mlc_amd.schedules.space import Space, space

BATCH = 8  # plans that are measured together; Ctrl-C loses at most one batch
FIRST = 2  # plans in the first batch if there is a time limit
MAX_SLOWER = 4  # limit of verified plans of a task that were slower than the default; then no others are verified
VERIFYING = 8  # approximate time of verifying a plan, in measurements
PATIENCE = 32  # number of measurements without improvement that halve a task's probability of improvement


class TuningSession:
    """A session. tasks: see compiler/tuning/tasks.py; those with only one plan are left out. roofline: returns the
    lower bound of a task's call, seconds. seed: 1 or more. first: {key of a workload: plans to be measured before
    others}; raises ValueError for a plan that is not in the workload's space.

    trials: number of measurements reported to this session. refuted: number of plans whose results were wrong.
    unverified: {(task, plan): reason why it could not be verified}.
    """

    def __init__(
        self, tasks, arch, database: Database, roofline: Callable[[Task], float] = lambda task: 0.0, seed: int = 1,
        first: Mapping[str, list[dict]] | None = None,
    ):  # fmt: skip
        self.arch, self.database, self.roofline = arch, database, roofline
        self.trials = self.refuted = 0
        self.unverified: dict[tuple[Task, object], str] = {}
        self._slower = Counter()  # task: number of plans that were not faster than the default in interleaved rounds
        self._searches: dict[Task, Search] = {}
        models: dict[type, CostModel] = defaultdict(CostModel)
        for task in tasks:
            if found := space(task.workload, arch):
                past, number = database.entry(task.workload).known(found), seed + len(self._searches)
                plans = [found.equal(found.parse(plan)) for plan in (first or {}).get(task.workload.key, ())]
                model = models[found.plan_type]
                self._searches[task] = Search(task.workload, found, arch, model, past, number, plans)
        self.tasks = list(self._searches)

    def space(self, task: Task) -> Space:
        """The space of one of `tasks`."""
        return self._searches[task].space

    @property
    def unmeasured(self) -> int:
        """The number of plans of all tasks that were not measured yet."""
        return sum(search.unmeasured for search in self._searches.values())

    # ---- what to measure

    def next(self, count: int) -> list[tuple[Task, Any]]:
        """Up to `count` (task, plan) to measure next: plans that must come before others, else plans of one task. Empty
        if everything is measured."""
        if chosen := self._new(count):
            return chosen
        ordered = sorted(self.tasks, key=self.saving, reverse=True)
        return next(filter(None, (self._propose(task, count) for task in ordered)), [])

    def round(self, count: int) -> list[tuple[Task, Any]]:
        """`count` (task, plan) to measure without feedback between them: plans that must come before others, then plans
        of all tasks, more for a larger expected saving. Fewer if there are no more."""
        chosen = self._new(count)
        # With the square root, small tasks get some plans too. Tasks without measurements count by the bytes they move.
        worth = {task: math.sqrt(self.saving(task) or task.weight * task.bytes * 1e-15) for task in self.tasks}
        seats = Counter()
        for _ in range(count - len(chosen)):
            free = [task for task, search in self._searches.items() if search.unmeasured > seats[task]]
            if free:
                seats[max(free, key=lambda task: worth[task] / (seats[task] + 1))] += 1
        return chosen + [job for task, plans in seats.items() for job in self._propose(task, plans)]

    def _new(self, count: int) -> list[tuple[Task, Any]]:
        """The plans that must come before others, of up to `count` tasks."""
        new = [(task, len(search.pending)) for task, search in self._searches.items() if search.pending]
        return [job for task, plans in new[:count] for job in self._propose(task, plans)]

    def _propose(self, task: Task, count: int) -> list[tuple[Task, Any]]:
        return [(task, plan) for plan in self._searches[task].propose(count)]

    def saving(self, task: Task) -> float:
        """The weighted seconds that another batch of the task is expected to save."""
        search = self._searches[task]
        if not search.unmeasured:
            return 0.0
        reference = search.best[1] if search.best else 0.0
        gap = max(reference - self.roofline(task), 0.01 * reference)
        return task.weight * gap * 0.5 ** (search.since_best / PATIENCE)

    def report(self, task: Task, plan, measured: Measured) -> None:
        """Stores the measurement of a plan that `next` returned, or of any plan of the task's space."""
        search = self._searches[task]
        plan = search.space.equal(plan)
        record = Record(**asdict(measured), plan=asdict(plan), default=plan == search.space.default, at=time.time())
        kept = self.database.add(task.workload, record)
        search.report([(plan, kept.seconds)])
        self.trials += 1

    def withdraw(self, task: Task, plan) -> None:
        """Marks a plan that `next` returned as not measured now."""
        self._searches[task].withdraw(plan)

    # ---- verification

    def unchecked(self) -> list[tuple[Task, Any]]:
        """(task, plan) to verify: the best plan of each task, if it is faster than the default plan and not verified.
        Plans that could not be verified are skipped. If the same reason occurred for several plans, their whole tasks
        are skipped."""
        reasons = Counter(self.unverified.values())
        hopeless = {task for (task, _), why in self.unverified.items() if reasons[why] > 1}
        hopeless |= {task for task, count in self._slower.items() if count >= MAX_SLOWER}
        wanted = []
        for task, search in self._searches.items():
            default = search.space.default
            best = next((plan for plan, _ in search.ranked if (task, plan) not in self.unverified), default)
            done = task in hopeless or best == default
            if not done and not self.database.record(task.workload, asdict(best)).checked:
                wanted.append((task, best))
        return wanted

    def check(self, task: Task, plan, checked: Checked) -> None:
        """Stores the verification of a measured plan. A wrong plan is excluded; a plan that was slower than its
        measurement gets the new time; then the next best plan may take its place. A plan that could not be verified is
        never used, but a later session tries again."""
        search, workload = self._searches[task], task.workload
        plan = search.space.equal(plan)
        checked = self.database.check(workload, asdict(plan), checked)
        if not checked.checked:
            self.unverified[task, plan] = checked.error
        elif not checked.passed:
            self.refuted += 1
            search.correct(plan, None)
        elif checked.gain:
            entry = self.database.entry(workload)
            search.correct(plan, entry.seconds(self.database.record(workload, asdict(plan))))
            self._slower[task] += checked.gain <= 1


def run(
    session: TuningSession,
    measure,
    verify,
    trials: int | None = None,
    seconds: float | None = None,
    batch: Callable[[], int] = lambda: BATCH,
    progress=lambda session: None,
) -> None:
    """Measures and verifies until the budget is spent (`trials` measurements; `seconds` for measurements and
    verification), or until every plan is measured.

    measure: callable([(workload, plan)]) -> [Measured] in that order, None for a plan that was not measured. verify:
    callable(workload, plan) -> Checked. batch: returns the number of plans to measure together; called before each
    batch. progress: called with the session after each batch.

    The best plans are verified at the end, also after an exception, which is then raised again. If one fails or is
    slower than measured, the next best plan is verified, unless the run was interrupted or the time is up; a later
    session continues.
    """
    started = time.monotonic()

    def fit(seconds: float) -> int:
        """The number of measurements that fit into the remaining time, less that to verify the best plans."""
        spent = time.monotonic() - started
        if not session.trials:  # the time of a measurement is not known yet
            return FIRST if spent < seconds else 0
        each = spent / session.trials
        rest = seconds - spent - len(session.unchecked()) * VERIFYING * each
        return max(1, int(rest / each)) if rest > 0 else 0

    interrupted = True
    try:
        while True:
            size = batch()
            size = size if trials is None else min(size, trials - session.trials)
            size = size if seconds is None else min(size, fit(seconds))
            chosen = session.next(size) if size > 0 else []
            if not chosen:
                break
            measured = measure([(task.workload, plan) for task, plan in chosen])
            for (task, plan), found in zip(chosen, measured, strict=True):
                if found is None:
                    session.withdraw(task, plan)
                else:
                    session.report(task, plan, found)
            progress(session)
        interrupted = False
    finally:
        while wanted := session.unchecked():
            for task, plan in wanted:
                session.check(task, plan, verify(task.workload, plan))
            if interrupted or (seconds is not None and time.monotonic() - started >= seconds):
                break


class Interruptible:
    """A runner whose measurements Ctrl-C ends, for `run`. A context manager. make: creates the runner. stopped: whether
    Ctrl-C was pressed.

    KeyboardInterrupt is only raised while the runner measures, because TVM would turn one that is raised while it calls
    Python into another exception. The interrupted batch is lost; the next call of `measure` raises KeyboardInterrupt,
    so that `run` verifies the best plans.
    """

    def __init__(self, make: Callable, say: Callable[[str], None], progress: Callable[[int], None]):
        self.runner, self._make, self._say, self._progress = make(), make, say, progress
        self.stopped = self._measuring = False
        self._done = 0

    def __enter__(self):
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._before)
        self.runner.close()

    def _interrupt(self, *_) -> None:
        again, self.stopped = self.stopped, True
        if self._measuring or again:
            raise KeyboardInterrupt

    def measure(self, jobs) -> list[Measured | None]:
        if self.stopped:
            raise KeyboardInterrupt
        try:
            self._measuring = True
            found = self.runner.measure(jobs, lambda done, total: self._progress(self._done + done))
            self._done += len(jobs)
            return found
        except KeyboardInterrupt:
            self._measuring = False
            self._say("stopping: verifying the best plans so far ...")
            self.runner.close()  # its processes are still at work
            self.runner = self._make()
            return [None] * len(jobs)
        finally:
            self._measuring = False
