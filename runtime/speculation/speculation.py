"""Speculative decoding: decides how many guesses of each answer's next tokens a step verifies.

In: the answers of a step, the guesses of a `Drafter`, the durations of steps. Out: for each answer as many guesses as
are worth the time of their rows. A step computes a row for each guess after the newest token. The device chooses the
token of each row as it would without guesses, and the tokens after right guesses are kept. So answers do not depend on
guesses. This holds for sampled answers, too: a guess is right with its probability in the model, as in rejection
sampling. Under a grammar, each row has the mask of its position. Guesses that the grammar forbids are left out, and
tokens that the grammar forces are guessed without the drafter.

The acceptance a of an answer is the probability that a guess is right if the guesses before it are. A step with k
guesses gives 1 + a + .. + a^k tokens. The number of guesses is the one with most tokens per second, by the measured
times of steps.

While no guesses are worth their time, steps have none and may start ahead. Guesses that take no time (those of a free
drafter, and those that grammars force) are then compared with the tokens that steps choose (`watched`), so that their
acceptance is known without verifying any. Other guesses are tried from time to time, as long as the total loss is less
than LOSS of the time of decoding; less still after trials without a gain. A drafter that follows steps takes time after
each step, with guesses or without. So it does not follow while guesses are not worth this time; it is tried again for
TRIES steps at a time.
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

# share of the decoding time that guesses may lose; with the first guesses of a short answer the loss is below 3 %
LOSS = 0.015
DOUBT = 2  # LOSS is divided by up to this after trials that were in vain
WAKING = 0.1  # least gain for which steps stop starting ahead: stopping costs a part of a step
MOST = 7  # largest number of guesses for an answer: with its newest token they make eight rows
TRIES = 8  # steps that are followed in a row in a trial: guesses are best if the drafter knows the last tokens
CREDIT = 5  # limit of the earlier gain that may be lost again, in steps
_LAST = 5  # measurements of a kind of step: their median is the time of an undisturbed step
_CHECKS = 64  # largest number of steps with guesses between two steps without, whose time is needed for comparison
_LATEST = 0.2  # weight of the latest guess's time in the average
_OUTCOME = 0.1  # weight of the latest outcome in the acceptance
_FORCED = 0.9  # assumed acceptance of forced guesses before there was any: the text is certain, its tokens are not
_SLOPE = 0.1  # assumed cost of a further row until it is measured, as a share of a step with one row


class Drafter(Protocol):
    """Guesses the next tokens of answers. It is used by one thread at a time."""

    expected: float  # acceptance that is assumed before there was a guess
    free: bool  # guesses take negligible time: as many as possible are made, then the best number of them is used
    at_once: bool  # the guesses of an answer take the same time, whatever their number
    follows: bool  # it guesses after steps that it has followed; see `Speculation.following`

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        """wanted: (choice, count) for each request. Returns up to `count` tokens that follow the tokens of the choice.
        Requests without guesses may be missing."""
        ...

    def forget(self, request: Request) -> None:
        """Called when a request is done. The request may be unknown."""
        ...

    def close(self) -> None: ...


class NoDrafts:
    """A `Drafter` without guesses. Only the guesses that grammars force remain."""

    expected, free, at_once, follows = 0.0, True, False, False

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        return {}

    def forget(self, request: Request) -> None:
        """Does nothing: it keeps nothing about requests."""

    def close(self) -> None:
        """Does nothing: it has no resources."""


class Wanted(NamedTuple):
    """The guesses that an answer may have. most: their largest number."""

    choice: TokenChoice  # of its next token
    most: int
    limit: Callable[[Sequence[int], int], list[int]] | None = None  # `guesses` of its constraint, or None

    def limited(self, drafts: Sequence[int], most: int) -> list[int]:
        return self.limit(drafts, most) if self.limit else list(drafts[:most])


class Counts(NamedTuple):
    """The number of guesses that steps verified, and how many of them were right."""

    drafted: int
    accepted: int


class Speculation:
    """Before each step without a chunk, call `drafts`; after it `completed`. While `resting` is not 0, call `rested`
    after the step and then `watched` instead. After each step during which no other one starts, also one with a chunk,
    call `follow`. rows: the largest number of rows of a step."""

    def __init__(self, drafter: Drafter, rows: int, most: int = MOST) -> None:
        self.drafter, self._rows, self._most = drafter, rows, most
        self.counts = Counts(0, 0)
        self._acceptance: dict[Request, float] = {}
        self._usual = drafter.expected  # acceptance of new requests
        self._forced: set[Request] = set()  # requests whose guesses in the last step were forced by their grammars
        self._certain = _FORCED  # acceptance of forced guesses
        self.following = drafter.follows  # whether the drafter must follow the step without a chunk that is in progress
        self._trying = 0  # how many further steps it follows as a trial
        # Steps before guesses may be worth their time; these steps may start ahead. With a free drafter: 0 or 1.
        self.resting = int(drafter.free)
        self._offers: dict[Request, int] = {}  # free guesses of the next tokens, which no step verifies
        self._steps, self._follows = StepTimes(), StepTimes()
        self._guess_s = 0.0  # seconds for one guess
        self._allowed_s = 0.0  # the total of seconds that guesses may have lost
        self._doubt = 1
        self._tries = False  # whether the step's guesses are a trial: they seem not to be worth their time
        self._balance_s = 0.0  # seconds that guesses have saved so far
        self._guessed = self._interval = 0  # steps since the last one without guesses; how many such steps there may be

    def drafts(self, wanted: Mapping[Request, Wanted]) -> Mapping[Request, list[int]]:
        """The guesses that the next step verifies. wanted: for each request with a single row in the step."""
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
        """Called when there is no guess that takes no time: steps may start ahead."""
        self.resting = 1

    def watched(self, found: Mapping[Request, int], wanted: Mapping[Request, Wanted]) -> None:
        """Called after a step without guesses. found: the token of each request. wanted: guesses after it."""
        for request, token in found.items():
            if request in self._offers:
                self._learn(request, self._offers[request] == token, len(found))
        limits = self._limits(wanted)
        offered = self._offered(wanted, limits)
        self._offers = {request: guesses[0] for request, guesses in offered.items()}
        # guesses left after the step in progress
        left = {request: max(len(offered.get(request, ())) - 1, 0) for request in found}
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
        """The guesses that take no time: for each request what its grammar forces or a free drafter guesses, the longer
        of the two."""
        found = {request: forced for request, of in wanted.items() if (forced := self._forced_by(of, limits[request]))}
        self._forced = set(found)
        for request, drafts in (self._draft(wanted, limits) if self.drafter.free else {}).items():
            if len(drafts) > len(found.get(request, ())):
                found[request] = drafts
                self._forced.discard(request)
        return found

    @staticmethod
    def _forced_by(wanted: Wanted, most: int) -> list[int]:
        """The tokens that its grammar forces."""
        return wanted.limit((), most) if wanted.limit else []

    def _draft(self, wanted: Mapping[Request, Wanted], counts: Mapping[Request, int]) -> dict[Request, list[int]]:
        """The drafter's guesses, up to one that a grammar forbids; then the tokens that the grammar forces."""
        choices = {request: (wanted[request].choice, count) for request, count in counts.items() if count}
        found = self.drafter.draft(choices) if choices else {}
        return {request: wanted[request].limited(drafts, counts[request]) for request, drafts in found.items()}

    def _counts(self, most: Mapping[Request, int]) -> dict[Request, int]:
        """The best number of guesses for each request, at most `most`."""
        counts = self._best(most, self._guess_s, self.drafter.follows)
        if not any(counts.values()) and self._forced:
            counts = self._best({of: count * (of in self._forced) for of, count in most.items()}, 0.0, False)
        return counts

    def _acceptance_of(self, request: Request) -> float:
        return self._certain if request in self._forced else self._acceptance.get(request, self._usual)

    def _fastest(
        self, most: Mapping[Request, int], guess_s: float, follows: bool
    ) -> tuple[list[int], float, list[float]]:
        """Returns the numbers of guesses with most tokens per second, this rate, and the seconds of a step by its total
        number of guesses. guess_s: seconds for each guess. follows: whether the drafter must follow the step."""
        answers, known = len(most), [self._acceptance_of(request) for request in most]
        # only as many rows as have a known time, or nearly
        rows = min(answers + sum(most.values()), self._rows, 2 * self._steps.most)
        times = self._steps.between(answers, max(rows, answers))
        for guesses in range(1, len(times)):
            timed = min(guesses, answers) if self.drafter.at_once else guesses
            times[guesses] += timed * guess_s + (self._follows.of(answers + guesses) if follows else 0.0)
        return *best_counts(known, list(most.values()), times), times

    def _best(self, most: Mapping[Request, int], guess_s: float, follows: bool) -> dict[Request, int]:
        """The numbers of guesses of `_fastest`, without guesses that may lose too much time."""
        counts, rate, times = self._fastest(most, guess_s, follows)
        answers, plain = len(most), times[0]
        one = [int(of > 0 and i < len(times) - 1) for i, of in enumerate(most.values())]  # one guess for each answer
        cost, may_lose = times[sum(one)] - plain, self._balance_s + self._allowed_s
        pays = rate * plain > answers * (1 + LOSS)
        may_lose += plain if pays else 0
        self._tries = not pays
        if not pays:
            counts = one
        if follows:
            allowed = plain > 0 and self._continues(pays, may_lose, cost, any(one))
        elif self.drafter.free:
            # A trial shows how long steps take. It is in vain if guesses do not pay even when rows take no time.
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
        """Decides whether the drafter follows the next step. may_lose: seconds that may be lost. cost: seconds of a
        trial step. possible: whether there can be guesses."""
        if self._trying and possible:
            self._trying -= 1
        elif not (self.following and pays and may_lose > 0):
            self.following = possible and may_lose > TRIES * cost
            self._trying = TRIES - 1 if self.following else 0
        return self.following

    def completed(
        self, drafted: Mapping[Request, Sequence[int]], found: Mapping[Request, int], guess_s: float, step_s: float
    ) -> None:
        """Called after a step, which took step_s seconds, and its guesses guess_s. drafted: the guesses of each
        request. found: the number of tokens that each request got."""
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
        """Updates the acceptance. hit: whether a guess was right. answers: number of answers in its step."""
        if request in self._forced:
            self._certain += _OUTCOME / answers * (hit - self._certain)
            return
        self._usual += _OUTCOME / answers * (hit - self._usual)
        own = self._acceptance.get(request, self._usual)
        self._acceptance[request] = own + _OUTCOME * (hit - own)

    def _spend(self, seconds: float) -> None:
        """Counts `seconds` of decoding."""
        self._allowed_s += LOSS / self._doubt * seconds

    def begin(self) -> None:
        """Called when an answer begins, as its guesses may be right more often."""
        self.resting = self.resting if self.drafter.free else 0

    def rested(self, answers: int, seconds: float) -> None:
        """Called after a step without guesses. answers: in the step. seconds: its duration."""
        self._steps.add(answers, seconds)
        self._spend(seconds)
        self.resting -= self.resting > 0 and not self.drafter.free

    def follow(self, step: PlannedStep, chosen: Sequence[ChosenToken], clock: Callable[[], float]) -> None:
        """Lets a drafter that follows steps follow this step, if it has a prompt or if guesses are worth their time.
        chosen: see `OwnDraft.follow`. clock: returns seconds."""
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
        """Called after the drafter has followed a step. rows: of the step. seconds: how long following took."""
        self._follows.add(rows, seconds)
        self._spend(seconds)
        self._balance_s -= seconds

    def forget(self, request: Request) -> None:
        """Called when a request is done."""
        self._acceptance.pop(request, None)
        self._offers.pop(request, None)
        self.drafter.forget(request)


