"""`AllReduce` and `AllGather` by a kernel that exchanges the parts while it runs, on all GPUs at once, instead of one
that gets them from the host between two segments of a step (parts.py). A kernel that computes a part may do it itself,
of the rows that its workgroups have (linear/gemv.py): `Sum`.

Each GPU sends its part to the others as words (words.py), rounded to float16 if it is to be added up, then waits for
theirs and adds all parts to the residual in the order of ranks: all have the same bits. It may prepare the norm of the
sum for the layers after it (linear/deferred_norm.py). GPUs write words to the others' inboxes themselves (`peers`), or
to an outbox, from which the host moves them (runtime/devices/exchange).

The kernel counts rounds, since recorded launches cannot carry numbers. They alternate between two slots of inboxes and
outboxes: a GPU begins round n + 2 when it has all words of round n + 1, which the others sent when they had those of
round n and had emptied their places, so nothing is overwritten that is still to be read. A workgroup waits for
what the others' workgroups of its own number send before they wait, and these words come before those of workgroups
with higher numbers: a GPU that starts them in order need not have room for all. Of the lowest number that any GPU has
not finished, all GPUs have started the workgroup, or have finished it.
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

QUAD = 4  # float32 of an access
PAIR = 8  # float16 of a pair of words; half as many float32
MOST_GROUPS = 64  # workgroups of a kernel that only exchanges
POLLS = 1 << 22  # of a thread in a round before it gives up: a second by estimate; a driver took 0.3 for a submission


@dataclass(frozen=True)
class ExchangePlan:
    groups: int  # workgroups, a power of two up to MOST_GROUPS
    threads: int  # of each
    # divisions between polls, so that POLLS take as long on CPUs that act as a GPU, and end loops after 65536 steps
    pause: int = 0


def pause_of(arch: Device) -> int:
    """That of a plan."""
    return 200 if arch.family == "generic" else 0


def default_plan(values: int, arch: Device) -> ExchangePlan:
    """Of so many values: many small workgroups, each has its own way to memory; on CPUs one."""
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
    """A kernel's part in a round of the exchanges of `op`. Declares the boxes: the last parameters. capacity, peers,
    polls: of `exchange`; pause: of its plan."""

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
        """Before all else. thread: number of this one out of `threads` that exchange."""
        self.box = Words(self.arch, thread, threads)
        done = T.shift_right(T.Bind(self.control[DONE]), T.int32(GROUPS.bit_length() - 1))
        self.slot = T.Bind((done + 1 & 1) * self.capacity)
        self.late = filled(self.control[FAILED])
        self.rank, self.alive = T.Bind(self.control[RANK]), T.Bind(self.late[0] == 0)

    def send(self, pair: Expr, part: list[Expr], mine: Expr) -> None:
        """Sends float32 values, those of a pair of words; mine: whether this thread is to exchange that pair."""
        sent = _words(_sent(part, self.sums))
        with when(mine):
            for outbox in self.outs:
                self.box.store(outbox, self.slot + pair * 2, *sent)

    def received(self, pair: Expr, part: list[Expr]) -> list[list[Expr]]:
        """What all ranks sent, in their order; part: what this one did. A thread has sent all its pairs before."""
        places = [source * outbox_words(self.capacity) + self.slot + pair * 2 for source in range(self.others)]
        got = _received(self.box, self.inbox, places, self.late, self.polls, self.pause)
        own, theirs = _sent(part, self.sums), [_values(data, self.sums) for data in got]
        return _in_order(_values(own, self.sums), theirs, self.rank)

    def end(self, first: Expr, group: Expr, groups: int) -> None:
        """After all else. group: number of the workgroup, of up to GROUPS; first: whether the thread is its first."""
        with when(self.late[0] != 0):
            T.buffer_store(self.control, T.int32(1), [FAILED])
        begin, end = (T.truncdiv((group + i) * GROUPS, T.int32(groups)) for i in (0, 1))
        share = end - begin if GROUPS % groups else T.int32(GROUPS // groups)
        with when(first):
            T.evaluate(T.call_intrin("int32", "tirx.atomic_add", T.address_of(self.control[DONE]), share))


class Sum:
    """An `AllReduce` by a kernel that exchanges: declares its parameters after X, and the boxes (`Round`, of which
    `rest` are the other arguments)."""

    def __init__(self, op: AllReduce, capacity: int, arch: Device, *rest):
        self.n, shape = op.n, (op.m * op.n,)
        (self.before,) = declared(R=shape if op.residual else None)
        self.norm = PreparedNorm(op.m, op.n, op.norm_out) if op.norm_out else None
        self.out, _ = declared(Y=shape, P=(op.parts * op.m * op.n,))
        if self.norm:
            self.norm.declare_outputs()
        self.round = Round(op, capacity, arch, *rest)

    def load(self, token: Expr, column: Expr) -> tuple[list[Expr], Loaded | None]:
        """What `store` takes besides, before words are waited for."""
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
        """Adds up a pair's columns `column`.. of a token; mine: as of `Round.send`, where the same `part` was sent."""
        (before, of_norm), total = loaded, filled(T.float32(0), PAIR)
        with when(mine):
            ordered = self.round.received(pair, part)
            result = _added([before, *ordered] if before else ordered)
            for j in range(0, PAIR, QUAD):
                T.buffer_store(self.out, vector(result[j : j + QUAD]), [at(token * self.n + column + j, QUAD)])
            for j, value in enumerate(result if self.norm else []):
                put(total, value, j)
        if self.norm and of_norm:  # all lanes of a wave, which waited for words each by itself
            wave_meets(self.round.arch)
            found = vector([T.Bind(total[j]) for j in range(PAIR)])
            self.norm.store(self.round.arch, token, column, found, of_norm, mine)


