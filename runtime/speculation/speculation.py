"""Speculative decoding: the number of guesses of each answer's next tokens that a step verifies.

In: the answers of a step, the guesses of a `Drafter`, the durations of steps. Out: guesses for each answer, as many as
are worth their rows. A step computes a row for each guess after the newest token; the device chooses the token of each
row as it would without guesses, and the tokens after right guesses are kept. So answers do not depend on guesses,
sampled ones neither: a guess is right with its probability in the model, as in rejection sampling. Under a grammar each
row has the mask of its place. Guesses that the grammar forbids are left out, and what it forces is guessed without the
drafter.

An answer with acceptance a (the probability that a guess is right if those before it are) gets 1 + a + .. + a^k tokens
of a step with k guesses. The number of guesses is the one with most tokens per second by the measured times of steps.
While there are none that are worth their time, steps have none and may start ahead. Guesses that take no time, those of
a free drafter and what grammars force, are compared meanwhile with the tokens that steps choose (`watched`): so what
they are worth is known without verifying any. Other guesses are tried again from time to time, as long as the total
loss is less than LOSS of the time of decoding, and less still after trials without a gain. A drafter that follows steps
takes time after each of them, with guesses or without: it does not follow while guesses are not worth that, too, and is
tried again for TRIES steps at a time.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from statistics import median_low
from typing import NamedTuple, Protocol

from mlc_amd.runtime.engine.requests import PlannedStep, Request
from mlc_amd.runtime.engine.sampled_rows import ChosenToken, TokenChoice
from mlc_amd.runtime.speculation.own_draft import OwnDraft

LOSS = 0.015  # of the time of decoding: with the first guesses of a short answer less than 3 %
DOUBT = 2  # LOSS may be divided by, as it is after trials that were in vain
WAKING = 0.1  # least gain for which steps no longer start ahead: that breaks off costs a part of a step
MOST = 7  # guesses for one answer: with its newest token a step of eight rows
TRIES = 8  # steps that are followed in a row: guesses are best where the drafter knows the last tokens
CREDIT = 5  # steps' time of an earlier gain that may be lost again, at most
_LAST = 5  # measurements of a kind of step: their median is that of an undisturbed step
_CHECKS = 64  # steps with guesses, at most, between two without, whose time is needed for comparison
_LATEST = 0.2  # weight of the last guess's time
_OUTCOME = 0.1  # weight of the last guess
_FORCED = 0.9  # acceptance of what grammars force, before there was a guess: the text is certain, its tokens are not
_SLOPE = 0.1  # assumed cost of a further row, as a share of a step with one, until it was measured


class Drafter(Protocol):
    """Guesses the next tokens of answers. Used by one thread at a time."""

    expected: float  # acceptance, before there was a guess
    free: bool  # guesses take negligible time: all are made, then the best number is kept
    at_once: bool  # guesses of an answer take the same time, however many there are
    follows: bool  # it guesses after steps that it has followed, see `Speculation.following`

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        """For each request up to so many tokens after those of its choice. Requests without guesses may be missing."""
        ...

    def forget(self, request: Request) -> None:
        """The request is done; it may be unknown."""
        ...

    def close(self) -> None: ...


class NoDrafts:
    """A `Drafter` without guesses: there are those that grammars force."""

    expected, free, at_once, follows = 0.0, True, False, False

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        return {}

    def forget(self, request: Request) -> None:
        """Knows of none."""

    def close(self) -> None:
        """Has no resources."""


class Wanted(NamedTuple):
    """Guesses that an answer may have."""

    choice: TokenChoice  # of its next token
    most: int
    limit: Callable[[Sequence[int], int], list[int]] | None = None  # `guesses` of its constraint, if it has one

    def limited(self, drafts: Sequence[int], most: int) -> list[int]:
        return self.limit(drafts, most) if self.limit else list(drafts[:most])


class Counts(NamedTuple):
    """Guesses that steps verified, and how many of them were right."""

    drafted: int
    accepted: int


class Speculation:
    """`drafts` before each step without a chunk, `completed` after it, `followed` if so; while `resting`, `rested`
    after the step, then `watched`. rows: of a step, at most."""

    def __init__(self, drafter: Drafter, rows: int, most: int = MOST) -> None:
        self.drafter, self._rows, self._most = drafter, rows, most
        self.counts = Counts(0, 0)
        self._acceptance: dict[Request, float] = {}
        self._usual = drafter.expected  # acceptance of new requests
        self._forced: set[Request] = set()  # whose guesses of the last step are what their grammars force
        self._certain = _FORCED  # acceptance of such guesses
        self.following = drafter.follows  # whether the drafter must follow the step without a chunk that is computed
        self._trying = 0  # further steps that it follows as a trial
        # Steps before guesses may be worth their time: these may start ahead. 1 until then, for a drafter that is free.
        self.resting = int(drafter.free)
        self._offers: dict[Request, int] = {}  # free guesses of the next tokens, which no step verifies
        self._steps, self._follows = StepTimes(), StepTimes()
        self._guess_s = 0.0  # seconds that a guess takes
        self._allowed_s = 0.0  # seconds that guesses may have lost in all
        self._doubt = 1
        self._tries = False  # whether the step's guesses seem not to be worth their time
        self._balance_s = 0.0  # seconds that guesses have saved
        self._guessed = self._interval = 0  # steps since the last one without guesses, and how many there may be

    def drafts(self, wanted: Mapping[Request, Wanted]) -> Mapping[Request, list[int]]:
        """wanted: of the requests that have a row in the step."""
        if self._guessed > self._interval:
            return {}
        limits = self._limits(wanted)
        found = self._offered(wanted, limits)
        if self.drafter.free and not found:
            self.nothing()
            return {}
        others = dict.fromkeys(wanted, 0) if self.drafter.free else limits
        counts = self._counts(others | {request: len(guesses) for request, guesses in found.items()})
        if not self.drafter.free:
            found |= self._draft(wanted, {of: 0 if of in self._forced else count for of, count in counts.items()})
        return {request: guesses[: counts[request]] for request, guesses in found.items() if counts[request]}

    def nothing(self) -> None:
        """There is no guess that takes no time: steps may start ahead."""
        self.resting = 1

    def watched(self, found: Mapping[Request, int], wanted: Mapping[Request, Wanted]) -> None:
        """A step was computed without guesses. found: the token of each request; wanted: guesses of those after it."""
        for request, token in found.items():
            if request in self._offers:
                self._learn(request, self._offers[request] == token, len(found))
        limits = self._limits(wanted)
        offered = self._offered(wanted, limits)
        self._offers = {request: guesses[0] for request, guesses in offered.items()}
        left = {request: max(len(offered.get(request, ())) - 1, 0) for request in found}  # after the step in progress
        if any(left.values()):
            _, rate, times = self._fastest(left, 0.0, False)
            if rate * times[0] > len(found) * (1 + WAKING):
                self.resting, self._offers = 0, {}

    @property
    def offers(self) -> bool:
        """Whether answers without a grammar may have guesses."""
        return not isinstance(self.drafter, NoDrafts)

    def _limits(self, wanted: Mapping[Request, Wanted]) -> dict[Request, int]:
        return {request: min(of.most, self._most) for request, of in wanted.items()}

    def _offered(self, wanted: Mapping[Request, Wanted], limits: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Guesses that take no time: for each request the longer of what its grammar forces, and the drafter's."""
        found = {request: forced for request, of in wanted.items() if (forced := self._forced_by(of, limits[request]))}
        self._forced = set(found)
        for request, drafts in (self._draft(wanted, limits) if self.drafter.free else {}).items():
            if len(drafts) > len(found.get(request, ())):
                found[request] = drafts
                self._forced.discard(request)
        return found

    @staticmethod
    def _forced_by(wanted: Wanted, most: int) -> list[int]:
        """What its grammar forces."""
        return wanted.limit((), most) if wanted.limit else []

    def _draft(self, wanted: Mapping[Request, Wanted], counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        """The drafter's guesses, without those that a grammar forbids; after them, what it forces."""
        choices = {request: (wanted[request].choice, count) for request, count in counts.items() if count}
        found = self.drafter.draft(choices) if choices else {}
        return {request: wanted[request].limited(drafts, counts[request]) for request, drafts in found.items()}

    def _counts(self, most: Mapping[Request, int]) -> dict[Request, int]:
        """The best number of guesses of each request, at most `most`."""
        counts = self._best(most, self._guess_s, self.drafter.follows)
        if not any(counts.values()) and self._forced:
            counts = self._best({of: count * (of in self._forced) for of, count in most.items()}, 0.0, False)
        return counts

    def _acceptance_of(self, request: Request) -> float:
        return self._certain if request in self._forced else self._acceptance.get(request, self._usual)

    def _fastest(
        self, most: Mapping[Request, int], guess_s: float, follows: bool
    ) -> tuple[list[int], float, list[float]]:
        """The numbers of guesses with most tokens per second, these, and the times of steps by the number of guesses.
        guess_s: seconds for each guess; follows: the drafter must follow the step."""
        answers, known = len(most), [self._acceptance_of(request) for request in most]
        # steps whose times are known, or nearly
        rows = min(answers + sum(most.values()), self._rows, 2 * self._steps.most)
        times = self._steps.between(answers, max(rows, answers))
        for guesses in range(1, len(times)):
            timed = min(guesses, answers) if self.drafter.at_once else guesses
            times[guesses] += timed * guess_s + (self._follows.of(answers + guesses) if follows else 0.0)
        return *best_counts(known, list(most.values()), times), times

    def _best(self, most: Mapping[Request, int], guess_s: float, follows: bool) -> dict[Request, int]:
        """As `_fastest`; none that may lose too much."""
        counts, rate, times = self._fastest(most, guess_s, follows)
        answers, plain = len(most), times[0]
        one = [int(of > 0 and i < len(times) - 1) for i, of in enumerate(most.values())]  # one guess each
        cost, may_lose = times[sum(one)] - plain, self._balance_s + self._allowed_s
        pays = rate * plain > answers * (1 + LOSS)
        may_lose += plain if pays else 0
        self._tries = not pays
        if not pays:
            counts = one
        if follows:
            allowed = plain > 0 and self._continues(pays, may_lose, cost, any(one))
        elif self.drafter.free:
            # what a trial shows is how long steps take: in vain if the guesses would not be worth one of no more rows
            gains = sum(self._acceptance_of(request) for request, count in zip(most, one, strict=True) if count)
            allowed = plain > 0 and gains > LOSS * answers and may_lose > (0 if pays else cost)
            self.resting = int(not allowed)
        else:
            lacks = (0 if pays else cost) - may_lose
            allowed = lacks < 0
            rests = 0 if allowed or not plain else int(lacks * self._doubt / (LOSS * plain))
            self.resting = min(rests, _CHECKS)
        return dict(zip(most, counts if allowed else [0] * answers, strict=True))

    def _continues(self, pays: bool, may_lose: float, cost: float, possible: bool) -> bool:
        """Whether the drafter follows the next step. may_lose, cost (of a trial): seconds; possible: guesses are."""
        if self._trying and possible:
            self._trying -= 1
        elif not (self.following and pays and may_lose > 0):
            self.following = possible and may_lose > TRIES * cost
            self._trying = TRIES - 1 if self.following else 0
        return self.following

    def completed(
        self, drafted: Mapping[Request, Sequence[int]], found: Mapping[Request, int], guess_s: float, step_s: float
    ) -> None:
        """A step took step_s seconds, its guesses guess_s. found: number of tokens of each request."""
        answers, guesses = len(found), sum(map(len, drafted.values()))
        self._steps.add(answers + guesses, step_s)
        self._spend(guess_s + step_s)
        if not guesses:
            self._balance_s -= guess_s
            if self._guessed > self._interval:
                self._interval = min(2 * self._interval + 4, _CHECKS)
            self._guessed = 0
            return
        self._guessed += 1
        each = (1 if self.drafter.at_once else len(guess) for of, guess in drafted.items() if of not in self._forced)
        if own := sum(each):
            self._guess_s += _LATEST * (guess_s / own - self._guess_s)
        gained = sum(found.values()) / answers * self._steps.of(answers) - guess_s - step_s
        self._balance_s = min(self._balance_s + gained, CREDIT * self._steps.of(answers))
        self._doubt = 1 if gained > 0 else min((1 + self._tries) * self._doubt, DOUBT)
        right = 0
        for request, guess in drafted.items():
            hits = found[request] - 1
            right += hits
            for hit in [True] * hits + [False] * (hits < len(guess)):
                self._learn(request, hit, answers)
        self.counts = Counts(self.counts.drafted + guesses, self.counts.accepted + right)

    def _learn(self, request: Request, hit: bool, answers: int) -> None:
        """Whether a guess was right, in a step of so many answers."""
        if request in self._forced:
            self._certain += _OUTCOME / answers * (hit - self._certain)
            return
        self._usual += _OUTCOME / answers * (hit - self._usual)
        own = self._acceptance.get(request, self._usual)
        self._acceptance[request] = own + _OUTCOME * (hit - own)

    def _spend(self, seconds: float) -> None:
        """Decoding took so many seconds."""
        self._allowed_s += LOSS / self._doubt * seconds

    def begin(self) -> None:
        """An answer begins, whose guesses may be right more often."""
        self.resting = self.resting if self.drafter.free else 0

    def rested(self, answers: int, seconds: float) -> None:
        """A step of so many answers, without drafts, took so many seconds."""
        self._steps.add(answers, seconds)
        self._spend(seconds)
        self.resting -= self.resting > 0 and not self.drafter.free

    def follow(self, step: PlannedStep, chosen: Sequence[ChosenToken], clock: Callable[[], float]) -> None:
        """Has a drafter that follows steps follow this one, for a prompt or where guesses are worth their time. chosen:
        as of `OwnDraft.follow`; clock: seconds."""
        if not isinstance(self.drafter, OwnDraft) or (step.chunk and step.chunk.scored):
            return
        if step.chunk:
            self.drafter.follow(step, chosen)
        elif self.following:
            begun = clock()
            self.drafter.follow(step, chosen)
            self.followed(len(chosen), clock() - begun)
        else:
            self.drafter.skip()

    def followed(self, rows: int, seconds: float) -> None:
        """The drafter took so many seconds to follow the completed step of so many rows."""
        self._follows.add(rows, seconds)
        self._spend(seconds)
        self._balance_s -= seconds

    def forget(self, request: Request) -> None:
        """The request is done."""
        self._acceptance.pop(request, None)
        self._offers.pop(request, None)
        self.drafter.forget(request)


class StepTimes:
    """Seconds of steps by their rows: the median of the last few measurements, interpolated between numbers of rows."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # that were measured, in order
        self._seconds: list[float] = []
        self._last: dict[int, deque[float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        seconds = min(seconds, 2 * (self.of(rows) or seconds))  # the first one may have had to wait
        i = bisect_left(self._rows, rows)
        if rows not in self._last:
            self._rows.insert(i, rows)
            self._seconds.insert(i, seconds)
            self._last[rows] = deque(maxlen=_LAST)
        self._last[rows].append(seconds)
        self._seconds[i] = median_low(self._last[rows])

    @property
    def most(self) -> int:
        """Rows of the largest step that was measured."""
        return self._rows[-1] if self._rows else 0

    def of(self, rows: int) -> float:
        """0 before the first measurement."""
        if not self._rows:
            return 0.0
        i = bisect_left(self._rows, rows)
        if i == len(self._rows) or (i == 0 and self._rows[0] != rows):
            nearest = max(i - 1, 0)
            return self._seconds[nearest] * (1 + _SLOPE * rows) / (1 + _SLOPE * self._rows[nearest])
        if self._rows[i] == rows:
            return self._seconds[i]
        below, above = self._rows[i - 1 : i + 1]
        return self._seconds[i - 1] + (rows - below) / (above - below) * (self._seconds[i] - self._seconds[i - 1])

    def between(self, first: int, last: int) -> list[float]:
        """Of first, first + 1 .. last rows."""
        return [self.of(rows) for rows in range(first, last + 1)]


def best_counts(acceptance: Sequence[float], most: Sequence[int], times: Sequence[float]) -> tuple[list[int], float]:
    """Numbers of guesses for answers with these acceptances with most tokens per second, and that rate. most: of each
    answer; times: seconds of a step with 0, 1, 2 .. guesses."""
    counts, tokens = [0] * len(acceptance), float(len(acceptance))
    # that the next guess of an answer counts
    chances = [(-chance, i) for i, chance in enumerate(acceptance) if most[i]]
    heapify(chances)
    best, rate = list(counts), 0.0
    for time in times[1:]:
        chance, i = chances[0]
        tokens -= chance
        counts[i] += 1
        if counts[i] < most[i]:
            heapreplace(chances, (chance * acceptance[i], i))
        else:
            heappop(chances)
        if time and tokens > rate * time:
            best, rate = list(counts), tokens / time
        if not chances:
            break
    return best, rate