class StepTimes:
    """Seconds of steps by number of rows: the median of the last few measurements, interpolated between numbers."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # numbers of rows that were measured, sorted
        self._seconds: list[float] = []
        self._last: dict[int, deque[float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        # limited, as the first measurement after a pause may include waiting
        seconds = min(seconds, 2 * (self.of(rows) or seconds))
        i = bisect_left(self._rows, rows)
        if rows not in self._last:
            self._rows.insert(i, rows)
            self._seconds.insert(i, seconds)
            self._last[rows] = deque(maxlen=_LAST)
        self._last[rows].append(seconds)
        self._seconds[i] = median_low(self._last[rows])

    @property
    def most(self) -> int:
        """The number of rows of the largest step that was measured."""
        return self._rows[-1] if self._rows else 0

    def of(self, rows: int) -> float:
        """Seconds of a step; 0 before the first measurement."""
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
        """The seconds for first, first + 1 .. last rows."""
        return [self.of(rows) for rows in range(first, last + 1)]


def best_counts(acceptance: Sequence[float], most: Sequence[int], times: Sequence[float]) -> tuple[list[int], float]:
    """Chooses numbers of guesses with most tokens per second. acceptance: of each answer. most: the largest number for
    each answer. times: seconds of a step with 0, 1, 2 .. guesses in all. Returns the numbers, and the rate."""
    counts, tokens = [0] * len(acceptance), float(len(acceptance))
    # for each answer: the probability that its next guess is right, negated for the heap
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
