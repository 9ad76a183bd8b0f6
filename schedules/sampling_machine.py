"""Building blocks of the draw of a token (sampling.py) on all targets: the parameters of a row (`Words`), variables,
histograms, integer keys in the order of logits, and random numbers. And `Machine`, the interface to what differs
between targets. runtime/sampling/layout.py defines the words and flags of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.sampling.layout import FIELDS, row_shapes
from mlc_amd.runtime.sampling.philox import MULTIPLIERS, ROUNDS, WEYL
from mlc_amd.schedules.operators import Sample
from mlc_amd.schedules.tir import Buffer, Expr, Frame

RADIX = 10  # bits of a number for which a histogram has bins
BINS = 1 << RADIX
LOWEST = -3.0e38  # logit of tokens that must not be chosen
LARGEST = (1 << 31) - 1  # of int32
SMALLEST = -(1 << 31)
LOWEST_KEY = -0x7F800000  # lower bound of `key_of` finite float32
Visit = Callable[[Expr, Expr, Expr], None]  # visit(token, logit, whether the token exists)
Asked = Callable[[], Any] | None  # the arguments `near` and `enough` of `Machine.each_token`


class SampleArgs(NamedTuple):
    """The parameters of a kernel that samples, after `state`."""

    logits: Buffer
    words: Buffer
    changes: Buffer
    allowed: Buffer
    sampled: Buffer
    logprobs: Buffer
    adjusted: Buffer


def sample_args(op: Sample) -> SampleArgs:
    """Declares Logits float32 [m, columns], sampling, changes and allowed (`row_shapes` of runtime/sampling/layout.py),
    Sampled int32 [m], LogProbs float32 [m], Adjusted float32 [m, columns]."""
    n, columns = op.m, op.columns
    inputs = [(name, shape, "int32") for name, shape in row_shapes(n, columns).items()]
    outputs = [("Sampled", (n,), "int32"), ("LogProbs", (n,), "float32"), ("Adjusted", (n, columns), "float32")]
    found = [("Logits", (n, columns), "float32"), *inputs, *outputs]
    return SampleArgs(*(T.arg(name, T.buffer(shape, dtype)) for name, shape, dtype in found))


class Words:
    """The words of a row of the parameter `sampling`, by the names in FIELDS of runtime/sampling/layout.py."""

    def __init__(self, buffer: Buffer, row: Expr):
        self.buffer, self.row = buffer, row

    def int(self, name: str) -> Expr:
        return T.Bind(self.buffer[self.row, FIELDS.index(name)])

    def float(self, name: str) -> Expr:
        return T.Bind(T.reinterpret("float32", self.buffer[self.row, FIELDS.index(name)]))


class Machine(ABC):
    """The threads that draw the token of one row: a workgroup of a GPU, or one thread of a CPU. The methods that are
    not abstract are for one thread."""

    vocab: int  # number of tokens
    threads: int  # number of threads
    tid: Expr  # number of this thread
    size: int  # capacity of the list, in tokens
    small: int  # largest number of tokens of a short list, in which each token is compared with all others
    pieces: "Pieces | None" = None  # the largest logits of pieces of the row, if they are known

    @abstractmethod
    def cell(self, value: Expr, dtype: str = "int32") -> "Var":
        """A variable of each thread, with this value."""

    @abstractmethod
    def shared(self, count: int, dtype: str = "int32") -> Buffer:
        """A buffer that all threads share."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all threads."""

    def add(self, buffer: Buffer, index: Expr, amount: Expr) -> Expr:
        """Adds to an element of a shared buffer, atomically. Returns its previous value, in a register."""
        before = T.Bind(buffer[index])
        put(buffer, before + amount, index)
        return before

    @abstractmethod
    def exp2(self, x: Expr) -> Expr:
        """2**x for x <= 0."""

    def reduced(self, amount: Expr, how: str) -> Expr:
        """The sum (how = "sum") or the minimum ("least") of the threads' int32 `amount`; all threads get it."""
        return amount

    def scan(self, amount: Expr) -> tuple[Expr, Expr]:
        """(the sum of the int32 `amount` of the threads before this one, the sum of all threads). The caller must
        execute a barrier before the next scan."""
        return T.int32(0), amount

    @abstractmethod
    def each_token(
        self, visit: Visit, floor: Expr = None, near: Asked = None, enough: Asked = None, scratch: Buffer = None
    ) -> None:
        """Visits the tokens of the row. It may leave out tokens whose logit is below `floor` or outside of near(), a
        pair (smallest, largest) of logits, and all further tokens once enough() is true. scratch: only with `floor`: a
        shared int32 buffer with an element for each piece, which nothing else may use meanwhile. The caller must have
        called `Pieces.clear`, and then a barrier."""


