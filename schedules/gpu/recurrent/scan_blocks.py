"""Scans of recurrent layers in blocks of LANES rows of a run, instead of row by row.

Let S be a column of the state before a block, a vector along k. Row i of the block has vectors k[i] and q[i], and a
decay; G(j, i) is the product of the decays of the rows after j up to i; row -1 is before the block. Then

    t[i] = the change of the column along k[i]: given (Mamba-2), or the solution of a triangular system (delta rule)
    y[i] = G(-1, i) S q[i] + sum over j <= i of G(j, i) (k[j] . q[i]) t[j]
    S    = G(-1, last) S + sum over j of G(j, last) t[j] k[j]          after the block

There are two launches. The first computes, for all blocks in parallel, the numbers that do not depend on S: the factors
of each row (`Pairs`). The second processes the blocks of a run in order (`Scan`): a group of LANES lanes has some
columns of a matrix in registers, distributed among the lanes along k. Lane i also represents row i of the block: it
gets the products S q[i] and S k[i], and computes t[i] and y[i]. Slot s of lane i stands for row i ^ s, so that lanes
exchange values by xor shuffles, without selects.

The q, k and factors of a block are in LDS; those of the next block are loaded while a block is computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier, fma, shuffle, shuffle_xor
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import Held, each_owned, filled, lane_of, local, put, vector
from mlc_amd.schedules.gpu.base.step import live_rows, opaque_zero
from mlc_amd.schedules.gpu.recurrent.lane_rows import LANES, load_row, store_row, width_of
from mlc_amd.schedules.operators import DeltaNet, SsmScan
from mlc_amd.schedules.runs import RunCells, begins, run_length
from mlc_amd.schedules.space import Kernel, Space
from mlc_amd.schedules.tir import Buffer, Expr

LEAST = 2 * LANES  # smallest number of rows of a chunk for which blocks are faster
QUAD = 4  # factors in a load


@dataclass(frozen=True)
class ScanPlan:
    """The plan of the second launch. The default takes the least time on an H200 for the delta nets of Qwen 3.5 27B:
    146 us for 512 rows; row by row takes 543 us."""

    columns: int = 2  # columns of a matrix in a group of lanes, which share each element of q and k that is read
    waves: int = 2  # waves of a workgroup, which share the block's q and k in LDS


CHOICES = {"columns": (1, 2, 4), "waves": (1, 2, 4, 8)}


def fitted(plan: ScanPlan, columns: int, size: int, arch: Device) -> ScanPlan:
    """The plan, with fewer columns and waves if matrices of `columns` columns of `size` elements need that. Raises
    ValueError for matrices that do not fill waves, or if a block does not fit into LDS."""
    own, fits = arch.wave // LANES, 4 * LANES * (2 * size + 4 * LANES) <= arch.lds
    most = min(plan.waves, arch.threads // arch.wave)
    for count in (n for n in CHOICES["columns"][::-1] if n <= plan.columns):
        for waves in (n for n in CHOICES["waves"][::-1] if n <= most):
            if own and columns % (count * own * waves) == 0 and size % LANES == 0 and fits:
                return ScanPlan(count, waves)
    raise ValueError(f"matrices of {size} x {columns} do not fill waves of {arch.wave} lanes")


def suits(op: DeltaNet | SsmScan, columns: int, size: int, arch: Device) -> bool:
    """Whether the operator is computed by blocks on this arch. Its heads' matrices have `columns` columns of `size`
    elements."""
    try:
        fitted(ScanPlan(1, 1), columns, size, arch)
    except ValueError:
        return False
    return op.m - op.single >= LEAST


def plans(op: DeltaNet | SsmScan, heads: int, columns: int, size: int, arch: Device) -> Space | None:
    """The plans for `heads` such matrices; None if the operator is computed row by row."""
    if not suits(op, columns, size, arch):
        return None

    def kernel(plan: ScanPlan) -> Kernel:
        if fitted(plan, columns, size, arch) != plan:
            raise ValueError(f"{plan} does not fit matrices of {size} x {columns}")
        threads = plan.waves * arch.wave
        groups = columns // (plan.columns * threads // LANES) * heads
        return Kernel(plan, groups, threads, LANES * 2 * size * 4 / threads)

    return Space(ScanPlan, CHOICES, fitted(ScanPlan(), columns, size, arch), kernel)


def blocks_of(m: int, single: int) -> int:
    """The largest number of blocks of a step: one for each single row, at which it may begin, and those of the
    chunk."""
    return single + -(-m // LANES)


def _singles(state: Buffer, live: Expr, single: int) -> Expr:
    return T.Bind(T.min(state[0], live)) if single else T.int32(0)


def block_rows(state: Buffer, rows: Buffer, number: Expr, m: int, single: int) -> tuple[Expr, Expr]:
    """(first row, number of live rows) of block `number`; 0 live rows if there is no such block."""
    live = live_rows(state, m, minimum=0)
    singles = _singles(state, live, single)
    chunk = T.Bind(number >= single)
    first = T.Bind(T.Select(chunk, singles + (number - single) * LANES, number))
    count = filled(T.min(T.max(live - first, T.int32(0)), T.int32(LANES)))
    if single:
        with T.If(number < single), T.Then():
            before, after = filled(T.int32(0)), filled(T.int32(0))
            place = T.Bind(T.min(number, T.int32(m - 1)))
            with T.serial(singles) as other:
                same = T.Bind(T.cast(rows[other, 1] == rows[place, 1], "int32"))
                put(before, before[0] + T.Select(other < number, same, T.int32(0)), 0)
                put(after, after[0] + T.Select(other < number, T.int32(0), same), 0)
            begins_here = (number < singles) & (before[0] % LANES == 0)
            put(count, T.Select(begins_here, T.min(after[0], T.int32(LANES)), T.int32(0)), 0)
    return T.Bind(T.max(T.min(first, T.int32(m - 1)), T.int32(0))), T.Bind(count[0])


class Pairs:
    """The first launch: a wave has one block of rows, and lane i of each group of lanes has row i. For each row j of
    the block it computes qk[j] = q[i] . k[j]; with `norms` also kk[j] = k[i] . k[j], and qq = q[i] . q[i]."""

    def __init__(
        self, arch: Device, X: Buffer, block: tuple[Expr, Expr], begins_at: tuple[Expr, Expr], size: int, lane: Expr,
        norms: bool,
    ):  # fmt: skip
        """block: from `block_rows`. begins_at: the first columns of q and of k in X. size: columns of both."""
        (first, count), (q_at, k_at) = block, begins_at
        self.arch, self.lane, self.count = arch, lane, count
        self.i, self.base = T.Bind(lane % LANES), T.Bind(lane // LANES * LANES)
        self.row = T.Bind(first + T.min(self.i, count - 1))
        self.valid = T.Bind(self.i < count)
        groups = arch.wave // LANES
        width = next(w for w in (4, 2, 1) if size % (w * groups) == 0)
        others = [T.Bind(first + T.min(T.int32(j), count - 1)) for j in range(LANES)]
        sums = [filled(T.float32(0)) for _ in range(LANES * (2 if norms else 1) + norms)]
        with T.serial(size // (width * groups)) as step:
            begin = T.Bind((step * groups + lane // LANES) * width)
            mine = [load_row(X, (self.row,), at_ + begin, width) for at_ in ((q_at, k_at) if norms else (q_at,))]
            for j, row in enumerate(others):
                k = load_row(X, (row,), k_at + begin, width)
                for n, own in enumerate(mine):
                    self._add(sums[n * LANES + j], own, k)
            if norms:
                self._add(sums[-1], mine[0], mine[0])
        found = [T.Bind(cell[0]) for cell in sums]
        distance = LANES
        while distance < arch.wave:  # sums over the groups of lanes
            found = [T.Bind(x + shuffle_xor(arch, x, distance)) for x in found]
            distance *= 2
        self.qk, self.kk, self.qq = found[:LANES], found[LANES:-1], found[-1]

    @staticmethod
    def _add(cell: Expr, xs: Sequence[Expr], ys: Sequence[Expr]) -> None:
        for x, y in zip(xs, ys, strict=True):
            put(cell, fma(x, y, cell[0]), 0)

    def of_rows(self, x: Expr) -> list[Expr]:
        """The values of x of all rows of the block."""
        return [shuffle(self.arch, x, T.Bind(self.base + j)) for j in range(LANES)]

    def decays(self, decay: Expr) -> tuple[Expr, list[Expr], Expr, list[Expr]]:
        """(G(-1, i), [G(j, i) for each j, 0 for j > i], G(-1, last), [G(j, last) for each j]). decay: that of this
        lane's row. Products are computed without divisions, so that small ones are precise."""
        all_ = self.of_rows(T.Bind(T.Select(self.valid, decay, T.float32(1))))
        upto = [T.Bind(T.Select(self.i >= j, x, T.float32(1))) for j, x in enumerate(all_)]
        (own, *by_row), (keep, *to_last) = self._products(upto), self._products(all_)
        return own, [T.Select(self.i >= j, x, T.float32(0)) for j, x in enumerate(by_row)], keep, to_last

    @staticmethod
    def _products(factors: Sequence[Expr]) -> list[Expr]:
        """[product of all factors, product of those after number 0, product of those after number 1, ..]."""
        found = [T.float32(1)]
        for x in reversed(factors):
            found.append(T.Bind(found[-1] * x))
        return found[::-1]

    def store(
        self, Factors: Buffer, place: tuple[Expr, ...], by_slot: Sequence[Sequence[Expr]], alone: Sequence[Expr]
    ) -> None:
        """Stores the factors of this lane's row to Factors[place]; the first group of lanes does it. by_slot: lists
        with a factor for each row j, which are stored in the order of slots. alone: the other factors."""
        with T.If(self.lane < LANES), T.Then():
            for n, values in enumerate(by_slot):
                for j, x in enumerate(values):
                    T.buffer_store(Factors, x, [*place, self.i, n * LANES + (self.i ^ j)])
            for n, x in enumerate(alone):
                T.buffer_store(Factors, x, [*place, self.i, len(by_slot) * LANES + n])


