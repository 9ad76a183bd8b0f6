"""Draws a token from a row of logits on a device: top-k, top-p, min-p and the draw, without sorting. The code is shared
by all targets; `Machine` (sampling_machine.py) has what differs between them.

Search. A filter keeps the tokens whose logit is above a threshold, and of the tokens at the threshold those with the
smallest ids. So it searches for the largest number x such that the tokens from x on have a count, or a probability
mass, of at least some target. The draw is the same search over token ids. The search finds RADIX bits of x at a time,
with a histogram. Masses are whole numbers, whose sum is about MASS, so the result does not depend on their order.

List. Thresholds are mostly among the largest logits, so tokens above a bound are first copied to a list. With top-k the
bound is one that the largest logits of k pieces of the row reach. Otherwise it is a window below the largest logit; if
the list gets too many or too few tokens, the window is changed and the row is read again. In a short list each token is
compared with all others, which yields all filters and the draw at once. Without a list the stages read the whole row.

Stages, for longer lists and for whole rows; a stage may have nothing to do:

    0  top-k: finds the threshold       1  finds the last of the tokens at this threshold that top-k keeps
    2  top-p: finds the threshold       3  finds the last of the tokens at this threshold that top-p keeps
    4  the draw: finds the token at which the running sum of masses, in the order of ids, reaches a random number
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.tirx.script import builder as T

from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.sampling_machine import (
    BINS,
    LARGEST,
    LOWEST,
    LOWEST_KEY,
    RADIX,
    SMALLEST,
    Histogram,
    Machine,
    Pieces,
    Var,
    Words,
    drawn_number,
    key_of,
    no,
    put,
    signed,
    unsigned,
    value_of,
    when,
)
from mlc_amd.schedules.tir import Expr

# visit(token, logit, whether the token exists, a function that emits the code for its mass)
WeighedVisit = Callable[[Expr, Expr, Expr, Callable[[], Expr]], None]

MASS = float(1 << 30)
STAGES = 5
WINDOWS = 7  # number of windows to try before the whole row is searched
FIRST_WINDOW = 4.0  # size of the first window: largest logit minus bound
AT_ONCE = 4  # number of tokens with which a thread compares a token in a step


class Draw(ABC):
    """The draw from one row. top: its largest logit. sums: approximate sums over all tokens of e**(logit - top) and of
    e**((logit - top) / temperature). chosen: the token's variable. Tokens that no filter has removed are "left"."""

    def __init__(self, machine: Machine, words: Words, top: Expr, sums: tuple[Expr, Expr], chosen: Var):
        self.m, self.words, self.vocab = machine, words, machine.vocab
        self.top, self.sums, self.chosen = top, sums, chosen
        self.top_k, self.top_p, self.heat = words.int("top_k"), words.float("top_p"), words.float("heat")
        self.has_k = T.Bind((self.top_k > 0) & (self.top_k < self.vocab))
        self.has_p = T.Bind(self.top_p < T.float32(1))
        self.least = T.Bind(key_of(T.Bind(self.top + words.float("min_p"))))  # the threshold of min-p
        self.has_m = T.Bind(words.float("min_p") > T.float32(LOWEST))
        self.largest = T.Bind(key_of(top))
        cell = machine.cell
        self.threshold, self.last = cell(T.int32(SMALLEST)), cell(T.int32(LARGEST))  # which tokens are left: `_left`
        self.tie = cell(T.int32(0))  # the threshold (a key) whose tokens an odd stage searches
        self.listed, self.count = cell(T.int32(0)), cell(T.int32(0))  # whether there is a list; its number of tokens
        self.floor = cell(T.int32(SMALLEST))  # lower bound of the keys in the list
        self.ties = cell(T.int32(0))  # whether the next odd stage has something to do
        self.factor, self.scale = cell(T.float32(0), "float32"), cell(T.float32(0), "float32")  # constants of `_mass`
        self.sum = cell(T.int32(0))  # sum of the masses of the tokens that are left
        self.values, self.ids = machine.shared(machine.size, "float32"), machine.shared(machine.size)
        self.counter = machine.shared(1)
        self.hist = Histogram(machine, machine.pieces.count if machine.pieces else 0)
        self.found, self.target = self.hist.found, self.hist.target
        self.above = machine.shared(machine.small)  # short lists: the mass of the tokens that are ahead of each token

    # ---- tokens

    def _left(self, token: Expr, key: Expr) -> Expr:
        """Whether a token is left after the filters so far. key: `key_of` its logit."""
        threshold = self.threshold.get()
        return (key > threshold) | ((key == threshold) & (token <= self.last.get()))

    def _mass(self, value: Expr) -> Expr:
        power = self.m.exp2(T.Bind((value - self.top) * self.factor.get()))
        return T.Bind(T.cast(power * self.scale.get() + T.float32(0.5), "int32"))

    @contextmanager
    def _own(self) -> Iterator[tuple[Expr, Expr, Expr]]:
        """A loop over this thread's tokens of the list: (place in the list, token, logit)."""
        threads, count = self.m.threads, self.count.get()
        with T.serial(T.truncdiv(count + (threads - 1), T.int32(threads))) as i:
            place = T.Bind(i * threads + self.m.tid)
            with T.If(place < count), T.Then():
                yield place, T.Bind(self.ids[place]), T.Bind(self.values[place])

    def _weighs(self, draw: Expr) -> None:
        """Sets the constants of `_mass` for the draw if `draw`, otherwise for top-p."""
        # The sum of e**(logit - top) over the tokens that are left is at most their number.
        listed = T.Select(draw & (self.listed.get() > 0), self.count.get(), T.int32(LARGEST))
        few = T.cast(T.Select(self.has_k, self.top_k, listed), "float32")
        self.factor.set(T.Select(draw, self.heat, T.float32(LOG2E)))
        self.scale.set(T.float32(MASS) / T.min(T.Select(draw, self.sums[1], self.sums[0]), few))

    def _mass_wanted(self) -> Expr:
        """The target of top-p: top_p times `sum`, or times MASS if `sum` is only that of a list, without top-k."""
        all_of = T.Select((self.listed.get() > 0) & no(self.has_k), T.float32(MASS), T.cast(self.sum.get(), "float32"))
        return T.max(T.cast(T.ceil(self.top_p * all_of), "int32"), T.int32(1))

    def _aim(self) -> None:
        """Sets the target of the draw: a random number from 1 to `sum`."""
        self.target.set(drawn_number(self.m, self.words, self.sum.get()))

    def _each(self, visit: WeighedVisit, near: Callable[[], tuple[Expr, Expr]]) -> None:
        """Visits the tokens of the list, or without a list those of the row; near: see `Machine.each_token`."""
        with when(self.listed.get() > 0), self._own() as (_, token, value):
            visit(token, value, T.bool(True), lambda: self._mass(value))
        with when(self.listed.get() == 0):
            self.m.each_token(
                lambda token, value, inside: visit(token, value, inside, lambda: self._row_mass(token, value)),
                near=near,
            )

    # ---- whole rows

    @abstractmethod
    def _add_up_row(self, mine: Var) -> None:
        """For whole rows: each thread adds the masses of its share of the tokens that are left to `mine`."""

    @abstractmethod
    def _draw_row(self) -> None:
        """For whole rows: the draw, for the target `target`. Sets `chosen`. Called after `_add_up_row`."""

    @abstractmethod
    def _row_mass(self, token: Expr, value: Expr) -> Expr:
        """For whole rows: the mass of a token that is left. Called after `_add_up_row`."""

    # ---- the stages

    def emit(self) -> None:
        """Emits the whole draw, which sets `chosen`."""
        filters = self.has_k | self.has_p | self.has_m
        done = self.m.cell(T.int32(0))
        with T.serial(STAGES) as stage, when(done.get() == 0):
            first, odd, draw = T.Bind(stage == 0), T.Bind((stage & 1) == 1), T.Bind(stage == STAGES - 1)
            with when(draw & self.has_m & (self.least > self.threshold.get())):
                self.threshold.set(self.least)
                self.last.set(T.int32(LARGEST))
            needed = T.cast(T.Select(stage == 2, self.has_p, no(odd)), "int32")
            tries = T.Select(first, T.Select(filters & self._fits(), self._tries(), T.int32(0)), needed)
            self._gather(first, draw, T.Bind(tries))
            short = T.Bind(first & (self.listed.get() > 0) & (self.count.get() <= self.m.small))
            with when(short):
                self._compare_all()
                done.set(T.int32(1))
            active = T.Select(first, self.has_k & no(short), T.Select(draw, T.bool(True), self.has_p))
            active = T.Bind(T.Select(odd, self.ties.get() > 0, active))
            with when(active & no(odd)):
                self.target.set(T.Select(first, self.top_k, self._mass_wanted()))
            with when(active & draw):
                self._aim()
            whole = T.Bind(draw & (self.listed.get() == 0))
            with when(whole):
                self._draw_row()
            with when(active & no(whole)):
                self._search(stage, odd, draw)

    # ---- the list

    def _fits(self) -> Expr:
        """Whether the tokens that the first filter keeps may fit in the list; a token adds at most 1 to sums[0]."""
        few = T.Select(self.has_p, self.top_p * self.sums[0], T.float32(0)) <= T.float32(self.m.size)
        return T.Select(self.has_k, self.top_k <= self.m.size, few)

    def _tries(self) -> Expr:
        bounds = T.Select(self.has_k, T.int32(1), T.int32(0)) if self.m.pieces else T.int32(0)
        return T.Select(self.has_k | self.has_p, WINDOWS + bounds, T.int32(1))

    def _gather(self, first: Expr, draw: Expr, tries: Expr) -> None:
        """Makes a list if there is none and the tokens may fit; sets `sum`. tries: how often to try."""
        low, high = self.m.cell(T.float32(0), "float32"), self.m.cell(T.float32(0), "float32")
        width, bound = self.m.cell(T.float32(FIRST_WINDOW), "float32"), self.m.cell(T.int32(0))
        bounded, fits = self.m.cell(T.int32(0)), T.Bind(self._fits())
        if pieces := self.m.pieces:
            with when(first & self.has_k & (tries > 0)):
                bound.set(self._bound(pieces))
                bounded.set(T.int32(1))
        with T.serial(tries):
            old = self.listed.get()
            makes = T.Bind((old == 0) & (first | self.has_k | (draw & self.has_p & fits)))
            windowed = T.Bind(bounded.get() == 0)
            with when(makes):
                near = T.Select(self.has_k | self.has_p, key_of(T.Bind(self.top - width.get())), self.least)
                near = T.Select(windowed, near, bound.get())
                self._list(T.Bind(T.Select(first, near, T.int32(SMALLEST))))
                count = self.count.get()
                enough = no(first & self.has_k) | (count >= self.top_k)
                self.listed.set(T.cast((count <= self.m.size) & enough, "int32"))
            self._weighs(draw)
            checks = T.Bind(first & makes & self.has_p & no(self.has_k) & (self.listed.get() > 0))
            with when(no(first) | checks):
                self._add_up()
            with when(checks):
                self.listed.set(T.cast(self.sum.get() >= self._mass_wanted(), "int32"))
            with when(first & (self.listed.get() == 0) & windowed):
                with when(self.count.get() > self.m.size):
                    high.set(width.get())
                with when(self.count.get() <= self.m.size):
                    low.set(width.get())
                between = (low.get() + high.get()) * T.float32(0.5)
                width.set(T.Select(high.get() > T.float32(0), between, width.get() * T.float32(2)))
            bounded.set(T.int32(0))

    def _bound(self, pieces: Pieces) -> Expr:
        """The key of a bound that the largest logits of at least `top_k` pieces, and of few more, reach. If there are
        fewer pieces with tokens, the smallest key that may be chosen."""
        m = self.m
        places = [T.Bind(i * m.threads + m.tid) for i in range(-(-pieces.count // m.threads))]
        tops = [pieces.top(T.Bind(T.min(place, T.int32(pieces.count - 1)))) for place in places]
        counts = [T.Bind((place < pieces.count) & (top > LOWEST)) for place, top in zip(places, tops, strict=True)]
        keys = [T.Select(has, key_of(top), LARGEST) for has, top in zip(counts, tops, strict=True)]
        lowest = T.Bind(value_of(m.reduced(T.Bind(functools.reduce(T.min, keys)), "least")))
        width = T.Bind(T.max(self.top - lowest, T.float32(1e-6)) * T.float32(1 / (BINS - 1)))  # width of a bin
        self.hist.clear()
        for has, top in zip(counts, tops, strict=True):
            with T.If(has), T.Then():
                place = T.Bind(T.cast((top - lowest) / width, "int32"))
                m.add(self.hist.bins, T.Bind(T.min(place, T.int32(BINS - 1))), T.int32(1))
        m.barrier()
        self.target.set(self.top_k)
        everything = self.hist.find()
        # a little below the bin's edge because of rounding; logits that equal the bound are in the list
        edge = T.Bind(lowest + (T.cast(self.found[0], "float32") - T.float32(0.1)) * width)
        return T.Select(everything >= self.top_k, key_of(edge), key_of(T.float32(LOWEST)) + 1)

    def _list(self, bound: Expr) -> None:
        """Lists the tokens that are left with keys from `bound` on. `count` is their number, which may not fit."""
        m, place = self.m, self.m.cell(T.int32(0))
        with T.If(m.tid == 0), T.Then():
            put(self.counter, T.int32(0), 0)
            if m.pieces:
                m.pieces.clear()
        m.barrier()

        def visit(token: Expr, value: Expr, inside: Expr) -> None:
            key = T.Bind(key_of(value))
            with T.If(inside & (key >= bound) & self._left(token, key) & (place.get() < m.size)), T.Then():
                place.set(m.add(self.counter, 0, T.int32(1)))
                with T.If(place.get() < m.size), T.Then():
                    put(self.values, value, place.get())
                    put(self.ids, token, place.get())

        floor = T.Bind(value_of(T.max(bound, self.threshold.get())))
        m.each_token(visit, floor, enough=lambda: place.get() >= m.size, scratch=self.hist.bins)
        m.barrier()
        self.count.set(self.counter[0])
        self.floor.set(bound)
        m.barrier()

    def _add_up(self) -> None:
        mine = self.m.cell(T.int32(0))
        with (
            when(self.listed.get() > 0),
            self._own() as (_, token, value),
            T.If(self._left(token, T.Bind(key_of(value)))),
            T.Then(),
        ):
            mine.set(mine.get() + self._mass(value))
        with when(self.listed.get() == 0):
            self._add_up_row(mine)
        self.sum.set(self.m.reduced(mine.get(), "sum"))

    # ---- short lists

    def _compare_all(self) -> None:
        """Sets `chosen` from a short list: adds up the masses of the tokens ahead of each token, for the filters, then
        those of the tokens that are left up to its id."""
        m, mine = self.m, self.m.cell(T.int32(0))
        self._weighs(T.bool(False))
        with self._own() as (place, _, value):
            put(self.hist.bins, self._mass(value), place)
        m.barrier()
        with self._own() as (place, token, value):
            rank, above = m.cell(T.int32(0)), m.cell(T.int32(0))
            for other, counts in self._others():
                logit = T.Bind(self.values[other])
                ahead = (logit > value) | ((logit == value) & (self.ids[other] < token))
                ahead = T.Bind(counts & ahead)
                rank.set(rank.get() + T.cast(ahead, "int32"))
                above.set(above.get() + T.Select(ahead, self.hist.bins[other], T.int32(0)))
            stays = T.Bind(no(self.has_k) | (rank.get() < self.top_k))
            put(self.above, T.Select(stays, above.get(), T.int32(LARGEST)), place)
            mine.set(mine.get() + T.Select(stays, self.hist.bins[place], T.int32(0)))
        self.sum.set(m.reduced(mine.get(), "sum"))
        wanted = T.Bind(T.Select(self.has_p, T.min(self._mass_wanted(), self.sum.get()), T.int32(LARGEST)))
        mine.set(T.int32(0))
        self._weighs(T.bool(True))
        with self._own() as (place, _, value):
            left = (self.above[place] < wanted) & (no(self.has_m) | (key_of(value) >= self.least))
            mass = T.Bind(T.Select(left, self._mass(value), T.int32(0)))
            put(self.hist.bins, mass, place)
            mine.set(mine.get() + mass)
        self.sum.set(m.reduced(mine.get(), "sum"))
        self._aim()
        with self._own() as (place, token, _):
            reached = m.cell(T.int32(0))
            for other, counts in self._others():
                added = counts & (self.ids[other] <= token)
                reached.set(reached.get() + T.Select(added, self.hist.bins[other], T.int32(0)))
            passed = T.Bind(reached.get() - self.hist.bins[place])
            with T.If((passed < self.target.get()) & (self.target.get() <= reached.get())), T.Then():
                put(self.found, token, 0)
        m.barrier()
        self.chosen.set(self.found[0])

    def _others(self) -> Iterator[tuple[Expr, Expr]]:
        """A loop over the list: (place, whether it is in the list; if not, the place of the last token)."""
        count = self.count.get()
        with T.serial(T.truncdiv(count + (AT_ONCE - 1), T.int32(AT_ONCE))) as i:
            for j in range(AT_ONCE):
                place = T.Bind(i * AT_ONCE + j)
                yield T.Bind(T.min(place, count - 1)), place < count

    # ---- the search for one number

    def _search(self, stage: Expr, odd: Expr, draw: Expr) -> None:
        """Finds the largest key such that the tokens from it on reach the target; in odd stages and the draw, the
        smallest id such that the tokens up to it do. Only tokens that are left count, in odd stages those at `tie`."""
        m, by_id = self.m, T.Bind(odd | draw)
        lowest = T.Select(self.listed.get() > 0, self.floor.get(), T.int32(SMALLEST))
        start, tie = T.Bind(unsigned(T.max(lowest, self.threshold.get()))), self.tie.get()
        reach = T.Bind(T.Select(by_id, T.uint32(self.vocab - 1), unsigned(self.largest) - start))
        passes = T.int32(1)
        for i in (1, 2, 3):
            passes = passes + T.cast(reach >= T.uint32(1 << RADIX * i), "int32")
        passes = T.Bind(passes)
        prefix, equal = m.cell(T.uint32(0), "uint32"), m.cell(T.int32(0))
        with T.serial(passes) as i:
            shift = T.Bind(unsigned((passes - 1 - i) * RADIX))
            upper = T.Bind(T.min(shift + T.uint32(RADIX), T.uint32(31)))
            known = T.Bind(T.shift_right(prefix.get(), upper))
            self.hist.clear()

            def visit(token, value, inside, mass, i=i, shift=shift, upper=upper, known=known):
                key = T.Bind(key_of(value))
                number = T.Select(by_id, unsigned(self.vocab - 1 - token), unsigned(key) - start)
                number = T.Bind(number)
                here = inside & ((i == 0) | (T.shift_right(number, upper) == known))
                here = here & (no(odd) | (key == tie)) & self._left(token, key)
                with T.If(here), T.Then():
                    place = T.Bind(signed(T.shift_right(number, shift) & T.uint32(BINS - 1)))
                    m.add(self.hist.bins, place, T.Select(stage < 2, T.int32(1), mass()))

            self._each(visit, lambda: self._near(i, odd, draw, upper, known, start, reach, tie))
            m.barrier()
            self.hist.find()
            bin_, above = T.Bind(self.found[0]), T.Bind(self.found[1])
            prefix.set(prefix.get() | T.shift_left(unsigned(bin_), shift))
            self.target.set(self.target.get() - above)
            equal.set(self.found[2])
            m.barrier()
        with when(by_id):
            token = T.Bind(T.int32(self.vocab - 1) - signed(prefix.get()))
            with when(draw):
                self.chosen.set(token)
            self.last.set(token)
        with when(no(by_id)):
            key = T.Bind(signed(prefix.get() + start))
            self.last.set(T.Select(key > self.threshold.get(), T.int32(LARGEST), self.last.get()))
            self.threshold.set(key)
            self.tie.set(key)
            one = T.Select(stage == 0, T.int32(1), self._mass(T.Bind(value_of(key))))
            self.ties.set(T.cast(equal.get() - self.target.get() >= one, "int32"))
        with when(odd):
            self.ties.set(T.int32(0))

    def _near(
        self, i: Expr, odd: Expr, draw: Expr, upper: Expr, known: Expr, start: Expr, reach: Expr, tie: Expr
    ) -> tuple[Expr, Expr]:
        """(smallest, largest) logit of the tokens that pass i of a search needs."""
        first = T.Bind(T.shift_left(known, upper))
        last = T.Bind(T.min(first + (T.shift_left(T.uint32(1), upper) - T.uint32(1)), reach))
        low, high = (T.Bind(T.max(signed(start + number), T.int32(LOWEST_KEY))) for number in (first, last))
        every = T.Bind((i == 0) | draw)
        low = T.Select(odd, tie, T.Select(every, T.int32(LOWEST_KEY), low))
        high = T.Select(odd, tie, T.Select(every, self.largest, high))
        return T.Bind(value_of(T.Bind(low))), T.Bind(value_of(T.Bind(high)))