class Pieces(ABC):
    """Parts of a row whose largest logits are known. count: number of pieces."""

    count: int

    @abstractmethod
    def top(self, piece: Expr) -> Expr:
        """The largest logit of a piece, in a register; LOWEST if it has no tokens."""

    @abstractmethod
    def clear(self) -> None:
        """Empties the set of pieces that `Machine.each_token` has selected. One thread must call it."""


def put(buffer: Buffer, value: Expr, index: Expr) -> None:
    """buffer[index] = value."""
    T.buffer_store(buffer, value, [index])


class Var:
    """A variable, in a buffer of one element."""

    def __init__(self, buffer: Buffer, value: Expr):
        self.buffer = buffer
        self.set(value)

    def get(self) -> Expr:
        return T.Bind(self.buffer[0])

    def set(self, value: Expr) -> None:
        put(self.buffer, value, 0)


def repeat(count: int, body: Callable[[Expr], None], most: int = 4) -> None:
    """Emits body(0), .., body(count - 1): unrolled if count <= most, otherwise as a loop."""
    if count <= most:
        for i in range(count):
            body(i)
        return
    with T.serial(count) as i:
        body(i)


class Histogram:
    """A histogram of counts or masses, in the shared buffer `bins`, which has at least `size` elements. target: see
    `find`."""

    def __init__(self, machine: Machine, size: int):
        self.m, self.bins, self.found = machine, machine.shared(max(BINS, size)), machine.shared(3)
        self.target = machine.cell(T.int32(0))

    def clear(self) -> None:
        repeat(BINS // self.m.threads, lambda j: put(self.bins, T.int32(0), j * self.m.threads + self.m.tid))
        self.m.barrier()

    def find(self) -> Expr:
        """Finds the largest bin such that the sum of it and all higher bins is at least `target`. Stores to `found`:
        (number of the bin, sum of the higher bins, value of the bin). Returns the sum of all bins. If the target is
        larger than this sum, because of rounding, it is set to the sum."""
        m, each = self.m, BINS // self.m.threads
        mine = m.cell(T.int32(0))
        repeat(each, lambda j: mine.set(mine.get() + self.bins[m.tid * each + j]))
        before, everything = m.scan(mine.get())
        above = m.cell(everything - before - mine.get())
        self.target.set(T.min(self.target.get(), everything))
        target = self.target.get()

        def look(j: Expr) -> None:
            place = T.Bind(m.tid * each + (each - 1 - j))
            here, higher = T.Bind(self.bins[place]), above.get()
            with T.If((higher < target) & (target <= higher + here)), T.Then():
                for index, value in enumerate((place, higher, here)):
                    put(self.found, value, index)
            above.set(higher + here)

        with T.If((above.get() < target) & (target <= above.get() + mine.get())), T.Then():
            repeat(each, look)
        m.barrier()
        return everything


def no(condition: Expr) -> Expr:
    return tirx.Not(condition)


def when(condition: Expr) -> Frame:
    """`with when(c):` emits an `if` whose condition is uniform, so that its body may have barriers."""
    return T.serial(T.Select(condition, T.int32(1), T.int32(0)))


def key_of(x: Expr) -> Expr:
    """An int32 key: keys have the order of the float32 numbers x; 0.0 and -0.0 have the same key."""
    bits = T.Bind(T.reinterpret("int32", x))
    key = bits ^ (T.shift_right(bits, T.int32(31)) & T.int32(LARGEST))
    return T.Select(x == T.float32(0), T.int32(0), key)


def value_of(key: Expr) -> Expr:
    """The float32 number whose `key_of` is `key`."""
    return T.reinterpret("float32", key ^ (T.shift_right(key, T.int32(31)) & T.int32(LARGEST)))


def unsigned(x: Expr) -> Expr:
    """The bits of an int32 as uint32. TVM's analyzer refuses a cast of a value that may be negative."""
    return T.reinterpret("uint32", x)


def signed(x: Expr) -> Expr:
    return T.reinterpret("int32", x)


def high_product(a: Expr, b: Expr) -> Expr:
    """The upper 32 bits of the product of two uint32, from products of 16 bits."""
    half, mask = T.uint32(16), T.uint32(0xFFFF)
    a1, a0, b1, b0 = (T.Bind(x) for x in (T.shift_right(a, half), a & mask, T.shift_right(b, half), b & mask))
    middle = T.Bind(a1 * b0 + T.shift_right(a0 * b0, half))
    other = T.Bind(a0 * b1 + (middle & mask))
    return T.Bind(a1 * b1 + T.shift_right(middle, half) + T.shift_right(other, half))


def random_word(machine: Machine, words: Words) -> Expr:
    """The random number of the row, uint32: the first word of runtime/sampling/philox.py for its seed and position."""
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


def drawn_number(machine: Machine, words: Words, most: Expr) -> Expr:
    """A random int32 from 1 to `most`. most: int32."""
    return signed(high_product(random_word(machine, words), T.Bind(unsigned(most)))) + 1
