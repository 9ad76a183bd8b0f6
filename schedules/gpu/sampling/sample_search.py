"""The draw of a token (schedules/sampling.py) by a workgroup: `Workgroup`, the Machine for GPUs, and `RowDraw`, the
draw from whole rows.
"""

import functools
from collections.abc import Callable

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier, exp2, maximum, wave_sum
from mlc_amd.schedules.gpu.base.group import Group
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, lane_of, local, opaque, put
from mlc_amd.schedules.sampling import Draw
from mlc_amd.schedules.sampling_machine import (
    BINS,
    LOWEST_KEY,
    Asked,
    Machine,
    Pieces,
    Var,
    Visit,
    no,
    repeat,
    value_of,
    when,
)
from mlc_amd.schedules.tir import Buffer, Expr

WIDTH = 4  # logits in a load of a thread
STEPS = 2  # loads of a thread in the first launch
# Loads that a thread issues together when it searches a row. SMALL_BATCH, for archs with an unknown number of
# registers, is also less code.
BATCH, SMALL_BATCH = 8, 2
LIST = 2048  # `Machine.size`; half as much for archs with less than 32 KiB of LDS
SHORT = 256  # `Machine.small`


def team_of(arch: Device) -> int:
    """The number of threads of a team, which reads a piece; a power of two."""
    return max(arch.wave, 32)


def batch_of(arch: Device) -> int:
    return BATCH if arch.registers else SMALL_BATCH


