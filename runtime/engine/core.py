"""Runs an engine's steps: who computes, and who gets what they give.

A thread that waits for an answer takes the *turn* (step_lock.py) and computes one step, for all answers; so several
threads, each with an answer of its own, are served together without a thread of the engine. Whoever starts an answer
waits for one step, however many follow. Where the device can, the next step begins before the one in progress is done
(`Scheduler.plan_behind`): what the host does for answers takes no time of the device. A thread that has the turn for
something else finishes it first.
Answers that are consumed from asyncio are computed by a background thread, which begins with the first of them.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

from mlc_amd.runtime.cache.kv_cache import Cache
from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.planned_step import Step
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.sampled_rows import GREEDY, Choice, Chosen
from mlc_amd.runtime.engine.scheduler import Limits, Queue, Scheduler
from mlc_amd.runtime.engine.scoring import Scoring
from mlc_amd.runtime.engine.step_lock import CLOSED, Turn
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.speculation.own_draft import OwnDraft
from mlc_amd.runtime.speculation.speculation import Speculation


class Core:
    """Steps of `runner` for the answers that were started. Methods may be called by any thread."""

    def __init__(self, runner: Runner, cache: Cache, limits: Limits) -> None:
        self.runner = runner
        self.scheduler = Scheduler(cache, limits)
        self.private: Sequence | None = None  # a sequence of the engine's own, which gives way to requests
        self.speculation: Speculation | None = None  # set while nobody has the turn
        self.clock = time.perf_counter  # seconds, for `speculation`
        self._behind: Step | None = None  # which the device has begun, behind the last one that was completed
        self._unchosen = False  # that step waits for how its tokens are chosen
        self._answers: dict[Request, Answer] = {}
        self._scorings: dict[Request, Scoring] = {}
        self._turn = Turn()
        self._background: threading.Thread | None = None
        self._watched: set[Request] = set()  # of answers that the background thread is to compute

    # ---- the turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for the turn and has it for the `with` block, with no step in progress. UserError once the engine is
        closed."""
        self._turn.take()
        try:
            self._settle()
            yield
        finally:
            self._turn.give()

    @property
    def closed(self) -> bool:
        return self._turn.closed

    # ---- answers

    @property
    def queue(self) -> Queue:
        """How many requests wait, and how many are running."""
        return Queue(self.scheduler.waiting, len(self.scheduler.running))

    @property
    def busy(self) -> bool:
        """Whether there are answers that are not complete."""
        return bool(self._answers)

    def score(self, scoring: Scoring) -> None:
        """Returns when it is done; computes meanwhile. QueueFull and ContextFull."""
        with self.turn():
            self.scheduler.add(scoring.request)
            self._scorings[scoring.request] = scoring
        try:
            self.wait([scoring])
        finally:
            with self.turn():
                self._drop_scoring(scoring.request)
        if scoring.error:
            raise scoring.error

    def start(self, answers: SequenceOf[Answer], watched: bool = False) -> None:
        """Queues their requests. watched: the background thread computes them. QueueFull and ContextFull, for which
        none of them is queued."""
        with self.turn():
            added = []
            try:
                for answer in answers:
                    self.scheduler.add(answer.request)
                    added.append(answer)
            except BaseException:
                for answer in added:
                    self.scheduler.finish(answer.request, "refused")
                raise
            self._answers |= {answer.request: answer for answer in answers}
            if watched:
                self._watched.update(answer.request for answer in answers)
                self._background = self._background or self._start_thread()

    def cancel(self, answers: Iterable[Answer]) -> None:
        """Ends answers after the step in progress; their pages are free then."""
        for answer in answers:
            self.scheduler.cancel(answer.request)
        if not self._turn.try_take():
            return
        try:
            self._drop_ended()
            if not (self._answers or self._background):  # a background thread does that
                self._settle()
        finally:
            self._turn.give()

    def cancel_all(self) -> None:
        self.cancel(list(self._answers.values()))

    def wait(self, answers: SequenceOf[Answer | Scoring]) -> None:
        """Returns when one of `answers` is ready. Computes meanwhile."""

        def ready() -> bool:
            return any(answer.ready for answer in answers)

        while self._turn.take(ready):
            try:
                progressed = self._step()
            finally:
                self._turn.give()
            if not progressed and not ready():
                raise RuntimeError("no step can be computed, but an answer is wanted")

    # ---- steps, by the thread that has the turn

    def _step(self) -> bool:
        """Computes a step. False if there is nothing to compute."""
        self._drop_ended()
        if self._behind:
            self._finish(self._behind)
            return True
        before = set(self.scheduler.running)
        step = self.scheduler.plan()
        if step is None and self.scheduler.unfinished and self.private:
            self.private.free()
            step = self.scheduler.plan()
        if step is None:
            return False
        with self._in_progress():
            for request in self.scheduler.running:
                if request not in before and request in self._answers:
                    self._answers[request].begin()
            begins = self._may_lead(step)
            if begins:
                rows = [sequence.newest_row() for sequence in step.sequences]
                masks = any(self._answers[request].constraint for request in step.answers)
                self.runner.start(rows, (lambda: self._choices(step)) if masks else self._choices(step))
        if begins:
            self._finish(step)
        else:
            self._compute_whole(step)
        return True

    @contextmanager
    def _in_progress(self) -> Iterator[None]:
        """An error of a step abandons it, and the one behind it."""
        try:
            yield
        except BaseException:
            self._behind, self._unchosen = None, False
            self.scheduler.abandon()
            raise

    def _compute_whole(self, step: Step) -> None:
        """Computes and completes a planned step that has no step behind it."""
        with self._in_progress():
            begun = self.clock()
            step = self._guess(step)
            guessed = self.clock()
            chosen = self._run(step)
            seconds = self.clock() - guessed
            guesses = step.drafts + [[]] * (len(chosen) - len(step.drafts))
            found = [_right(tokens, drafts) for tokens, drafts in zip(chosen, guesses, strict=True)]
            if self.speculation:
                if not step.chunk:
                    self._learn(self.speculation, step, found, guessed - begun, seconds)
                self._follow(self.speculation, step, [token for tokens in chosen for token in tokens])
        self._complete(step, found)

    def _complete(self, step: Step, found: list[list[Chosen]]) -> None:
        """found: what was chosen for each of the step's answers."""
        prompts = [(request, sequence) for request, sequence in step.computed if not request.generated]
        self.scheduler.complete(step, [[max(chosen.token, 0) for chosen in tokens] for tokens in found])
        for request, sequence in prompts:
            if answer := self._answers.get(request):
                answer.prefilled(sequence.computed - answer.stats.cached_tokens)
            elif (scoring := self._scorings.get(request)) and scoring.done:
                self._drop_scoring(request)
        for request, tokens in zip(step.answers, found, strict=True):
            if request.state == "done":  # while the step was in progress
                continue
            answer = self._answers[request]
            reasons = (answer.stats.finish if answer.done else answer.push(chosen) for chosen in tokens)
            if reason := next(filter(None, reasons), None):
                self._forget(request, reason)

    # ---- steps behind one in progress

    def _may_lead(self, step: Step) -> bool:
        """Whether the step may have one behind it."""
        answers = [self._answers.get(request) for request in step.answers]
        return (
            not (self.speculation or step.chunk)
            and all(answer and answer.ahead for answer in answers)
            and self.runner.ahead(len(answers), self._chooses_late(step))
        )

    def _chooses_late(self, step: Step) -> bool:
        """Whether how tokens behind those of the step are chosen depends on these."""
        return not all(self._answers[request].predictable for request in step.answers)

    def _finish(self, step: Step, ahead: bool = True) -> None:
        """Completes the step that the device computes; ahead: begins the next one before."""
        with self._in_progress():
            if self._unchosen:
                self._unchosen = False
                self.runner.choose(self._choices(step))
            self._behind = self._begin_behind(step) if ahead else None
            found = [[chosen] for chosen in self.runner.finish()]
        self._complete(step, found)
        if self._behind and all(request.state == "done" for request in self._behind.answers):
            self._settle()

    def _begin_behind(self, step: Step) -> Step | None:
        behind = self.scheduler.plan_behind(step) if self._may_lead(step) else None
        if behind:
            rows = [sequence.newest_row(1) for sequence in behind.sequences]
            late = self._chooses_late(step)
            choices = None if late else [self._answers[request].choice_behind() for request in step.answers]
            self.runner.start_behind(rows, choices)
            self._unchosen = late
        return behind

    def _choices(self, step: Step) -> list[Choice]:
        """How the tokens of a step without guesses are chosen; anything for answers that are done."""
        answers = [self._answers.get(request) for request in step.answers]
        return [answer.choices()[0] if answer else GREEDY for answer in answers]

    def _settle(self) -> None:
        """No step is in progress."""
        if self._behind:
            self._finish(self._behind, ahead=False)

    def _guess(self, step: Step) -> Step:
        """The step, with guesses of how its answers go on."""
        if not self.speculation or step.chunk:
            return step
        answers = [self._answers[request] for request, _ in step.singles]
        most = self.scheduler.guesses(step)
        wanted = {of.request: (of.choices()[0], most[of.request]) for of in answers if of.guessable}
        return self.scheduler.draft(step, self.speculation.drafts(wanted))

    def _learn(
        self, speculation: Speculation, step: Step, found: list[list[Chosen]], guess_s: float, step_s: float
    ) -> None:
        drafts = {request: drafts for (request, _), drafts in zip(step.singles, step.drafts, strict=True) if drafts}
        counts = {request: len(tokens) for (request, _), tokens in zip(step.singles, found, strict=True)}
        speculation.completed(drafts, counts, guess_s, step_s)
        for request, guesses in drafts.items():
            self._answers[request].verified(len(guesses), counts[request] - 1)

    def _follow(self, speculation: Speculation, step: Step, chosen: list[Chosen]) -> None:
        """Lets a drafter that follows steps do so, where prompts want it or guesses are worth it."""
        drafter = speculation.drafter
        if not isinstance(drafter, OwnDraft) or (step.chunk and step.chunk.scored):
            return
        if step.chunk:
            drafter.follow(step, chosen)
        elif speculation.following:
            begun = self.clock()
            drafter.follow(step, chosen)
            speculation.followed(len(chosen), self.clock() - begun)
        else:
            drafter.skip()

    def _run(self, step: Step) -> list[list[Chosen]]:
        """What is chosen for each of the step's answers: behind its newest token, and behind each guess."""
        singles, chunk = [], None
        for (_, sequence), drafts in zip(step.singles, step.drafts, strict=True):
            singles += sequence.rows([sequence.tokens[sequence.computed], *drafts])
        if step.chunk:
            chunk = step.chunk.sequence.chunk(step.chunk.count)
            if step.chunk.scored:
                self._scorings[step.chunk.request].take(step.chunk.start, self.runner.score(chunk))
                return []
        answers = [self._answers[request] for request in step.answers]
        guesses = step.drafts + [[]] * (len(answers) - len(step.drafts))

        def choices() -> list[Choice]:
            asked = [answer.choices(drafts) for answer, drafts in zip(answers, guesses, strict=True)]
            return [choice for one in asked for choice in one]

        masks = any(answer.constraint for answer in answers)
        chosen = iter(self.runner.sample(singles, chunk, choices if masks else choices()))
        return [[next(chosen) for _ in range(len(drafts) + 1)] for drafts in guesses]

    def _drop_ended(self) -> None:
        for request, answer in list(self._answers.items()):
            if request.cancelled or answer.done:
                answer.interrupt()
                self._forget(request, "cancelled" if request.cancelled else answer.stats.finish)

    def _forget(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        if self.speculation:
            self.speculation.forget(request)
        del self._answers[request]
        self._watched.discard(request)

    def _drop_scoring(self, request: Request) -> None:
        self.scheduler.finish(request, "scored")
        self._scorings.pop(request, None)

    # ---- in the background

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._compute, name="mlc-amd", daemon=True)
        thread.start()
        return thread

    def _compute(self) -> None:
        while True:
            self._turn.wait_for_work(lambda: self._watched or (self._behind and not self._answers))
            if not self._turn.take(lambda: self.closed):
                return
            try:
                self._step()
            except Exception as error:
                for answer in list(self._answers.values()):
                    answer.fail(error)
                    self._forget(answer.request, "failed")
                for scoring in list(self._scorings.values()):
                    scoring.fail(error)
                    self._drop_scoring(scoring.request)
            finally:
                self._turn.give()

    def close(self) -> None:
        """Ends all answers and scorings, and waits for the step in progress."""
        if self.closed:
            return
        self.cancel_all()
        with self.turn():
            self._drop_ended()
            for scoring in self._scorings.values():
                scoring.fail(UserError(CLOSED))
            self._turn.closed = True
        if self._background and self._background is not threading.current_thread():
            self._background.join()
        if self.speculation:
            self.speculation.drafter.close()


def _right(chosen: list[Chosen], guesses: SequenceOf[int]) -> list[Chosen]:
    """The first token, and those behind guesses that are the tokens before them."""
    right = next((i for i, guess in enumerate(guesses) if chosen[i].token != guess), len(guesses))
    return chosen[: right + 1]
