"""The kernels of a mixture of experts on GPUs that order rows: `expert_order` sorts pairs of a row and an expert by
expert, `gather` copies rows to slots, `combine` adds the slots of a row. schedules/operators/experts.py defines pairs,
slots and tiles. A thread of `gather` and `combine` has four columns of a slot or row.

`expert_order` is one workgroup, which does a stable counting sort of the live rows' pairs, without atomic operations.
The pairs are divided into segments of consecutive pairs. SEGMENT threads process a segment, SEGMENT pairs in a step:
each thread compares the expert of its pair with those of the other pairs of the step, and counts the equal ones before
it. Each segment has its own counts, one for each expert. From these follow the first slots of the segment's pairs of
each expert. The experts of BATCH steps are loaded together.

A stack of `count` matrices of n rows is packed as one matrix of count * n rows: row e * n + i is row i of expert e.
"""

from collections.abc import Callable, Sequence
from math import prod

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.device import barrier, count_ones, fma, launch
from mlc_amd.schedules.gpu.base.planes import ROWS
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, act_args, column_threads, emit_store, load_columns, own_columns
from mlc_amd.schedules.gpu.base.registers import at, lane_of, put
from mlc_amd.schedules.gpu.base.step import ThreadsPlan, builds, if_live, live_rows, threads_of
from mlc_amd.schedules.operators import Combine, ExpertOrder, Gather
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.schedules.tir import Buffer, Expr, declared

SEGMENT = 32
FOUR = 4  # experts in a load of a thread from LDS
BATCH = 8
NOBODY = -1  # the expert of a pair that does not exist


def check_rows(n: int, multiple: int = ROWS) -> None:
    """Raises UserError unless n, the rows of an expert's matrix, is a multiple of `multiple`, so that each matrix
    begins at a tile of packed weights."""
    if n % multiple:
        raise UserError(f"experts with {n} rows are not supported: it must be a multiple of {multiple}")


def expert_at(ids: Buffer, index: Sequence[Expr], experts: Experts) -> Expr:
    """The expert in ids[index], in a register. It is clamped, so that weights are never read outside the stack, and
    code generators know that indices computed from it are not negative."""
    return T.Bind(T.max(T.min(ids[tuple(index)], T.int32(experts.count - 1)), T.int32(0)))


def flat(buffer: Buffer) -> Buffer:
    """A view of a parameter with one dimension. To be called after the last parameter is declared."""
    return T.decl_buffer((prod(int(extent) for extent in buffer.shape),), buffer.dtype, data=buffer.data)


def bias_args(rows: int, *names: str) -> list[Buffer]:
    """Declares parameters of these names, float32 [rows]. rows: rows of a stack."""
    return declared(**dict.fromkeys(names, (rows,)))


def ids_arg(experts: Experts, m: int) -> Buffer:
    """Declares the parameter Groups: int32 [m, used], the experts of slots, if pairs are not sorted; otherwise `Groups`
    of schedules/operators/experts.py."""
    shape = (m, experts.used) if experts.tile == 1 else (experts.groups(m),)
    return T.arg("Groups", T.buffer(shape, "int32"))


# ---- the order