def factor_count(by_slot: int, alone: int) -> int:
    """The number of factors of a row, with padding."""
    return by_slot * LANES + -(-alone // QUAD) * QUAD


class Scan:
    """The second launch: a run, and the columns of a matrix in this group of lanes. column: the first of them."""

    def __init__(
        self, op: DeltaNet | SsmScan, arch: Device, plan: ScanPlan, step: tuple[Buffer, Buffer, Buffer], first: Expr,
        size: int, index: tuple[Expr, Expr, Expr], count: int,
    ):  # fmt: skip
        """step: (state, rows, cells). first: first row of the run. size: elements of a column. index: (part of the
        matrix, lane, wave). count: factors of a row."""
        (state, rows, cells), (part, self.lane, wave), m, single = step, index, op.m, op.single
        self.arch, self.plan, self.size, self.factors = arch, plan, size, count
        self.state, self.m, self.threads = state, m, plan.waves * arch.wave
        self.thread = T.Bind(wave * arch.wave + self.lane)
        self.i = T.Bind(self.lane % LANES)
        group = (part * plan.waves + wave) * (arch.wave // LANES) + self.lane // LANES
        self.column = T.Bind(group * plan.columns)
        self.own = size // LANES
        self.width = width_of(self.own)
        live = live_rows(state, m)
        self.single_rows = _singles(state, live, single)
        self.first, self.base = first, single
        self.active = T.Bind((first < live) & begins(rows, first))
        length = run_length(op, state, rows, first, live)
        self.length = T.Bind(T.Select(self.active, length, T.int32(0)))
        places = RunCells(rows, cells, first, single)
        # Only the last state is stored: a step with a chunk has no guesses, which would need a state after each row.
        self.source, self.target = places.source, places.after(T.max(length - 1, T.int32(0)))
        self.fresh = T.Bind(rows[first, 0] <= 0)
        self.matrix = [[local(1) for _ in range(self.own)] for _ in range(plan.columns)]

    def load(self, States: Buffer, place: Callable[[Expr], tuple[tuple[Expr, ...], Expr]]) -> None:
        """Loads the columns from the run's source cell. place(column): (further indices of States, index of the
        column's first element)."""
        self.States, self.place = States, place
        for cells, before, u, begin in self._pieces_of(self.source):
            for e, x in enumerate(load_row(self.States, before, begin, self.width)):
                put(cells[u + e], T.Select(self.fresh, T.float32(0), x), 0)

    def store(self) -> None:
        """Stores the columns to the run's target cell."""
        for cells, before, u, begin in self._pieces_of(self.target):
            store_row(self.States, before, begin, [T.Bind(cell[0]) for cell in cells[u : u + self.width]])

    def _pieces_of(self, cell: Expr) -> Iterator[tuple[list[Buffer], tuple[Expr, ...], int, Expr]]:
        """The loads or stores of the columns, if there is a run. For each: (registers of a column, indices of States,
        number of the first register, last index)."""
        with T.If(self.active), T.Then():
            for c, cells in enumerate(self.matrix):
                before, begin = self.place(T.Bind(self.column + c))
                for u in range(0, self.own, self.width):
                    yield cells, (cell, *before), u, begin + self._key(u)

    def _key(self, u: int) -> Expr:
        """The number along k of the lane's element u. Lanes alternate, so that a group accesses adjacent elements."""
        return u * LANES + self.i * self.width

    def blocks(
        self, X: Buffer, Factors: Buffer, head: Expr, q_at: Expr, k_at: Expr,
        fetch: Callable[[Expr], Sequence[Expr]], body: Callable[[Expr, Expr, list[Expr]], None],
    ) -> None:  # fmt: skip
        """Emits the loop over blocks. It calls body(row of the lane, whether the row exists, result of fetch) with the
        block's q, k and factors in LDS. fetch(row): loads other values of the row, and returns a list; they are also
        loaded one block ahead."""
        width, size = self.width, self.size
        pieces, quads = LANES * 2 * size // width, LANES * self.factors // QUAD
        self.lds = T.alloc_buffer((pieces,), self._type(width), scope="shared")
        self.row_factors = T.alloc_buffer((quads,), self._type(QUAD), scope="shared")
        count = T.Bind((self.length + (LANES - 1)) // LANES)
        last = T.Bind(T.max(self.length - 1, T.int32(0)))
        per_row, half = 2 * size // width, size // width

        def load(block: Expr) -> list[Expr]:
            found = []
            for piece, _ in each_owned(self.thread, self.threads, pieces):
                row = T.Bind(self.first + T.min(block * LANES + piece // per_row, last))
                c = T.Bind(piece % per_row)
                column = T.Bind(T.Select(c < half, q_at, k_at - size) + c * width)
                found += load_row(X, (row,), column, width)
            is_single = self.first < self.single_rows
            step, origin = T.Select(is_single, T.int32(LANES), T.int32(1)), T.Select(is_single, self.first, self.base)
            number = T.Bind(T.min(origin + block * step, T.int32(int(Factors.shape[0]) - 1)))
            for quad, _ in each_owned(self.thread, self.threads, quads):
                per = self.factors // QUAD
                found += load_row(Factors, (number, head, quad // per), T.Bind(quad % per * QUAD), QUAD)
            return found + list(fetch(T.Bind(self.first + T.min(block * LANES + self.i, last))))

        ahead = Held(load(T.int32(0)))
        with T.serial(count) as block:
            barrier()
            held = iter(ahead.values())
            for piece, _ in each_owned(self.thread, self.threads, pieces):
                put(self.lds, vector([next(held) for _ in range(width)]), piece)
            for quad, _ in each_owned(self.thread, self.threads, quads):
                put(self.row_factors, vector([next(held) for _ in range(QUAD)]), quad)
            barrier()
            ahead.keep(load(T.Bind(T.min(block + 1, count - 1))))
            self.block, place = block, T.Bind(block * LANES + self.i)
            body(T.Bind(self.first + T.min(place, last)), T.Bind(place < self.length), list(held))

    @staticmethod
    def _type(width: int) -> str:
        return f"float32x{width}" if width > 1 else "float32"

    def _read(self, slot: int, u: int, key: int, moved: Expr = 0) -> list[Expr]:
        """The lane's elements from u on of q (key: 0) or k (key: 1) of the row of a slot. moved: added to the index."""
        width = self.width
        first = T.Bind((self.i ^ slot) * (2 * self.size // width) + self.i + moved)
        x = T.Bind(self.lds[first + (key * (self.size // width) + u // width * LANES)])
        return [T.Bind(lane_of(x, e)) for e in range(width)] if width > 1 else [x]

    def factor_lists(self, by_slot: int, alone: int) -> tuple[list[list[Expr]], list[Expr]]:
        """The factors of the lane's row, as `Pairs.store` got them, but lists in the order of slots. by_slot, alone:
        the numbers of lists and of other factors."""
        per = self.factors // QUAD
        first, found = T.Bind(self.i * per), []
        for n in range(per):
            x = T.Bind(self.row_factors[first + n])
            found += [T.Bind(lane_of(x, e)) for e in range(QUAD)]
        return [found[n * LANES : (n + 1) * LANES] for n in range(by_slot)], found[by_slot * LANES :][:alone]

    def products(self, key: bool) -> list[Expr]:
        """For each column S, the product S q[i], or with `key` S k[i], of the lane's row i."""
        sums = [[local(1) for _ in range(LANES)] for _ in self.matrix]
        for u in range(0, self.own, self.width):
            for slot in range(LANES):
                xs = self._read(slot, u, int(key))
                for e, x in enumerate(xs):
                    for cells, column in zip(self.matrix, sums, strict=True):
                        cell = column[slot]
                        put(cell, fma(x, cells[u + e][0], cell[0]) if u + e else x * cells[0][0], 0)
        return [self._summed([T.Bind(cell[0]) for cell in column]) for column in sums]

    def _summed(self, parts: Sequence[Expr]) -> Expr:
        """The sum over the lanes of the group of their parts for this lane's row. parts: a lane's part for each
        slot."""
        total = parts[0]
        for slot in range(1, LANES):
            total = T.Bind(total + shuffle_xor(self.arch, parts[slot], slot))
        return total

    def by_slot(self, x: Expr) -> Expr:
        """The values of x of the rows of all slots."""
        return [x] + [shuffle_xor(self.arch, x, slot) for slot in range(1, LANES)]

    def update(self, keep: Expr, changes: Sequence[Sequence[Expr]]) -> None:
        """For each column S = keep * S + the sum over slots of k * changes[column][slot]."""
        # An index that compilers do not recognize. Otherwise they would keep the k of all rows in registers since
        # `products`.
        moved = opaque_zero(self.state, self.block)
        for u in range(0, self.own, self.width):
            kept = [[T.Bind(cells[u + e][0] * keep) for e in range(self.width)] for cells in self.matrix]
            for slot in range(LANES):
                xs = self._read(slot, u, 1, moved)
                for c, change in enumerate(changes):
                    kept[c] = [fma(x, change[slot], old) for x, old in zip(xs, kept[c], strict=True)]
            for cells, new in zip(self.matrix, kept, strict=True):
                for e, x in enumerate(new):
                    put(cells[u + e], x, 0)


def weighed(factors: Sequence[Expr], xs: Sequence[Expr], total: Expr) -> Expr:
    """total + the sum of factors[i] * xs[i]."""
    for factor, x in zip(factors, xs, strict=True):
        total = fma(factor, x, total)
    return total
