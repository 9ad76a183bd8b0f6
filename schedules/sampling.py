"""How a row's token is drawn from its logits on a device: top-k, top-p, min-p and the draw, without sorting.

The tokens that are left are always those whose logit is above a threshold, and of those at the threshold the first
ones. So each filter looks for one number, and so does the draw, which goes through tokens in the order of their ids:
the largest number x such that the tokens from x on have a count, or a probability mass, of at least some target. It is
found RADIX bits at a time with histograms. The mass is counted in whole numbers, of which all tokens together have
about MASS: sums do not depend on their order, so neither threads nor workgroups change what is chosen.

Tokens near the largest logit, which the thresholds mostly are among, are first gathered in a list; if there are too
many or too few, the window around the largest logit is changed and the row is read again. Without a list all goes
through the whole row. Stages, each of which may have nothing to do:

    0  top-k: the threshold                      1  of the tokens at it, the last one that stays
    2  top-p: the threshold, likewise            3  of the tokens at it, the last one that stays
    4  the draw: the token where the running sum of the masses passes the random number

`Machine` is what differs between targets. `LAYOUT` of words and flags: runtime/sampling_layout.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.philox import MULTIPLIERS, ROUNDS, WEYL
from mlc_amd.runtime.sampling_layout import FIELDS, row_shapes
from mlc_amd.schedules.attention import LOG2E

RADIX = 10
BINS = 1 << RADIX
MASS = float(1 << 30)
STAGES = 5
WINDOWS = 6  # that are tried before the whole row is searched
FIRST_WINDOW = 8.0  # below the largest logit
LOWEST = -3.0e38  # logit of tokens that must not be chosen
LARGEST = (1 << 31) - 1
SMALLEST = -(1 << 31)
LOWEST_KEY = -0x7F800000  # `key_of` the least finite float32
Cell = Any  # a number in a register that changes: `Machine.cell`


def sample_args(n, columns) -> list:
    """Declares the parameters of a kernel that samples n rows, behind `state`: Logits, sampling, changes, allowed (of
    `sampling_layout.row_shapes`), Sampled, LogProbs, Adjusted."""
    inputs = [(name, shape, "int32") for name, shape in row_shapes(n, columns).items()]
    outputs = [("Sampled", (n,), "int32"), ("LogProbs", (n,), "float32"), ("Adjusted", (n, columns), "float32")]
    found = [("Logits", (n, columns), "float32"), *inputs, *outputs]
    return [T.arg(name, T.buffer(shape, dtype)) for name, shape, dtype in found]


class Words:
    """The words of a row of the io buffer `sampling`, by the names of sampling_layout.FIELDS."""

    def __init__(self, buffer, row):
        self.buffer, self.row = buffer, row

    def int(self, name):
        return T.Bind(self.buffer[self.row, FIELDS.index(name)])

    def float(self, name):
        return T.Bind(T.reinterpret("float32", self.buffer[self.row, FIELDS.index(name)]))


class Machine(ABC):
    """What runs the search for one row: a workgroup, or a thread of a CPU.

    threads, tid: how many there are, and which this one is. size: of the list. visits are functions(token, logit,
    inside) that emit code; inside: whether there is such a token.
    """

    threads: int
    tid: Any
    size: int

    @abstractmethod
    def cell(self, value, dtype="int32") -> Cell: ...

    @abstractmethod
    def shared(self, count: int, dtype="int32"): ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def add(self, buffer, index, amount):
        """Adds to an element of a shared buffer, atomically; what it was before, in a register."""

    @abstractmethod
    def exp2(self, x): ...

    @abstractmethod
    def total(self, amount):
        """The sum of an int32 of all threads, in all of them."""

    @abstractmethod
    def each_token(self, visit: Callable, floor=None, near: Callable | None = None, enough: Callable | None = None):
        """Visits all tokens of the row; may leave out those whose logit is below `floor`, those outside of near(), a
        pair of logits, and the rest as soon as enough() holds."""


def put(buffer, value, index):
    T.buffer_store(buffer, value, [index])


class Var:
    """A number in a register that changes."""

    def __init__(self, buffer, value):
        self.buffer = buffer
        self.set(value)

    def get(self):
        return T.Bind(self.buffer[0])

    def set(self, value):
        put(self.buffer, value, 0)


def no(condition):
    return tirx.Not(condition)


def when(condition):
    """`with when(c):` an `if` with a uniform condition, in which there may be barriers."""
    return T.serial(T.Select(condition, T.int32(1), T.int32(0)))


def key_of(x):
    """An int32 that sorts as the float32 x does; the same for 0.0 and -0.0."""
    bits = T.Bind(T.reinterpret("int32", x))
    key = bits ^ (T.shift_right(bits, T.int32(31)) & T.int32(LARGEST))
    return T.Select(x == T.float32(0), T.int32(0), key)


def value_of(key):
    """The float32 of a `key_of`."""
    return T.reinterpret("float32", key ^ (T.shift_right(key, T.int32(31)) & T.int32(LARGEST)))


def unsigned(x):
    """The bits of an int32 as uint32; TVM's analyzer refuses a cast of what may be negative."""
    return T.reinterpret("uint32", x)


