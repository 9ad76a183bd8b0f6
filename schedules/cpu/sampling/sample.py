"""The kernel of `Sample` on the CPU: it chooses a token for each row of logits. A task is a row.

In: logits float32 [n, columns], of which the first `vocab` are tokens, and the buffers of runtime/sampling/layout.py.
Out: token ids, and the logarithms of their probabilities according to the unchanged logits. A row with a logit that is
NaN or infinite gets the id -1. A row without a draw is read twice, for the largest logit and for its token; the second
time from the CPU's cache.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.sampling.layout import ADJUST, DRAW, LOGPROB, MASK, RECENT, TOKEN
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, exp2, f32, i32, local, reduce, registers, splat, store
from mlc_amd.schedules.operators import Sample
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.sampling import Draw
from mlc_amd.schedules.sampling_machine import (
    LARGEST,
    LOWEST,
    Asked,
    Machine,
    SampleArgs,
    Var,
    Visit,
    Words,
    no,
    sample_args,
    when,
)
from mlc_amd.schedules.tir import Buffer, Expr

UNROLL = 4  # vectors in a step, with independent results, to hide the latency of additions and comparisons
LIST, SHORT = 2048, 64  # `size` and `small` of Machine
BLOCK = LANES * UNROLL  # tokens in a step
INFINITE = 0x7F800000  # the bits of an infinite float32


class Thread(Machine):
    """The Machine for a row of Adjusted: one CPU thread."""

    threads, tid, size, small = 1, 0, LIST, SHORT

    def __init__(self, adjusted: Buffer, row: Expr, vocab: int):
        self.adjusted, self.row, self.vocab = adjusted, row, vocab

    def cell(self, value: Expr, dtype: str = "int32") -> Var:
        return Var(registers(1, kind=dtype), value)

    def shared(self, count: int, dtype: str = "int32") -> Buffer:
        return local(count, dtype=dtype)

    def barrier(self) -> None:
        """Does nothing, because there is one thread."""

    def exp2(self, x: Expr) -> Expr:
        return exp2(x, 1)

    def each_token(
        self, visit: Visit, floor: Expr = None, near: Asked = None, enough: Asked = None, scratch: Buffer = None
    ) -> None:
        if near is None:
            high = None if floor is None else T.float32(-LOWEST)
            low = floor
        else:
            # In buffers, because TVM's simplifier would replace each use of bound values by their expressions.
            low, high = (Var(registers(1), bound).get() for bound in near())
        step = LANES * UNROLL
        vectors = min(UNROLL, int(self.adjusted.shape[1]) // LANES)
        with T.serial(-(-self.vocab // step)) as i:
            if low is not None:
                # If one of `step` tokens is in range, all of them are visited. The vectors of the last step may overlap
                # with those before, so as not to exceed the row.
                first = T.Bind(T.min(i * step, T.int32(max(int(self.adjusted.shape[1]) - step, 0))))
                found = f32(LOWEST)
                for j in range(vectors):
                    x = T.Bind(self.adjusted[self.row, at(first + j * LANES)])
                    found = T.Bind(T.max(found, T.Select(x <= splat(high), x, f32(LOWEST))))
                any_ = reduce("fmax", found) >= low
                counts = any_ if enough is None else any_ & no(enough())
            else:
                counts = T.bool(True)
            with T.If(counts), T.Then(), T.serial(step) as j:
                token = T.Bind(i * step + j)
                with T.If(token < self.vocab), T.Then():
                    visit(token, T.Bind(self.adjusted[self.row, token]), T.bool(True))


class RowDraw(Draw):
    """A Draw which, without a list, stores the masses of the whole row once for each stage. The draw then searches
    their sums by blocks, and the masses of one block."""

    m: Thread

    def __init__(self, *args: Any):
        super().__init__(*args)
        columns = int(self.m.adjusted.shape[1])
        self.masses = local(columns, dtype="int32")
        self.blocks = local(-(-columns // BLOCK), dtype="int32")  # sums of BLOCK masses each

    def _row_mass(self, token: Expr, value: Expr) -> Expr:
        return T.Bind(self.masses[token])

    def _add_up_row(self, mine: Var) -> None:
        """Also stores the masses of the row's tokens, 0 for those that filters have removed, and the sums of blocks."""
        vocab = self.m.vocab
        threshold, last = splat(self.threshold.get()), splat(self.last.get())
        factor, scale, top = splat(self.factor.get()), splat(self.scale.get()), splat(self.top)

        def weigh(first: Expr, count: int | None) -> Expr:
            x = T.Bind(self.m.adjusted[self.m.row, at(first)])
            bits = T.Bind(T.reinterpret(f"int32x{LANES}", x))
            key = bits ^ (T.shift_right(bits, i32(31)) & i32(LARGEST))
            key = T.Bind(T.Select(x == f32(0.0), i32(0), key))
            power = exp2(T.Bind(T.max((x - top) * factor, f32(-200.0))))
            mass = T.Bind(T.cast(power * scale + f32(0.5), f"int32x{LANES}"))
            tie = T.Select(
                key == threshold, T.Select(T.Cast(f"int32x{LANES}", at(first)) <= last, mass, i32(0)), i32(0)
            )
            mass = T.Bind(_inside(count, T.Select(key > threshold, mass, tie), i32(0)))
            store(self.masses, mass, at(first))
            return mass

        def block(first: Expr, i: Expr, counts: Sequence[int | None]) -> None:
            found = [weigh(T.Bind(first + j * LANES), count) for j, count in enumerate(counts)]
            whole = reduce("add", T.Bind(functools.reduce(operator.add, found)))
            store(self.blocks, whole, i)
            mine.set(mine.get() + whole)

        with T.serial(vocab // BLOCK) as i:
            block(T.Bind(i * BLOCK), i, [None] * (BLOCK // LANES))
        if rest := vocab % BLOCK:
            counts = [min(rest - first, LANES) for first in range(0, rest, LANES)]
            block(T.int32(vocab - rest), T.int32(vocab // BLOCK), counts)

    def _draw_row(self) -> None:
        """Chooses the first token with which the running sum of the masses reaches the target."""
        before, blocks = self._passed(T.int32(0), T.int32(-(-self.m.vocab // BLOCK)), self.blocks, T.int32(0))
        first = T.Bind(T.min(blocks, T.int32((self.m.vocab - 1) // BLOCK)) * BLOCK)
        inside = T.Bind(T.min(T.int32(self.m.vocab) - first, T.int32(BLOCK)))
        _, tokens = self._passed(first, inside, self.masses, before)
        self.chosen.set(T.min(first + tokens, T.int32(self.m.vocab - 1)))

    def _passed(self, first: Expr, count: Expr, sums: Buffer, before: Expr) -> tuple[Expr, Expr]:
        """Adds the elements of `sums` from `first` on to `before` while the result is less than the target. Returns
        (result, number of added elements). count: number of elements."""
        target, passed, entries = self.target.get(), self.m.cell(before), self.m.cell(T.int32(0))
        running = self.m.cell(before)
        with T.serial(count) as i:
            running.set(running.get() + sums[first + i])
            short = T.Bind(running.get() < target)
            passed.set(T.Select(short, running.get(), passed.get()))
            entries.set(entries.get() + T.Select(short, T.int32(1), T.int32(0)))
        return passed.get(), entries.get()


@registry.builds(Sample)
def sample(op: Sample, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state, Logits float32 [m, columns], sampling, changes, allowed, Sampled int32 [m], LogProbs float32 [m],
    Adjusted float32 [m, columns]). LogProbs is 0 unless the row's flags have LOGPROB. Adjusted is workspace."""
    with kernel(name) as (builder, state):
        args = sample_args(op)
        with row_loop(state, op.m) as row:
            _choose(args, op.vocab, row)
    return builder.get()


def _choose(args: SampleArgs, vocab: int, row: Expr) -> None:
    words, Logits, Adjusted = Words(args.words, row), args.logits, args.adjusted
    flags = words.int("flags")
    top, bad = _largest(Logits, row, vocab)
    chosen, highest = Var(registers(1, kind="int32"), _first(Logits, row, vocab, top)), Var(registers(1), top)
    with when((bad == 0) & ((flags & (ADJUST | DRAW)) > 0)):
        _copy(Logits, Adjusted, row, vocab)
    with when((bad == 0) & ((flags & ADJUST) > 0)):
        _adjust(args, vocab, row, flags)
        highest.set(_largest(Adjusted, row, vocab)[0])
        chosen.set(_first(Adjusted, row, vocab, highest.get()))
    with when((bad == 0) & ((flags & DRAW) > 0)):
        changed_top = highest.get()
        heats = T.float32(LOG2E), words.float("heat")
        z, z_heat = (_sum(Adjusted, row, vocab, changed_top, heat) for heat in heats)
        RowDraw(Thread(Adjusted, row, vocab), words, changed_top, (z, z_heat), chosen).emit()
    probability = Var(registers(1), T.float32(0))
    with when((bad == 0) & ((flags & LOGPROB) > 0)):
        total = _sum(Logits, row, vocab, top, T.float32(LOG2E))
        probability.set(Logits[row, chosen.get()] - top - T.log(total))
    store(args.sampled, T.Select(bad > 0, T.int32(-1), chosen.get()), row)
    store(args.logprobs, probability.get(), row)


def _vectors(vocab: int, accumulators: Sequence, step: Callable[[Any, Expr, int | None], None]) -> None:
    """Calls step(accumulator, first column, number of lanes with tokens or None for all) for all vectors of a row, with
    UNROLL vectors in a step of the loop."""
    whole = vocab // (LANES * UNROLL)
    with T.serial(whole) as i:
        for j in range(UNROLL):
            step(accumulators[j], T.Bind((i * UNROLL + j) * LANES), None)
    for j, first in enumerate(range(whole * LANES * UNROLL, vocab, LANES)):
        step(accumulators[j], first, min(vocab - first, LANES))


def _inside(count: int | None, x: Expr, otherwise: Expr) -> Expr:
    """x in the first `count` lanes (None: in all), `otherwise` in the others."""
    if count in (None, LANES):
        return x
    return T.Select(T.Cast(f"int32x{LANES}", at(0)) < i32(count), x, otherwise)


def _accumulators(value: Expr, kind: str = "float32") -> list[Buffer]:
    buffers = [registers(LANES, kind=kind) for _ in range(UNROLL)]
    for buffer in buffers:
        store(buffer, value, at(0))
    return buffers


def _joined(join: Callable[[Expr, Expr], Expr], buffers: list[Buffer]) -> Expr:
    return T.Bind(functools.reduce(join, [buffer[at(0)] for buffer in buffers]))


def _largest(buffer: Buffer, row: Expr, vocab: int) -> tuple[Expr, Expr]:
    """(the largest logit; int32 1 if any logit is NaN or infinite, else 0)."""
    tops, sizes = _accumulators(f32(LOWEST)), _accumulators(i32(0), "int32")
    pairs = list(zip(tops, sizes, strict=True))

    def step(of, first, count):
        x = T.Bind(_inside(count, buffer[row, at(first)], f32(LOWEST)))
        top, size = of
        store(top, T.max(top[at(0)], x), at(0))
        bits = T.reinterpret(f"int32x{LANES}", x) & i32(LARGEST)
        store(size, T.max(size[at(0)], bits), at(0))

    _vectors(vocab, pairs, step)
    size = reduce("smax", _joined(T.max, sizes))
    return reduce("fmax", _joined(T.max, tops)), T.Bind(T.Select(size >= INFINITE, T.int32(1), T.int32(0)))


def _first(buffer: Buffer, row: Expr, vocab: int, value: Expr) -> Expr:
    """The first token whose logit is `value`."""
    places = _accumulators(i32(LARGEST), "int32")

    def step(place, first, count):
        index = T.Cast(f"int32x{LANES}", at(first))
        found = T.Select(buffer[row, at(first)] == splat(value), index, i32(LARGEST))
        store(place, T.min(place[at(0)], _inside(count, found, i32(LARGEST))), at(0))

    _vectors(vocab, places, step)
    return reduce("smin", _joined(T.min, places))


def _sum(buffer: Buffer, row: Expr, vocab: int, top: Expr, heat: Expr) -> Expr:
    """The sum over the row's tokens of 2**((logit - top) * heat)."""
    totals = _accumulators(f32(0.0))

    def step(total, first, count):
        power = T.Bind(exp2(T.Bind((buffer[row, at(first)] - splat(top)) * splat(heat))))
        store(total, total[at(0)] + _inside(count, power, f32(0.0)), at(0))

    _vectors(vocab, totals, step)
    return reduce("fadd", _joined(operator.add, totals))


def _copy(logits: Buffer, adjusted: Buffer, row: Expr, vocab: int) -> None:
    """Copies the row's logits, with LOWEST as padding."""

    def step(_, first, count):
        store(adjusted, _inside(count, logits[row, at(first)], f32(LOWEST)), row, at(first))

    _vectors(vocab, [None] * UNROLL, step)


def _adjust(args: SampleArgs, vocab: int, row: Expr, flags: Expr) -> None:
    """Applies the row's changes and its mask of allowed tokens to Adjusted."""
    words, adjusted = Words(args.words, row), args.adjusted
    penalty, inverse = words.float("penalty"), words.float("inverse")
    with T.serial(words.int("changes")) as i:
        change, added = T.Bind(args.changes[row, i, 0]), T.Bind(T.reinterpret("float32", args.changes[row, i, 1]))
        token = T.Bind(change & T.int32(TOKEN))
        value = T.Bind(adjusted[row, token])
        changed = value * T.Select(value > T.float32(0), inverse, penalty)
        store(adjusted, T.Select((change & T.int32(RECENT)) > 0, changed, value) + added, row, token)
    with when((flags & MASK) > 0), T.serial(-(-vocab // LANES)) as i:
        bits = T.Bind(T.shift_right(args.allowed[row, T.truncdiv(i, T.int32(2))], T.truncmod(i, T.int32(2)) * LANES))
        lanes = T.shift_right(splat(bits), T.Cast(f"int32x{LANES}", at(0))) & i32(1)
        columns = at(i * LANES)
        store(adjusted, T.Select(lanes > i32(0), adjusted[row, columns], f32(LOWEST)), row, columns)
