"""`AllReduce` and `AllGather` by a kernel that exchanges the parts while it runs, on all GPUs at once, instead of one
that gets them from the host between two segments of a step (parts.py).

Each GPU sends its part to the others as words (words.py), rounded to float16 if it is to be added up, then waits for
theirs and adds all parts to the residual in the order of ranks: all have the same bits. It may prepare the norm of the
sum for the layers after it (linear/deferred_norm.py). GPUs write words to the others' inboxes themselves (`peers`), or
to an outbox, from which the host moves them (runtime/devices/exchange).

The kernel counts rounds, since recorded launches cannot carry numbers. They alternate between two slots of inboxes and
outboxes: a GPU begins round n + 2 when it has all words of round n + 1, which the others sent when they had those of
round n and had emptied their places, so nothing is overwritten that is still to be read. A workgroup waits for
what the others' workgroups of its own number send before they wait, and these words come before those of workgroups
with higher numbers: a GPU that starts them in order need not have room for all.
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
from mlc_amd.schedules.gpu.linear.deferred_norm import PreparedNorm
from mlc_amd.schedules.operators.exchange import AllGather, AllReduce
from mlc_amd.schedules.tir import Buffer, Expr, declared

QUAD = 4  # float32 of an access
PAIR = 8  # float16 of a pair of words; half as many float32
POLLS = 1 << 22  # of a thread in a round before it gives up: a second by estimate; a driver took 0.3 for a submission


@dataclass(frozen=True)
class ExchangePlan:
    groups: int  # workgroups, a power of two up to GROUPS
    threads: int  # of each
    # divisions between polls, so that POLLS take as long on CPUs that act as a GPU, and end loops after 65536 steps
    pause: int = 0


def default_plan(values: int, arch: Device) -> ExchangePlan:
    """Of so many values: many small workgroups, each has its own way to memory; on CPUs one."""
    if arch.family == "generic":
        return ExchangePlan(1, min(arch.threads, 16), 200)
    groups, pairs = GROUPS, values // PAIR
    while groups > 1 and groups * arch.wave > pairs:
        groups //= 2
    threads = arch.wave
    while groups * threads < pairs and 2 * threads <= arch.threads:
        threads *= 2
    return ExchangePlan(groups, threads)


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
    values, parts, words, sums = op.m * op.n, op.parts, op.words, isinstance(op, AllReduce)
    if words % LINE or words > capacity:
        raise ValueError(f"{op.m} x {op.n} values are no whole cache lines of words, or more than {capacity} words")
    plan = plan or default_plan(4 * words, arch)
    with kernel(name) as ir:
        declared("int32", state=(4,))
        shape, whole = (values,), (parts * values,)
        partial, before = declared(X=shape, R=shape if isinstance(op, AllReduce) and op.residual else None)
        norm = PreparedNorm(op.m, op.n, op.norm_out) if isinstance(op, AllReduce) and op.norm_out else None
        out, _ = declared(Y=shape if sums else whole, P=whole)
        if norm:
            norm.declare_outputs()
        outboxes = {f"Outbox{i}": (outbox_words(capacity),) for i in range(parts - 1 if peers else 1)}
        inbox, *outs = declared("int64", Inbox=(inbox_words(parts, capacity),), **outboxes)
        (control,) = declared("int32", Control=(CONTROL,))
        with launch((plan.groups,), (plan.threads,)) as (group, thread):
            box = Words(arch, thread, plan.threads)
            done = T.shift_right(T.Bind(control[DONE]), T.int32(GROUPS.bit_length() - 1))
            slot = T.Bind((done + 1 & 1) * capacity)
            late = filled(control[FAILED])
            rank, alive, last = T.Bind(control[RANK]), T.Bind(late[0] == 0), T.int32(words // 2 - 1)
            count = -(-words // 2 // (plan.groups * plan.threads))

            def steps() -> Iterator[tuple[Expr, Expr]]:
                """(the number of a pair that exists; whether this thread is to exchange it)."""
                with T.serial(count) as step:
                    i = T.Bind((group * count + step) * plan.threads + thread)
                    yield T.Bind(T.min(i, last)), T.Bind(alive & (i <= last))

            for i, mine in steps():
                sent = _words(_sent(partial, i, sums))
                with when(mine):
                    for outbox in outs:
                        box.store(outbox, slot + i * 2, *sent)
            barrier()  # all threads of the workgroup have sent all, and read the count
            for i, mine in steps():
                own = _values(_sent(partial, i, sums), sums)  # loads before words are waited for
                residual = [] if before is None else [_loaded(before, i * PAIR, PAIR)]
                if norm:
                    token, column = (T.Bind(f(i * PAIR, T.int32(op.n))) for f in (T.truncdiv, T.truncmod))
                    loaded, total = norm.load(token, column, PAIR), filled(T.float32(0), PAIR)
                with when(mine):
                    places = [source * outbox_words(capacity) + slot + i * 2 for source in range(parts - 1)]
                    got = _received(box, inbox, places, late, polls, plan.pause)
                    ordered = _in_order(own, [_values(data, sums) for data in got], rank)
                    if sums:
                        result = _added([*residual, *ordered])
                        for j in range(0, PAIR, QUAD):
                            T.buffer_store(out, vector(result[j : j + QUAD]), [at(i * PAIR + j, QUAD)])
                        for j, value in enumerate(result if norm else []):
                            put(total, value, j)
                    else:
                        row = T.Bind(T.truncdiv(i * QUAD, T.int32(op.n)))
                        for place, theirs in enumerate(ordered):
                            begin = (row * (parts - 1) + place) * op.n + i * QUAD  # of row * parts + place
                            T.buffer_store(out, vector(theirs), [at(begin, QUAD)])
                if norm:  # all lanes of a wave, which waited for words each by itself
                    wave_meets(arch)
                    found = vector([T.Bind(total[j]) for j in range(PAIR)])
                    norm.store(arch, token, column, found, loaded, mine)
            with when(late[0] != 0):
                T.buffer_store(control, T.int32(1), [FAILED])
            with when(thread == 0):
                share = T.int32(GROUPS // plan.groups)
                T.evaluate(T.call_intrin("int32", "tirx.atomic_add", T.address_of(control[DONE]), share))
    return ir.get()


def _added(terms: list[list[Expr]]) -> list[Expr]:
    total, *others = terms
    for one in others:
        total = [T.Bind(a + b) for a, b in zip(total, one, strict=True)]
    return total


def _loaded(buffer: Buffer, first: Expr, count: int) -> list[Expr]:
    return [x for j in range(0, count, QUAD) for x in elements(T.Bind(buffer[at(first + j, QUAD)]))]


def _sent(partial: Buffer, i: Expr, sums: bool) -> list[Expr]:
    """Pair i of the part as the halves of two words: two float16 each where they are added up, else a float32."""
    if not sums:
        return [T.Bind(T.reinterpret("int32", x)) for x in _loaded(partial, i * QUAD, QUAD)]
    fit = [clamped(x) for x in _loaded(partial, i * PAIR, PAIR)]
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