def signed(x):
    return T.reinterpret("int32", x)


def high_product(a, b):
    """The upper 32 bits of the product of two uint32, from products of 16 bits."""
    half, mask = T.uint32(16), T.uint32(0xFFFF)
    a1, a0, b1, b0 = (T.Bind(x) for x in (T.shift_right(a, half), a & mask, T.shift_right(b, half), b & mask))
    middle = T.Bind(a1 * b0 + T.shift_right(a0 * b0, half))
    other = T.Bind(a0 * b1 + (middle & mask))
    return T.Bind(a1 * b1 + T.shift_right(middle, half) + T.shift_right(other, half))


def random_word(machine, words):
    """The first word of runtime/philox.py, uint32."""
    c = [machine.cell(unsigned(words.int("position")), "uint32")]
    c += [machine.cell(T.uint32(0), "uint32") for _ in range(3)]
    k = [machine.cell(unsigned(words.int(name)), "uint32") for name in ("seed_low", "seed_high")]
    with T.serial(ROUNDS):
        a, b, d, e = (cell.get() for cell in c)
        first, second = (T.uint32(m) for m in MULTIPLIERS)
        values = (
            high_product(second, d) ^ b ^ k[0].get(), second * d, high_product(first, a) ^ e ^ k[1].get(), first * a,
        )  # fmt: skip
        values = [T.Bind(value) for value in values]
        for cell, value in zip(c, values, strict=True):
            cell.set(value)
        for cell, step in zip(k, WEYL, strict=True):
            cell.set(cell.get() + T.uint32(step))
    return c[0].get()