def exchange(
    op: AllReduce | AllGather, capacity: int, arch: Device, name: str, peers: bool = False,
    plan: ExchangePlan | None = None, polls: int = POLLS,
) -> tirx.PrimFunc:  # fmt: skip
    """Kernel (state, X float32 [m, n], [R float32 [m, n]], [NG, [NS]], Y float32 [m, n], P, what it prepares of a norm,
    Inbox int64 [..], Outbox0.. int64 [..], Control int32 [4]): what the operator says, of all m rows. The parameters
    before Inbox are the operator's; state and P are not used. capacity: words of a slot of the boxes, the same in all
    kernels that use them. peers: there is an outbox for each other rank, in the order of ranks, which is this one's
    part of its inbox; else one for all.
    polls: as of POLLS; when a thread gives up, Y is not valid, Control[FAILED] is set, and later launches do nothing.
    ValueError unless words fill cache lines and fit."""
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
                """(the number of a pair that exists; whether this thread is to exchange it)."""
                with T.serial(count) as step:
                    i, last = T.Bind((group * count + step) * plan.threads + thread), T.int32(pairs - 1)
                    yield T.Bind(T.min(i, last)), T.Bind(round.alive & (i <= last))

            for i, mine in steps():
                round.send(i, _loaded(partial, i * width, width), mine)
            barrier()  # all threads of the workgroup have sent all, and read the count
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
    """A pair of the part as the halves of two words: two float16 each where they are added up, else a float32."""
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
    """The halves of each sender's pair at `places`, once they arrive, and empties these; sets late[0] to 1 if they do
    not."""
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
        put(spent, spent[0] + T.Select(idle[0] == -1, T.int32(2), T.int32(1)), 0)  # so that the pause is computed
        put(waiting, T.Select(spent[0] < polls, late[0], T.int32(0)), 0)
    with when(late[0] == 0):
        for place in places:
            box.empty(inbox, place)
    found = [T.Bind(cells[j]) for j in range(2 * len(places))]
    return [[half for one in found[i : i + 2] for half in halves_of(one)] for i in range(0, len(found), 2)]


def _values(data: list[Expr], sums: bool) -> list[Expr]:
    """Of a pair's halves, as float32."""
    if sums:
        return [half for one in data for half in halves(one)]
    return [T.Bind(T.reinterpret("float32", one)) for one in data]


def _in_order(own: list[Expr], got: list[list[Expr]], rank: Expr) -> list[list[Expr]]:
    """The values of all ranks: `got` are those of the others."""
    found = []
    for place in range(len(got) + 1):
        values = own
        if place:
            values = [T.Select(rank < place, theirs, mine) for theirs, mine in zip(got[place - 1], values, strict=True)]
        if place < len(got):
            values = [T.Select(rank > place, theirs, mine) for theirs, mine in zip(got[place], values, strict=True)]
        found.append([T.Bind(value) for value in values])
    return found