@builds(ExpertOrder)
def expert_order(op: ExpertOrder, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, Ids int32 [m, used], Slots int32 [m, used], Pairs int32 [slots], Groups int32 [tiles + 2 count +
    1])."""
    m, experts = op.m, op.of
    threads, pairs, slots = arch.threads, m * experts.used, experts.slots(m)
    chosen = m, experts.used
    Ids, Slots, Pairs, Groups = declared("int32", Ids=chosen, Slots=chosen, Pairs=(slots,), Groups=(experts.groups(m),))
    ids, slot_of = flat(Ids), flat(Slots)
    with launch((1,), (threads,)) as (_, thread):
        live = T.Bind(live_rows(state, m) * experts.used)
        sort = _Sort(arch, experts, pairs, thread)
        sort.clear()

        def count(pair: Expr, expert: Expr, before: Expr, total: Expr) -> None:
            sort.add(expert, before, total)
            barrier()

        sort.each_pair(ids, live, count)
        used_tiles = sort.place(Groups, Pairs, experts.tiles(m))
        _fill_rest(Groups, used_tiles, experts.tiles(m), thread, threads)
        _fill_rest(Pairs, T.Bind(used_tiles * experts.tile), slots, thread, threads)

        def place(pair: Expr, expert: Expr, before: Expr, total: Expr) -> None:
            exists = expert >= 0
            slot = T.Bind(T.Select(exists, sort.counts[sort.count_of(expert)] + before, T.int32(0)))
            barrier()
            sort.add(expert, before, total)
            with T.If(pair < pairs), T.Then():
                put(slot_of, slot, pair)
            with T.If(exists), T.Then():
                put(Pairs, pair, slot)
            barrier()

        sort.each_pair(ids, live, place)


def _fill_rest(buffer: Buffer, first: Expr, count: int, thread: Expr, threads: int) -> None:
    """Sets buffer[first .. count - 1] to -1, by all threads."""
    with T.serial(-(-count // threads)) as i:
        index = T.Bind(i * threads + thread)
        with T.If((index >= first) & (index < count)), T.Then():
            put(buffer, T.int32(-1), index)


class _Sort:
    """The sort, and its buffers in LDS. counts: for each segment `row` counts, one for each expert and padding. Thread
    t computes the places of the experts t * each .. t * each + each - 1."""

    def __init__(self, arch: Device, experts: Experts, pairs: int, thread: Expr):
        self.experts, self.thread, self.threads = experts, thread, arch.threads
        self.segments = self.threads // SEGMENT
        self.steps = -(-pairs // self.threads)
        self.segment, self.lane = T.Bind(thread // SEGMENT), T.Bind(thread % SEGMENT)
        self.each = -(-experts.count // self.threads)
        self.row = self.each * self.threads
        self.batch = min(BATCH, self.steps)
        self.ids = T.alloc_buffer((self.batch * self.threads,), "int32", scope="shared")
        self.counts = T.alloc_buffer((self.segments * self.row,), "int32", scope="shared")
        self.tiles = T.alloc_buffer((self.threads,), "int32", scope="shared")

    def count_of(self, expert: Expr) -> Expr:
        """The index of the count of an expert in this thread's segment; for NOBODY any valid index."""
        return T.Bind(self.segment * self.row + T.max(expert, T.int32(0)))

    def clear(self) -> None:
        with T.serial(self.segments * self.each) as i:
            put(self.counts, T.int32(0), i * self.threads + self.thread)
        barrier()

    def each_pair(self, ids: Buffer, live: Expr, work: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """Emits the loop over steps. It calls work(pair, expert, number of pairs with the same expert before it in the
        step, number of pairs with the same expert in the step) for this thread's pair. work must end with a barrier."""
        with T.serial(-(-self.steps // self.batch)) as outer:
            first = T.Bind((self.segment * self.steps + outer * self.batch) * SEGMENT + self.lane)
            pairs = [T.Bind(first + i * SEGMENT) for i in range(self.batch)]
            inside = [T.Bind(T.min(pair, T.int32(int(ids.shape[0]) - 1))) for pair in pairs]
            experts = [expert_at(ids, [index], self.experts) for index in inside]
            for i, (pair, expert) in enumerate(zip(pairs, experts, strict=True)):
                # pairs of the last batch may be in the next segment
                mine = (pair < live) & (outer * self.batch + i < self.steps)
                put(self.ids, T.Select(mine, expert, T.int32(NOBODY)), i * self.threads + self.thread)
            barrier()
            with T.serial(T.Bind(T.min(self.steps - outer * self.batch, T.int32(self.batch)))) as i:
                work(T.Bind(first + i * SEGMENT), *self._compare(T.Bind(i * self.threads)))

    def _compare(self, start: Expr) -> tuple[Expr, Expr, Expr]:
        """(expert, number of equal ones before it, number of equal ones) for this thread's pair. start: the index in
        self.ids of the step's experts."""
        expert, equal = T.Bind(self.ids[start + self.thread]), T.uint32(0)
        for first in range(0, SEGMENT, FOUR):
            four = T.Bind(self.ids[at(start + self.segment * SEGMENT + first, FOUR)])
            for i in range(FOUR):
                equal = equal | T.Select(lane_of(four, i) == expert, T.uint32(1 << (first + i)), T.uint32(0))
            equal = T.Bind(equal)
        below = T.Bind(T.shift_left(T.uint32(1), T.cast(self.lane, "uint32")) - T.uint32(1))
        return expert, count_ones(equal & below), count_ones(equal)

    def add(self, expert: Expr, before: Expr, total: Expr) -> None:
        """Adds the pairs of a step to the counts. The thread with the first pair of each expert does it."""
        with T.If((expert >= 0) & (before == 0)), T.Then():
            index = self.count_of(expert)
            put(self.counts, self.counts[index] + total, index)

    def place(self, Groups: Buffer, Pairs: Buffer, tiles: int) -> Expr:
        """Replaces counts by first slots. Stores Groups without unused tiles, and -1 to Pairs for the padding within
        used tiles. Returns the number of used tiles."""
        count, tile = self.experts.count, self.experts.tile
        mine = [T.Bind(self.thread * self.each + i) for i in range(self.each)]  # this thread's experts
        totals, firsts = [], []
        for expert in mine:
            places = [T.Bind(segment * self.row + expert) for segment in range(self.segments)]
            found, total = [T.Bind(self.counts[place]) for place in places], T.int32(0)
            for place, here in zip(places, found, strict=True):
                put(self.counts, total, place)
                total = T.Bind(total + here)
            totals.append(total)
            firsts.append(T.Bind(self._tiles_of(total) + firsts[-1]) if firsts else self._tiles_of(total))
        self._scan(firsts[-1])
        first = T.Bind(self.tiles[self.thread] - firsts[-1])
        for expert, total in zip(mine, totals, strict=True):
            wanted = self._tiles_of(total)
            places = [T.Bind(segment * self.row + expert) for segment in range(self.segments)]
            found = [T.Bind(self.counts[place]) for place in places]
            for place, here in zip(places, found, strict=True):
                put(self.counts, here + first * tile, place)
            with T.If(expert < count), T.Then():
                put(Groups, first, tiles + expert)
                put(Groups, total, tiles + count + 1 + expert)
                with T.serial(wanted) as t:
                    put(Groups, expert, first + t)
                with T.serial(T.Bind(wanted * tile - total)) as padding:
                    put(Pairs, T.int32(-1), first * tile + total + padding)
            first = T.Bind(first + wanted)
        used_tiles = T.Bind(self.tiles[self.threads - 1])
        with T.If(self.thread == 0), T.Then():
            put(Groups, used_tiles, tiles + count)
        barrier()
        return used_tiles

    def _tiles_of(self, pairs: Expr) -> Expr:
        return T.Bind(T.truncdiv(pairs + (self.experts.tile - 1), T.int32(self.experts.tile)))

    def _scan(self, value: Expr) -> None:
        """Sets self.tiles[t] to the sum of `value` of the threads 0 .. t."""
        put(self.tiles, value, self.thread)
        barrier()
        distance = 1
        while distance < self.threads:
            below = T.Bind(self.tiles[T.max(self.thread - distance, T.int32(0))])
            total = T.Bind(self.tiles[self.thread] + T.Select(self.thread >= distance, below, T.int32(0)))
            barrier()
            put(self.tiles, total, self.thread)
            barrier()
            distance *= 2


# ---- to slots and back


def _threads(k: int, arch: Device, plan: ThreadsPlan | None) -> int:
    return threads_of(arch, plan) if plan else column_threads(k, arch)


@builds(Gather)
def gather(op: Gather, arch: Device, state: Buffer, plan: ThreadsPlan | None) -> None:
    """Kernel (state, X float32 [m, k], [Pairs int32 [slots]], [Weights float32 [m, used]], then A, S | H | Y of [slots,
    k] in `layout`): the row of each slot, multiplied by its pair's weight if `weighted`. Slots of padding are not
    written, because their results are not used."""
    k, m, experts, layout = op.k, op.m, op.of, op.layout
    slots, threads = experts.slots(m), _threads(k, arch, plan)
    (X,), (Pairs,) = declared(X=(m, k)), declared("int32", Pairs=(slots,) if experts.tile > 1 else None)
    (Weights,) = declared(Weights=(m, experts.used) if op.weighted else None)
    out = act_args(slots, k, layout, None if layout else ["Y"])
    weights = None if Weights is None else flat(Weights)
    with (
        launch((-(-k // (threads * WIDTH)), slots), (threads,)) as (chunk, slot, thread),
        # a loop of 0 or 1 steps instead of an `if`, because lanes exchange values
        T.serial(1 if Pairs is None else T.Bind(T.cast(Pairs[slot] >= 0, "int32"))),
    ):
        pair = slot if Pairs is None else T.Bind(T.max(Pairs[slot], T.int32(0)))
        inside, live = own_columns(chunk, thread, threads, k)
        x = load_columns(X, 0 if m == 1 else T.Bind(T.min(pair // experts.used, T.int32(m - 1))), inside)
        if weights is not None:
            x = [T.Bind(v * weights[pair]) for v in x]
        emit_store(arch, layout, out, x, slot, inside, live)


@builds(Combine)
def combine(op: Combine, arch: Device, state: Buffer, plan: ThreadsPlan | None) -> None:
    """Kernel (state, X float32 [slots, n], Slots int32 [m, used], [Weights float32 [m, used]], [R float32 [m, n]], Y
    float32 [m, n]): for each live row, R plus the sum over its slots of X[slot] times the weight. n: a multiple of
    4."""
    n, m, experts = op.n, op.m, op.of
    slots, threads = experts.slots(m), _threads(n, arch, plan)
    (X,), (Slots,) = declared(X=(slots, n)), declared("int32", Slots=(m, experts.used))
    weights, residual = (m, experts.used) if op.weighted else None, (m, n) if op.residual else None
    Weights, R, Y = declared(Weights=weights, R=residual, Y=(m, n))
    with launch((-(-n // (threads * WIDTH)), m), (threads,)) as (chunk, row, thread), if_live(state, m, row):
        inside, live = own_columns(chunk, thread, threads, n)
        total = load_columns(R, row, inside) if R is not None else [T.float32(0)] * WIDTH
        places = [T.Bind(T.max(T.min(Slots[row, j], T.int32(slots - 1)), T.int32(0))) for j in range(experts.used)]
        parts = [load_columns(X, place, inside) for place in places]
        for j, x in enumerate(parts):
            if Weights is not None:
                weight = T.Bind(Weights[row, j])
                total = [fma(v, weight, t) for v, t in zip(x, total, strict=True)]
            else:
                total = [T.Bind(t + v) for v, t in zip(x, total, strict=True)]
        emit_store(arch, "", [Y], total, row, inside, live)
