"""All-reduce (`AllReduce`) and all-gather (`AllGather`) between GPUs by a kernel that exchanges the parts while it
runs, on all GPUs at the same time. runtime/exchange_layout.py defines rank, round, word, slot, inbox and outbox.
parts.py has the other kernel for these operators, for which the parts are exchanged between two segments of a step. A
kernel that computes a part can also exchange it itself (joint.py), by `Sum`.

Algorithm. Each GPU sends its part to the others as words (words.py); for a sum it is rounded to float16. Then it waits
for the other parts, and adds all parts to the residual in the order of ranks, so that all GPUs get the same bits. The
kernel may also prepare the norm of the sum (linear/deferred_norm.py). GPUs write words to the others' inboxes
themselves (`peers`), or to an outbox, from which the host moves them (runtime/devices/exchange).

Rounds. The kernel counts rounds in memory (Control), because the arguments of recorded launches are fixed. Rounds
alternate between two slots. This is enough: a GPU begins round n + 2 after it has received all words of round n + 1.
The others sent these after they had received all words of round n and had emptied their places. So no word is
overwritten that is still to be read.

No deadlock. A workgroup first sends its words, then waits for the words of the workgroups with the same number on the
other GPUs. If GPUs start workgroups in ascending order, they need not hold all of them at the same time: consider the
lowest number whose workgroup is not finished on all GPUs. On each GPU this workgroup has started or is finished, so its
words are sent, and it can finish everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.exchange_layout import (
    CONTROL,
    DONE,
    EMPTY,
    FAILED,
    GROUPS,
    LINE,
    RANK,
    inbox_words,
    outbox_words,
)  # fmt: skip
from mlc_amd.schedules.gpu.base.device import barrier, halves, launch, wave_meets
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import clamped
from mlc_amd.schedules.gpu.base.registers import at, elements, filled, local, put, vector
from mlc_amd.schedules.gpu.base.step import kernel, when
from mlc_amd.schedules.gpu.exchange.words import Words, halves_of, word
from mlc_amd.schedules.gpu.linear.deferred_norm import Loaded, PreparedNorm
from mlc_amd.schedules.operators.exchange import AllGather, AllReduce
from mlc_amd.schedules.tir import Buffer, Expr, declared

QUAD = 4  # float32 values of a memory access
PAIR = 8  # float16 values in a pair of words; a pair has half as many float32 values
MOST_GROUPS = 64  # upper limit of the workgroups of a kernel that only exchanges
POLLS = 1 << 22  # polls of a thread in a round before it gives up: about 1 s; a driver took 0.3 s for a submission


@dataclass(frozen=True)
class ExchangePlan:
    groups: int  # workgroups, a power of two up to MOST_GROUPS
    threads: int  # threads of a workgroup
    # Divisions between two polls. Only for Vulkan drivers that run on the CPU: POLLS polls then also take long enough,
    # though such a driver ends a loop after 65536 iterations.
    pause: int = 0


def pause_of(arch: Device) -> int:
    """`ExchangePlan.pause` for an arch."""
    return 200 if arch.family == "generic" else 0


def default_plan(values: int, arch: Device) -> ExchangePlan:
    """The plan to exchange `values` values. Many small workgroups, because compute units access memory independently;
    one workgroup for drivers that run on the CPU."""
    if arch.family == "generic":
        return ExchangePlan(1, min(arch.threads, 16), pause_of(arch))
    groups, pairs = MOST_GROUPS, values // PAIR
    while groups > 1 and groups * arch.wave > pairs:
        groups //= 2
    threads = arch.wave
    while groups * threads < pairs and 2 * threads <= arch.threads:
        threads *= 2
    return ExchangePlan(groups, threads)


class Round:
    """The code of a kernel for one round. Declares the kernel's last parameters, the boxes. op: the exchange. capacity,
    peers, polls: see `exchange`. pause: see `ExchangePlan`. Raises ValueError unless the words of a round are whole
    cache lines and fit into a slot."""

    def __init__(
        self, op: AllReduce | AllGather, capacity: int, arch: Device, peers: bool, polls: int = POLLS, pause: int = 0
    ):
        if op.words % LINE or op.words > capacity:
            raise ValueError(f"{op.m} x {op.n} values are no whole cache lines of words, or more than {capacity} words")
        self.arch, self.capacity, self.sums = arch, capacity, isinstance(op, AllReduce)
        self.others, self.polls, self.pause = op.parts - 1, polls, pause
        outboxes = {f"Outbox{i}": (outbox_words(capacity),) for i in range(self.others if peers else 1)}
        self.inbox, *self.outs = declared("int64", Inbox=(inbox_words(op.parts, capacity),), **outboxes)
        (self.control,) = declared("int32", Control=(CONTROL,))

    def begin(self, thread: Expr, threads: int) -> None:
        """Emits the code at the beginning of the kernel. thread: number of this thread among the `threads` threads that
        exchange."""
        self.box = Words(self.arch, thread, threads)
        done = T.shift_right(T.Bind(self.control[DONE]), T.int32(GROUPS.bit_length() - 1))
        self.slot = T.Bind((done + 1 & 1) * self.capacity)
        self.late = filled(self.control[FAILED])
        self.rank, self.alive = T.Bind(self.control[RANK]), T.Bind(self.late[0] == 0)

    def send(self, pair: Expr, part: list[Expr], mine: Expr) -> None:
        """Sends the values of a pair of words. pair: its number. part: float32 values. mine: a condition, whether this
        thread exchanges the pair."""
        sent = _words(_sent(part, self.sums))
        with when(mine):
            for outbox in self.outs:
                self.box.store(outbox, self.slot + pair * 2, *sent)

    def received(self, pair: Expr, part: list[Expr]) -> list[list[Expr]]:
        """Waits for a pair of words, and returns the float32 values of all ranks, in the order of ranks. part: those
        that this rank sent. A thread must have sent all its pairs before."""
        places = [source * outbox_words(self.capacity) + self.slot + pair * 2 for source in range(self.others)]
        got = _received(self.box, self.inbox, places, self.late, self.polls, self.pause)
        own, theirs = _sent(part, self.sums), [_values(data, self.sums) for data in got]
        return _in_order(_values(own, self.sums), theirs, self.rank)

    def end(self, first: Expr, group: Expr, groups: int) -> None:
        """Emits the code at the end of the kernel. group: number of the workgroup among `groups`, at most GROUPS.
        first: a condition, whether this is the first thread of the workgroup."""
        with when(self.late[0] != 0):
            T.buffer_store(self.control, T.int32(1), [FAILED])
        begin, end = (T.truncdiv((group + i) * GROUPS, T.int32(groups)) for i in (0, 1))
        share = end - begin if GROUPS % groups else T.int32(GROUPS // groups)
        with when(first):
            T.evaluate(T.call_intrin("int32", "tirx.atomic_add", T.address_of(self.control[DONE]), share))


class Sum:
    """The code of a kernel for an `AllReduce`. Declares the operator's parameters after X, then the boxes. rest: the
    other arguments of `Round`."""

    def __init__(self, op: AllReduce, capacity: int, arch: Device, *rest):
        self.n, shape = op.n, (op.m * op.n,)
        (self.before,) = declared(R=shape if op.residual else None)
        self.norm = PreparedNorm(op.m, op.n, op.norm_out) if op.norm_out else None
        self.out, _ = declared(Y=shape, P=(op.parts * op.m * op.n,))
        if self.norm:
            self.norm.declare_outputs()
        self.round = Round(op, capacity, arch, *rest)

    def load(self, token: Expr, column: Expr) -> tuple[list[Expr], Loaded | None]:
        """Loads the residual and the norm's inputs that `store` needs, for PAIR columns of a token. To be called before
        the wait for words, so that the loads overlap it."""
        before = [] if self.before is None else _loaded(self.before, token * self.n + column, PAIR)
        return before, self.norm.load(token, column, PAIR) if self.norm else None

    def store(
        self,
        pair: Expr,
        token: Expr,
        column: Expr,
        part: list[Expr],
        loaded: tuple[list[Expr], Loaded | None],
        mine: Expr,
    ) -> None:
        """Adds up the PAIR columns from `column` on of a token, and stores the sum. pair, part, mine: those of
        `Round.send`. loaded: from `load`."""
        (before, of_norm), total = loaded, filled(T.float32(0), PAIR)
        with when(mine):
            ordered = self.round.received(pair, part)
            result = _added([before, *ordered] if before else ordered)
            for j in range(0, PAIR, QUAD):
                T.buffer_store(self.out, vector(result[j : j + QUAD]), [at(token * self.n + column + j, QUAD)])
            for j, value in enumerate(result if self.norm else []):
                put(total, value, j)
        if self.norm and of_norm:  # here the lanes of a wave work together, but each has waited for its own words
            wave_meets(self.round.arch)
            found = vector([T.Bind(total[j]) for j in range(PAIR)])
            self.norm.store(self.round.arch, token, column, found, of_norm, mine)


def exchange(
    op: AllReduce | AllGather, capacity: int, arch: Device, name: str, peers: bool = False,
    plan: ExchangePlan | None = None, polls: int = POLLS,
) -> tirx.PrimFunc:  # fmt: skip
    """Kernel (state, X float32 [m, n], [R float32 [m, n]], [NG, [NS]], Y float32 [m, n], P, outputs of a prepared norm,
    Inbox int64 [..], Outbox0.. int64 [..], Control int32 [4]): computes the operator for all m rows. The parameters
    before Inbox are those of the operator's other kernel (parts.py); state and P are not used.

    capacity: words in a slot, the same in all kernels that share boxes. peers: if true, there is an outbox for each
    other rank, in the order of ranks, which is this rank's place in the inbox of the other; if false, there is one
    outbox. polls: see POLLS. When a thread gives up, Y is invalid, Control[FAILED] is set, and later launches do
    nothing. Raises ValueError unless the words of a round are whole cache lines and fit into a slot."""
    pairs, parts = op.words // 2, op.parts
    plan = plan or default_plan(4 * op.words, arch)
    count = -(-pairs // (plan.groups * plan.threads))
    with kernel(name) as ir:
        rest, values = (capacity, arch, peers, polls, plan.pause), op.m * op.n
        declared("int32", state=(4,))
        (partial,) = declared(X=(values,))
        if isinstance(op, AllReduce):
            added, width = Sum(op, *rest), PAIR
            round = added.round
        else:
            added, width = None, QUAD
            out, _ = declared(Y=(parts * values,), P=(parts * values,))
            round = Round(op, *rest)
        with launch((plan.groups,), (plan.threads,)) as (group, thread):
            round.begin(thread, plan.threads)

            def steps() -> Iterator[tuple[Expr, Expr]]:
                """(number of a pair, whether this thread exchanges it); the number is valid in any case."""
                with T.serial(count) as step:
                    i, last = T.Bind((group * count + step) * plan.threads + thread), T.int32(pairs - 1)
                    yield T.Bind(T.min(i, last)), T.Bind(round.alive & (i <= last))

            for i, mine in steps():
                round.send(i, _loaded(partial, i * width, width), mine)
            barrier()  # all threads of the workgroup have sent their pairs, and have read the number of the round
            for i, mine in steps():
                own = _loaded(partial, i * width, width)
                row, column = (T.Bind(f(i * width, T.int32(op.n))) for f in (T.truncdiv, T.truncmod))
                if added:
                    added.store(i, row, column, own, added.load(row, column), mine)
                    continue
                with when(mine):
                    for place, theirs in enumerate(round.received(i, own)):
                        begin = (row * parts + place) * op.n + column
                        T.buffer_store(out, vector(theirs), [at(begin, QUAD)])
            round.end(thread == 0, group, plan.groups)
    return ir.get()


def _added(terms: list[list[Expr]]) -> list[Expr]:
    total, *others = terms
    for one in others:
        total = [T.Bind(a + b) for a, b in zip(total, one, strict=True)]
    return total


def _loaded(buffer: Buffer, first: Expr, count: int) -> list[Expr]:
    return [x for j in range(0, count, QUAD) for x in elements(T.Bind(buffer[at(first + j, QUAD)]))]


def _sent(part: list[Expr], sums: bool) -> list[Expr]:
    """The values of a pair as int32 halves of words. For sums a half is two float16, otherwise one float32."""
    if not sums:
        return [T.Bind(T.reinterpret("int32", x)) for x in part]
    fit = [clamped(x) for x in part]
    pairs = [T.cast(vector(fit[j : j + 2]), "float16x2") for j in range(0, PAIR, 2)]
    return [T.Bind(T.reinterpret("int32", pair)) for pair in pairs]


def _words(halves: list[Expr]) -> list[Expr]:
    return [word(*halves[j : j + 2]) for j in (0, 2)]


def _received(
    box: Words, inbox: Buffer, places: Sequence[Expr], late: Buffer, polls: int, pause: int
) -> list[list[Expr]]:
    """Polls until a pair of words from each sender has arrived at `places`, then sets these to EMPTY. Returns the four
    halves of each pair. Sets late[0] to 1 if they do not arrive."""
    cells, waiting = local(2 * len(places), "int64"), filled(T.Select(late[0] == 0, T.int32(1), T.int32(0)))
    spent, idle = filled(T.int32(0)), filled(places[0])
    with T.While(waiting[0] != 0):
        missing = T.bool(False)
        for source, place in enumerate(places):
            for j, found in enumerate(box.load(inbox, place)):
                put(cells, found, 2 * source + j)
                for half in halves_of(found):
                    missing = missing | (half == EMPTY)
        put(late, T.Select(missing, T.int32(1), T.int32(0)), 0)
        for _ in range(pause):
            put(idle, T.truncdiv(T.int32(0x7FFFFFFF), idle[0] | T.int32(1)), 0)
        # depends on `idle`, so that the compiler does not remove the pause
        put(spent, spent[0] + T.Select(idle[0] == -1, T.int32(2), T.int32(1)), 0)
        put(waiting, T.Select(spent[0] < polls, late[0], T.int32(0)), 0)
    with when(late[0] == 0):
        for place in places:
            box.empty(inbox, place)
    found = [T.Bind(cells[j]) for j in range(2 * len(places))]
    return [[half for one in found[i : i + 2] for half in halves_of(one)] for i in range(0, len(found), 2)]


def _values(data: list[Expr], sums: bool) -> list[Expr]:
    """The float32 values in the halves of a pair."""
    if sums:
        return [half for one in data for half in halves(one)]
    return [T.Bind(T.reinterpret("float32", one)) for one in data]


def _in_order(own: list[Expr], got: list[list[Expr]], rank: Expr) -> list[list[Expr]]:
    """The values of all ranks, in the order of ranks. own: those of this rank; got: those of the others, in order."""
    found = []
    for place in range(len(got) + 1):
        values = own
        if place:
            values = [T.Select(rank < place, theirs, mine) for theirs, mine in zip(got[place - 1], values, strict=True)]
        if place < len(got):
            values = [T.Select(rank > place, theirs, mine) for theirs, mine in zip(got[place], values, strict=True)]
        found.append([T.Bind(value) for value in values])
    return found