class Draw:
    """The search in one row. top: its largest logit; z, z_heat: the sums of e**(logit - top), and of that to the power
    of 1 / temperature, of all its tokens; approximate. chosen: cell for the token."""

    def __init__(self, machine: Machine, words: Words, vocab: int, top, z, z_heat, chosen: Cell):
        self.m, self.words, self.vocab, self.top, self.chosen = machine, words, vocab, top, chosen
        self.sums = z, z_heat
        self.top_k, self.top_p, self.heat = words.int("top_k"), words.float("top_p"), words.float("heat")
        self.has_k = T.Bind((self.top_k > 0) & (self.top_k < vocab))
        self.has_p = T.Bind(self.top_p < T.float32(1))
        # the threshold of min-p
        self.least = T.Bind(key_of(T.Bind(self.top + words.float("min_p"))))
        self.has_m = T.Bind(words.float("min_p") > T.float32(LOWEST))
        self.largest = T.Bind(key_of(top))
        cell = machine.cell
        self.threshold, self.last = cell(T.int32(SMALLEST)), cell(T.int32(LARGEST))  # what is left: `_left`
        self.tie = cell(T.int32(0))  # key of the tokens that an odd stage is about
        self.listed, self.count = cell(T.int32(0)), cell(T.int32(0))  # whether there is a list, and of how many
        self.floor = cell(T.int32(SMALLEST))  # key that no token of the list is below
        self.target, self.ties = cell(T.int32(0)), cell(T.int32(0))  # of the next search; whether an odd stage has work
        self.factor, self.scale = cell(T.float32(0), "float32"), cell(T.float32(0), "float32")  # of `_mass`
        self.sum = cell(T.int32(0))  # of the masses of what is left
        self.values = machine.shared(machine.size, "float32")
        self.ids = machine.shared(machine.size)
        self.counter = machine.shared(1)
        self.hist, self.parts = machine.shared(BINS), machine.shared(machine.threads)
        self.groups = machine.shared(self._groups)
        self.found = machine.shared(3)

    # ---- tokens

    def _left(self, token, key):
        """Whether the filters so far leave a token."""
        threshold = self.threshold.get()
        return (key > threshold) | ((key == threshold) & (token <= self.last.get()))

    def _mass(self, value):
        x = T.max((value - self.top) * self.factor.get(), T.float32(-200))
        return T.Bind(T.cast(self.m.exp2(T.Bind(x)) * self.scale.get() + T.float32(0.5), "int32"))

    def _row_mass(self, token, value):
        """`_mass` of a token that is left, where there is no list, after `_add_up`."""
        return self._mass(value)

    def _each(self, visit, near=None):
        """Visits the tokens of the list, or else all; see `each_token`. visits get what makes the token's mass, too."""
        threads, listed, count = self.m.threads, self.listed.get(), self.count.get()
        with T.serial(T.Select(listed > 0, T.truncdiv(count + (threads - 1), T.int32(threads)), T.int32(0))) as i:
            place = T.Bind(i * threads + self.m.tid)
            inside = T.Bind(T.min(place, T.int32(self.m.size - 1)))
            token, value = T.Bind(self.ids[inside]), T.Bind(self.values[inside])
            visit(token, value, place < count, lambda: self._mass(value))
        with when(listed == 0):
            self.m.each_token(
                lambda token, value, inside: visit(token, value, inside, lambda: self._row_mass(token, value)),
                near=near,
            )

    # ---- the stages

    def emit(self):
        """Sets `chosen`."""
        filters = self.has_k | self.has_p | self.has_m
        with T.serial(STAGES) as stage:
            first, odd, draw = T.Bind(stage == 0), T.Bind((stage & 1) == 1), T.Bind(stage == STAGES - 1)
            with when(draw & self.has_m & (self.least > self.threshold.get())):
                self.threshold.set(self.least)
                self.last.set(T.int32(LARGEST))
            fits = no(self.has_k & (self.top_k > self.m.size))
            windows = T.Select(self.has_k | self.has_p, T.int32(WINDOWS), T.int32(1))
            tries = T.Select(first, T.Select(filters & fits, windows, T.int32(0)), T.cast(no(odd), "int32"))
            tries = T.Select((stage == 2) & no(self.has_p), T.int32(0), tries)
            self._gather(first, draw, T.Bind(tries), filters)
            active = T.Select(first, self.has_k, T.Select(draw, T.bool(True), self.has_p))
            active = T.Bind(T.Select(odd, self.ties.get() > 0, active))
            with when(active & no(odd)):
                self.target.set(T.Select(first, self.top_k, self._mass_wanted()))
            with when(active & draw):
                point = high_product(random_word(self.m, self.words), T.Bind(unsigned(self.sum.get())))
                self.target.set(signed(point) + 1)
            with when(active):
                self._search(stage, odd, draw)

    def _mass_wanted(self):
        """By top-p, of `sum`, or of MASS if there is a list of the row's tokens."""
        all_of = T.Select((self.listed.get() > 0) & no(self.has_k), T.float32(MASS), T.cast(self.sum.get(), "float32"))
        return T.max(T.cast(T.ceil(self.top_p * all_of), "int32"), T.int32(1))

    def _gather(self, first, draw, tries, filters):
        """Makes a list if there is none and one may fit; sets `sum`."""
        low, high = self.m.cell(T.float32(0), "float32"), self.m.cell(T.float32(0), "float32")
        width = self.m.cell(T.float32(FIRST_WINDOW), "float32")
        with T.serial(tries):
            old = self.listed.get()
            makes = T.Bind((old == 0) & T.Select(first, T.bool(True), T.Select(draw, filters, self.has_k)))
            with when(makes):
                near = T.Select(self.has_k | self.has_p, key_of(T.Bind(self.top - width.get())), self.least)
                self._list(T.Bind(T.Select(first, near, T.int32(SMALLEST))))
                count = self.count.get()
                enough = no(first & self.has_k) | (count >= self.top_k)
                self.listed.set(T.cast((count <= self.m.size) & enough, "int32"))
            # what is left has no more mass than tokens, as the largest one has the mass 1
            tokens = T.Select(draw, T.Select(self.listed.get() > 0, self.count.get(), T.int32(LARGEST)), self.top_k)
            few = T.Select(draw | self.has_k, T.cast(tokens, "float32"), T.float32(-LOWEST))
            self.factor.set(T.Select(draw, self.heat, T.float32(LOG2E)))
            self.scale.set(T.float32(MASS) / T.min(T.Select(draw, self.sums[1], self.sums[0]), few))
            checks = T.Bind(first & makes & self.has_p & no(self.has_k) & (self.listed.get() > 0))
            with when(no(first) | checks):
                self._add_up()
            with when(checks):
                self.listed.set(T.cast(self.sum.get() >= self._mass_wanted(), "int32"))
            with when(first & (self.listed.get() == 0)):
                with when(self.count.get() > self.m.size):
                    high.set(width.get())
                with when(self.count.get() <= self.m.size):
                    low.set(width.get())
                between = (low.get() + high.get()) * T.float32(0.5)
                width.set(T.Select(high.get() > T.float32(0), between, width.get() * T.float32(2)))

    def _list(self, bound):
        """Lists what is left, of keys from `bound` on; `count` may exceed what fits."""
        m = self.m
        with T.If(m.tid == 0), T.Then():
            put(self.counter, T.int32(0), 0)
        m.barrier()

        def visit(token, value, inside):
            key = T.Bind(key_of(value))
            with T.If(inside & (key >= bound) & self._left(token, key)), T.Then():
                place = m.add(self.counter, 0, T.int32(1))
                with T.If(place < m.size), T.Then():
                    put(self.values, value, place)
                    put(self.ids, token, place)

        m.each_token(
            visit, T.Bind(value_of(T.max(bound, self.threshold.get()))), enough=lambda: self.counter[0] > m.size
        )
        m.barrier()
        self.count.set(self.counter[0])
        self.floor.set(bound)
        m.barrier()

    def _add_up(self):
        mine = self.m.cell(T.int32(0))

        def visit(token, value, inside, mass):
            with T.If(inside & self._left(token, T.Bind(key_of(value)))), T.Then():
                mine.set(mine.get() + mass())

        self._each(visit)
        self.sum.set(self.m.total(mine.get()))

    # ---- the search for one number

    def _search(self, stage, odd, draw):
        """Of the tokens that are left (odd stages: of those at `tie`), the largest key, or in odd stages and the draw
        the smallest id, with which the target is reached."""
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
            with T.serial(BINS // m.threads) as j:
                put(self.hist, T.int32(0), j * m.threads + m.tid)
            m.barrier()

            def visit(token, value, inside, mass, i=i, shift=shift, upper=upper, known=known):
                key = T.Bind(key_of(value))
                number = T.Select(by_id, unsigned(self.vocab - 1 - token), unsigned(key) - start)
                number = T.Bind(number)
                here = inside & ((i == 0) | (T.shift_right(number, upper) == known))
                here = here & (no(odd) | (key == tie)) & self._left(token, key)
                with T.If(here), T.Then():
                    place = T.Bind(signed(T.shift_right(number, shift) & T.uint32(BINS - 1)))
                    m.add(self.hist, place, T.Select(stage < 2, T.int32(1), mass()))

            self._each(visit, lambda: self._near(i, odd, draw, upper, known, start, reach, tie))
            m.barrier()
            self._find()
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

    def _near(self, i, odd, draw, upper, known, start, reach, tie):
        """(least, largest logit) of the tokens that pass i of a search is about."""
        first = T.Bind(T.shift_left(known, upper))
        last = T.Bind(T.min(first + (T.shift_left(T.uint32(1), upper) - T.uint32(1)), reach))
        low, high = (T.Bind(T.max(signed(start + number), T.int32(LOWEST_KEY))) for number in (first, last))
        every = T.Bind((i == 0) | draw)
        low = T.Select(odd, tie, T.Select(every, T.int32(LOWEST_KEY), low))
        high = T.Select(odd, tie, T.Select(every, self.largest, high))
        return T.Bind(value_of(T.Bind(low))), T.Bind(value_of(T.Bind(high)))

    @property
    def _groups(self):
        return max(self.m.threads // 16, 1)

    def _find(self):
        """found = (the largest bin with which those from it on reach the target, the sum of those above, its own). Sums
        of neighbouring threads' bins lead there. A target above all is lowered: it was computed with rounding."""
        m, each = self.m, BINS // self.m.threads
        members = m.threads // self._groups
        mine = m.cell(T.int32(0))
        with T.serial(each) as j:
            mine.set(mine.get() + self.hist[m.tid * each + j])
        put(self.parts, mine.get(), m.tid)
        m.barrier()
        with T.If(m.tid < self._groups), T.Then():
            whole = m.cell(T.int32(0))
            with T.serial(members) as j:
                whole.set(whole.get() + self.parts[m.tid * members + j])
            put(self.groups, whole.get(), m.tid)
        m.barrier()
        above, everything = m.cell(T.int32(0)), m.cell(T.int32(0))
        group = T.Bind(T.truncdiv(m.tid, T.int32(members)))
        with T.serial(self._groups) as j:
            here = T.Bind(self.groups[j])
            everything.set(everything.get() + here)
            above.set(above.get() + T.Select(j > group, here, T.int32(0)))
        with T.serial(members) as j:
            other = T.Bind(group * members + j)
            above.set(above.get() + T.Select(other > m.tid, self.parts[other], T.int32(0)))
        self.target.set(T.min(self.target.get(), everything.get()))
        target = self.target.get()
        with T.If((above.get() < target) & (target <= above.get() + mine.get())), T.Then(), T.serial(each) as j:
            place = T.Bind(m.tid * each + (each - 1 - j))
            here, before = T.Bind(self.hist[place]), above.get()
            with T.If((before < target) & (target <= before + here)), T.Then():
                for index, value in enumerate((place, before, here)):
                    put(self.found, value, index)
            above.set(before + here)
        m.barrier()
