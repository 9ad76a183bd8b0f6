"""Computes steps for the answers in progress: plans a step (scheduler.py), starts it on the device (runner.py), waits
for it, and distributes its results to answers (answers.py) and scorings.

If the device can do it, the next step is started before the step in progress is done (`Scheduler.plan_ahead`), so that
the device does not wait for the host. One thread at a time may call this class: `StepLoop` has the lock.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.encoding import Encoding, PiecewiseWork
from mlc_amd.runtime.engine.guessing import guess, learn, watch
from mlc_amd.runtime.engine.requests import PlannedStep, Request, Scoring
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.sampled_rows import GREEDY, ChosenToken, TokenChoice, right_ones
from mlc_amd.runtime.engine.scheduler import Scheduler
from mlc_amd.runtime.speculation.speculation import Speculation


class Steps:
    """Computes steps by `runner` for answers and scorings, which a subclass adds to `_answers` and `_scorings`."""

    def __init__(self, runner: Runner, cache: KvCache, limits: SchedulerLimits) -> None:
        self.runner = runner
        self.scheduler = Scheduler(cache, limits, runner.stages)
        self.private: Sequence | None = None  # the engine's own sequence; it loses its pages if requests need them
        self.speculation: Speculation | None = None  # may be changed only with the lock held
        self.clock = time.perf_counter  # seconds, for `speculation`
        self._since = 0.0  # time at which the step in progress started, or the step before was completed
        self._started: deque[PlannedStep] = deque()  # steps in progress on the device, the oldest first
        self._lacks_choices = False  # whether the last of them still needs to know how its tokens are chosen
        self._answers: dict[Request, Answer] = {}
        self._scorings: dict[Request, Scoring] = {}
        self._watched: set[Request] = set()  # answers and scorings that a background thread must compute
        self.scheduler.admission.has_features = runner.images.__contains__
        self._works: list[PiecewiseWork] = [Encoding(self.scheduler, runner.images)]

    def _step(self) -> bool:
        """Starts as many steps as the device computes at the same time, and completes one. Alternates with pieces of
        other work. Returns False if there is nothing to compute."""
        self._drop_ended()
        if work := next((work for work in self._works if work.takes_turn()), None):
            return self._work(work)
        while self.scheduler.may_plan and not (self._guesses and self._started):
            step = self._plan()
            if step is None:
                break
            if not self._start(step):
                self._compute(step)
                return True
        if not self._started:
            work = next((work for work in self._works if work.waits), None)
            return work is not None and self._work(work)
        self._finish(self._started[0])
        return True

    def _work(self, work: PiecewiseWork) -> bool:
        self._settle()
        for request, error in work.piece():
            self._fail(request, error)
        return True

    def _plan(self) -> PlannedStep | None:
        before = set(self.scheduler.running)
        step = self.scheduler.plan()
        waits = self.scheduler.unfinished and not any(work.waits for work in self._works)
        if step is None and waits and self.private and not self._started:
            self.private.free()
            step = self.scheduler.plan()
        if step:
            with self._in_progress():
                for request in self.scheduler.running:
                    if request not in before and request in self._answers:
                        self._answers[request].begin()
                        self._since = self._since if self._started else self.clock()
                        if self.speculation:
                            self.speculation.begin()
        return step

    def _start(self, step: PlannedStep) -> bool:
        """Starts a step without waiting, if another step may start before it is completed. Returns whether it did."""
        if self._guesses or not (self.runner.stages > 1 or self._may_overlap(step)):
            return False
        with self._in_progress():
            self._since = self._since if self._started else self.clock()
            chunk = step.chunk.rows if step.chunk else None
            if step.chunk and step.chunk.scored:
                self.runner.start_scoring(step.chunk.rows)
            else:
                rows = [sequence.newest_row() for _, sequence in step.singles]
                masks = any(self._answers[request].constraint for request in step.answers)
                self.runner.start(rows, chunk, (lambda: self._choices(step)) if masks else self._choices(step))
            self._started.append(step)
            self.scheduler.started(step)
        return True

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        """A context for code that runs steps: after an error, all steps in progress are abandoned."""
        try:
            yield
        except BaseException:
            self._started.clear()
            self._lacks_choices = False
            self.scheduler.abandon()
            self.runner.abandon()
            raise

    def _compute(self, step: PlannedStep) -> None:
        """Computes and completes a step during which no other step starts."""
        with self._in_progress():
            begun = self.clock()
            speculation = self._speculation(step)
            if speculation:
                step = guess(step, self._answers, self.scheduler, speculation)
            guessed = self.clock()
            chosen = self._run(step)
            seconds = self.clock() - guessed
            # the time for which the device waited for the host before this step counts, too
            waited = min(begun - self._since, seconds)
            guesses = step.drafts + [[]] * (len(chosen) - len(step.drafts))
            found = [right_ones(tokens, drafts) for tokens, drafts in zip(chosen, guesses, strict=True)]
            if speculation:
                learn(step, found, self._answers, speculation, guessed - begun, waited + seconds)
            if self.speculation:
                self.speculation.follow(step, [token for tokens in chosen for token in tokens], self.clock)
            self._since = self.clock()
        self._complete(step, found)

    def _complete(self, step: PlannedStep, found: list[list[ChosenToken]]) -> None:
        """Distributes the results of a step. found: the tokens that were chosen for each of the step's answers."""
        prompts = [(request, sequence) for request, sequence in step.computed if not request.generated]
        self.scheduler.complete(step, [[max(chosen.token, 0) for chosen in tokens] for tokens in found])
        for request, sequence in prompts:
            if answer := self._answers.get(request):
                answer.prefilled(sequence.computed - answer.stats.cached_tokens)
                if not request.limit and step.ends(sequence) and request.state != "done":
                    self._forget(request, answer.end_with_prompt())
            elif (scoring := self._scorings.get(request)) and scoring.done:
                self._drop_scoring(request)
        for request, tokens in zip(step.answers, found, strict=True):
            if request.state == "done":  # it ended while the step was in progress
                continue
            answer = self._answers[request]
            reasons = (answer.stats.finish if answer.done else answer.push(chosen) for chosen in tokens)
            if reason := next(filter(None, reasons), None):
                self._forget(request, reason)

    # ---- steps that start ahead, while the one before them is in progress

    @property
    def _guesses(self) -> bool:
        """Whether the next step may have guesses. Guesses need the tokens of the step before."""
        return self.speculation is not None and not self.speculation.resting

    def _speculation(self, step: PlannedStep) -> Speculation | None:
        """`speculation`, if answers of the step may have guesses; otherwise None."""
        if not self.speculation or step.chunk:
            return None
        answers = (self._answers.get(request) for request in step.answers)
        may = self.speculation.offers or any(answer and answer.constraint for answer in answers)
        return self.speculation if may else None

    def _may_overlap(self, step: PlannedStep) -> bool:
        """Whether the next step may start while `step` is in progress."""
        answers = [self._answers.get(request) for request in step.answers]
        return (
            not (self._guesses or step.chunk)
            and all(answer and answer.may_overlap for answer in answers)
            and self.runner.can_start_ahead(len(answers), self._needs_tokens(step))
        )

    def _needs_tokens(self, step: PlannedStep) -> bool:
        """Whether the tokens of `step` must be known before it is known how the next step chooses tokens."""
        return not all(self._answers[request].predictable for request in step.answers)

    def _finish(self, step: PlannedStep, ahead: bool = True) -> None:
        """Completes the oldest step in progress. ahead: starts the next step before, if possible."""
        with self._in_progress():
            if self._lacks_choices:
                self._lacks_choices = False
                self.runner.supply_choices(self._choices(step))
            if ahead and (following := self._start_ahead(step)):
                self._started.append(following)
            found = self.runner.finish()
        self._started.popleft()
        begun, self._since = self._since, self.clock()
        speculation = self._speculation(step)
        if speculation:
            speculation.rested(len(step.answers), self._since - begun)
        if step.chunk and step.chunk.scored:
            if scoring := self._scorings.get(step.chunk.request):
                scoring.take(step.chunk.start, found)
            found = []
        self._complete(step, [[chosen] for chosen in found])
        if speculation and speculation.resting:
            watch(step, found, self._answers, speculation)
        if all(step.answers and all(request.state == "done" for request in step.answers) for step in self._started):
            self._settle()

    def _start_ahead(self, step: PlannedStep) -> PlannedStep | None:
        following = self.scheduler.plan_ahead(step) if self._may_overlap(step) else None
        if following:
            rows = [sequence.newest_row(1) for sequence in following.sequences]
            late = self._needs_tokens(step)
            choices = None if late else [self._answers[request].next_choice() for request in step.answers]
            self.runner.start_ahead(rows, choices)
            self._lacks_choices = late
        return following

    def _choices(self, step: PlannedStep) -> list[TokenChoice]:
        """How the tokens of a step without guesses are chosen. For answers that are done it does not matter."""
        answers = [self._answers.get(request) for request in step.answers]
        return [answer.choices()[0] if answer else GREEDY for answer in answers]

    def _settle(self) -> None:
        """Completes the steps in progress."""
        while self._started:
            self._finish(self._started[0], ahead=False)

    def _run(self, step: PlannedStep) -> list[list[ChosenToken]]:
        """Computes a step. Returns for each answer the tokens chosen after its newest token and after each guess."""
        singles, chunk = [], None
        for (_, sequence), drafts in zip(step.singles, step.drafts, strict=True):
            singles += sequence.rows([sequence.tokens[sequence.computed], *drafts])
        if step.chunk:
            chunk = step.chunk.rows
            if step.chunk.scored:
                self._scorings[step.chunk.request].take(step.chunk.start, self.runner.score(chunk))
                return []
        answers = [self._answers[request] for request in step.answers]
        guesses = step.drafts + [[]] * (len(answers) - len(step.drafts))

        def choices() -> list[TokenChoice]:
            pairs = zip(answers, guesses, strict=True)
            return [choice for answer, drafts in pairs for choice in answer.choices(drafts)]

        masks = any(answer.constraint for answer in answers)
        chosen = iter(self.runner.sample(singles, chunk, choices if masks else choices()))
        return [[next(chosen) for _ in range(len(drafts) + 1)] for drafts in guesses]

    def _drop_ended(self) -> None:
        for request, answer in list(self._answers.items()):
            if request.cancelled or answer.done:
                answer.interrupt()
                self._forget(request, "cancelled" if request.cancelled else answer.stats.finish)
        for request in [request for request in self._scorings if request.cancelled]:
            self._drop_scoring(request)

    def _forget(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        if self.speculation:
            self.speculation.forget(request)
        del self._answers[request]
        self._watched.discard(request)

    def _fail(self, request: Request, error: BaseException) -> None:
        if answer := self._answers.get(request):
            answer.fail(error)
            self._forget(request, "failed")
        elif scoring := self._scorings.get(request):
            scoring.fail(error)
            self._drop_scoring(request)

    def _drop_scoring(self, request: Request) -> None:
        self.scheduler.finish(request, "scored")
        self._watched.discard(request)
        if scoring := self._scorings.pop(request, None):
            scoring.ended()