class TopOfPieces(Pieces):
    """The largest logits of pieces of a row, which the first launch stores. A piece is what a team of threads reads in
    the first launch, STEPS vectors for each thread."""

    def __init__(self, arch: Device, tops: Buffer, row: Expr):
        self.tops, self.row, self.count = tops, row, int(tops.shape[1])
        self.team, self.threads = team_of(arch), arch.threads
        self.chosen = T.alloc_buffer((1,), "int32", scope="shared")  # the number of selected pieces

    def top(self, piece: Expr) -> Expr:
        return T.Bind(self.tops[self.row, piece])

    def clear(self) -> None:
        put(self.chosen, T.int32(0), 0)

    def columns(self, piece: Expr, thread: Expr) -> list[Expr]:
        """The first columns of the vectors of a piece that belong to a thread of a team."""
        teams = T.int32(self.threads // self.team)
        part, team = T.truncdiv(piece, teams), T.truncmod(piece, teams)
        first = T.Bind((part * (self.threads * STEPS) + team * self.team + thread) * WIDTH)
        return [first + i * self.threads * WIDTH for i in range(STEPS)]


class Workgroup(Machine):
    """The Machine for a row of Adjusted: a workgroup."""

    pieces: TopOfPieces

    def __init__(self, arch: Device, group: Group, adjusted: Buffer, tops: Buffer, row: Expr, vocab: int):
        self.arch, self.group, self.tid, self.threads = arch, group, group.tid, group.threads
        self.adjusted, self.row, self.vocab, self.columns = adjusted, row, vocab, int(adjusted.shape[1])
        self.pieces = TopOfPieces(arch, tops, row)
        self.size, self.small = (LIST if arch.lds >= 32 * 1024 else LIST // 2), SHORT

    def cell(self, value: Expr, dtype: str = "int32") -> Var:
        return Var(local(1, dtype), value)

    def shared(self, count: int, dtype: str = "int32") -> Buffer:
        return T.alloc_buffer((count,), dtype, scope="shared")

    def barrier(self) -> None:
        barrier()

    def add(self, buffer: Buffer, index: Expr, amount: Expr) -> Expr:
        return T.Bind(T.call_intrin("int32", "tirx.atomic_add", T.address_of(buffer[index]), amount))

    def exp2(self, x: Expr) -> Expr:
        return exp2(maximum(x, T.float32(-200)))

    def reduced(self, amount: Expr, how: str) -> Expr:
        (found,) = self.group.reduce((amount, how))
        barrier()
        return found

    def scan(self, amount: Expr) -> tuple[Expr, Expr]:
        return self.group.scan(amount)

    def load(self, column: Expr) -> Expr:
        """Loads WIDTH logits, from `column` on. After the end of the row they have any values."""
        return T.Bind(self.adjusted[self.row, at(T.Bind(T.min(column, T.int32(self.columns - WIDTH))), WIDTH)])

    def each_token(
        self, visit: Visit, floor: Expr = None, near: Asked = None, enough: Asked = None, scratch: Buffer = None
    ) -> None:
        if floor is not None and enough is not None:
            self._each_above(visit, floor, enough, scratch)
            return
        batch, width = 2, self.threads * WIDTH
        with T.serial(-(-self.vocab // (width * batch))) as step:
            first = opaque(step * (width * batch) + self.tid * WIDTH)  # TVM unrolls loops that store nothing
            columns = [T.Bind(first + i * width) for i in range(batch)]
            for column, values in [(column, self.load(column)) for column in columns]:
                for k, value in enumerate(self.lanes(values)):
                    visit(T.Bind(column + k), value, column + k < self.vocab)

    def lanes(self, values: Expr) -> list[Expr]:
        return [T.Bind(lane_of(values, k)) for k in range(WIDTH)]

    def _each_above(self, visit: Visit, floor: Expr, enough: Callable[[], Expr], chosen: Buffer) -> None:
        """`each_token` with `floor`: selects the pieces whose largest logit is at least `floor`, and stores their
        numbers to `chosen`. The teams divide the selected pieces."""
        pieces = self.pieces
        for i in range(-(-pieces.count // self.threads)):
            piece = T.Bind(i * self.threads + self.tid)
            top = pieces.top(T.Bind(T.min(piece, T.int32(pieces.count - 1))))
            with T.If((piece < pieces.count) & (top >= floor)), T.Then():
                put(chosen, piece, self.add(pieces.chosen, 0, T.int32(1)))
        barrier()
        count = T.Bind(pieces.chosen[0])
        team, thread = (T.Bind(op(self.tid, T.int32(pieces.team))) for op in (T.truncdiv, T.truncmod))
        batch, teams = batch_of(self.arch) // STEPS, self.threads // pieces.team
        at_once = batch * teams
        with T.serial(T.truncdiv(count + (at_once - 1), T.int32(at_once))) as step, T.If(no(enough())), T.Then():
            loaded = []
            for i in range(batch):
                index = T.Bind((step * batch + i) * teams + team)
                piece = T.Bind(chosen[T.max(T.min(index, count - 1), T.int32(0))])
                loaded += [(index, column, self.load(column)) for column in pieces.columns(piece, thread)]
            for index, column, values in loaded:
                lanes = self.lanes(values)
                counts = T.Bind((index < count) & (functools.reduce(maximum, lanes) >= floor))
                with T.If(counts), T.Then(), T.serial(WIDTH) as k:  # not unrolled, as few vectors get here
                    value = lanes[0]
                    for i, lane in enumerate(lanes[1:]):
                        value = T.Select(k > i, lane, value)
                    visit(T.Bind(column + k), T.Bind(value), column + k < self.vocab)


class RowDraw(Draw):
    """A Draw which, without a list, adds up the masses of the row by blocks of BINS tokens, and stores the sums in the
    histogram. The draw finds its block there, and then only reads the tokens of this block."""

    m: Workgroup

    def _add_up_row(self, mine: Var) -> None:
        """Also stores the sums of blocks to the histogram, the last block first. The waves divide the blocks."""
        m, group = self.m, self.m.group
        masses_of = self._masses()
        vectors, blocks = BINS // (m.arch.wave * WIDTH), -(-self.vocab // BINS)  # vectors of a lane in a block; blocks
        batch = min(vectors, batch_of(m.arch))
        self.hist.clear()
        with T.serial(-(-blocks // group.waves)) as step:
            block, whole = T.Bind(step * group.waves + group.wave), m.cell(T.int32(0))

            def weigh(i: Expr) -> None:
                first = T.Bind(block * BINS + (i * batch * m.arch.wave + group.lane) * WIDTH)
                columns = [T.Bind(first + j * m.arch.wave * WIDTH) for j in range(batch)]
                for column, values in [(column, m.load(column)) for column in columns]:
                    masses = functools.reduce(lambda a, b: a + b, masses_of(column, m.lanes(values)))
                    whole.set(whole.get() + masses)

            repeat(vectors // batch, weigh, most=1)
            mine.set(mine.get() + whole.get())
            sum_ = wave_sum(m.arch, whole.get())
            with T.If((group.lane == 0) & (block < blocks)), T.Then():
                put(self.hist.bins, sum_, T.int32(BINS - 1) - block)

    def _masses(self) -> Callable[[Expr, list[Expr]], list[Expr]]:
        """A function f(column, logits of a vector) that returns their masses, 0 for tokens that are not left."""
        bound = T.Bind(value_of(T.Bind(T.max(self.threshold.get(), T.int32(LOWEST_KEY)))))
        last = self.last.get()

        def mass(token: Expr, value: Expr) -> Expr:
            left = (value > bound) | ((value == bound) & (token <= last))
            return T.Bind(T.Select(left & (token < self.vocab), self._mass(value), T.int32(0)))

        return lambda column, lanes: [mass(T.Bind(column + k), value) for k, value in enumerate(lanes)]

    def _row_mass(self, token: Expr, value: Expr) -> Expr:
        return self._mass(value)

    def _draw_row(self) -> None:
        """Finds the block of the drawn token, then the token in this block."""
        m, masses_of = self.m, self._masses()
        first = m.cell(T.int32(0))

        def weigh(i: Expr) -> None:
            place = T.Bind((i * m.threads + m.tid) * WIDTH)
            lanes = m.lanes(m.load(T.Bind(first.get() + place)))
            masses = masses_of(T.Bind(first.get() + place), lanes)
            with T.If(place < BINS), T.Then():
                for k, mass in enumerate(masses):
                    put(self.hist.bins, mass, T.int32(BINS - 1 - k) - place)

        with T.serial(2) as step:
            self.hist.find()
            number = T.Bind(T.int32(BINS - 1) - self.found[0])
            self.target.set(self.target.get() - self.found[1])
            m.barrier()
            with when(step == 0):
                first.set(number * T.int32(BINS))
                repeat(-(-BINS // (m.threads * WIDTH)), weigh)
                m.barrier()
            self.chosen.set(T.min(first.get() + number, T.int32(self.vocab - 1)))
