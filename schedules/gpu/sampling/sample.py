"""The kernel of `Sample` on GPUs: it chooses a token for each row of logits.

In: logits float32 [n, columns], of which the first `vocab` are tokens, and the buffers of runtime/sampling/layout.py.
Out: token ids, and the logarithms of their probabilities according to the unchanged logits. A row with a logit that is
NaN or infinite gets the id -1.

Two launches. In the first, a workgroup reads a part of a row, applies the row's changes, and computes the part's
largest logit and sums; for a draw also the adjusted logits, and the largest logits of the part's pieces. In the second,
each row has one workgroup, of the largest size of the arch. It joins the parts, and takes the token with the largest
logit, or draws a token (sample_search.py).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.sampling.layout import ADJUST, CHANGES, DRAW, LOGPROB, MASK, RECENT, TOKEN
from mlc_amd.schedules.gpu.base.device import barrier, exp2, intrin, launch, maximum, wave_max
from mlc_amd.schedules.gpu.base.group import Group
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, filled, lane_of, local, put, vector
from mlc_amd.schedules.gpu.base.step import builds, if_live, where
from mlc_amd.schedules.gpu.sampling.sample_search import STEPS, WIDTH, RowDraw, Workgroup, team_of
from mlc_amd.schedules.operators import Sample
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.sampling_machine import LARGEST, LOWEST, SampleArgs, Var, Words, sample_args, when
from mlc_amd.schedules.tir import Buffer, Expr

# Indices of the facts about a part that the first launch passes to the second. TOP: largest logit. CHANGED_TOP: largest
# adjusted logit. TOKEN_BITS: the first token with CHANGED_TOP, int32 bits. BAD_BITS: 1 if a logit is NaN or infinite,
# int32 bits. SUM: sum of e**(logit - TOP). CHANGED_SUM: sum of e**(adjusted logit - CHANGED_TOP). HEATED_SUM: sum of
# e**((adjusted logit - CHANGED_TOP) / temperature). FACTS: size of a part's facts, with padding.
TOP, CHANGED_TOP, TOKEN_BITS, BAD_BITS, SUM, CHANGED_SUM, HEATED_SUM, FACTS = 0, 1, 2, 3, 4, 5, 6, 8


# join(result for the parts so far, fact): the result with another part, where fact(index) returns a fact of this part
Join = Callable[[Expr, Callable[[int], Expr]], Expr]


class Found(NamedTuple):
    """Buffers between the launches. parts: facts, float32 [m, parts, FACTS]. tops: the largest logits of pieces,
    float32 [m, pieces]."""

    parts: Buffer
    tops: Buffer


@builds(Sample)
def sample(op: Sample, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, Logits float32 [m, columns], sampling, changes, allowed, Sampled int32 [m], LogProbs float32 [m],
    Adjusted float32 [m, columns]). LogProbs is 0 unless the row's flags have LOGPROB. Adjusted is workspace."""
    n, waves, most = op.m, arch.threads // arch.wave, arch.most_threads // arch.wave
    parts = -(-op.vocab // (arch.threads * WIDTH * STEPS))
    args = sample_args(op)
    Parts = T.alloc_buffer((n, parts, FACTS), "float32")
    found = Found(Parts, T.alloc_buffer((n, parts * (arch.threads // team_of(arch))), "float32"))
    with launch((parts, n), (arch.wave, waves)) as (part, row, lane, wave), if_live(state, None, row):
        _survey(args, op.vocab, found, Group(arch, lane, wave, waves), part, row)
    with launch((n,), (arch.wave, most)) as (row, lane, wave), if_live(state, None, row):
        _choose(args, op.vocab, found, Group(arch, lane, wave, most), row)


def _survey(args: SampleArgs, vocab: int, found: Found, group: Group, part: Expr, row: Expr) -> None:
    """The first launch: computes the facts of a part of a row; for a draw it also stores Adjusted and tops."""
    arch, threads, tid, words = group.arch, group.threads, group.tid, Words(args.words, row)
    Logits, Adjusted, Parts, Tops, columns = args.logits, args.adjusted, *found, int(args.logits.shape[1])
    flags, first = words.int("flags"), T.Bind(part * (threads * WIDTH * STEPS))
    starts = [T.Bind(first + (i * threads + tid) * WIDTH) for i in range(STEPS)]
    x, y, bad = local(STEPS * WIDTH), local(STEPS * WIDTH), filled(T.int32(0))
    for i, start in enumerate(starts):
        values = T.Bind(Logits[row, at(T.min(start, T.int32(columns - WIDTH)), WIDTH)])
        for k in range(WIDTH):
            value, inside = T.Bind(lane_of(values, k)), start + k < vocab
            infinite = (T.reinterpret("int32", value) & T.int32(LARGEST)) >= T.int32(0x7F800000)
            put(bad, bad[0] | T.cast(inside & infinite, "int32"), 0)
            value = T.Bind(T.Select(inside, value, T.float32(LOWEST)))
            put(x, value, i * WIDTH + k)
            put(y, value, i * WIDTH + k)
    with when((flags & ADJUST) > 0):
        _adjust(args, group, row, flags, (x, y), first, starts)
    largest = (functools.reduce(maximum, [values[i] for i in range(STEPS * WIDTH)]) for values in (x, y))
    raw_tops, tops = group.of_waves(*(wave_max(arch, T.Bind(top)) for top in largest))
    top, changed_top = (group.joined(part, "max") for part in (raw_tops, tops))
    token = T.int32(LARGEST)
    for i, start in reversed(list(enumerate(starts))):
        for k in reversed(range(WIDTH)):
            # Padding after the vocabulary has the same logit as tokens that must not be chosen, but comes after them.
            token = T.Bind(T.Select(y[i * WIDTH + k] == changed_top, start + k, token))
    token, bad = group.reduce((token, "least"), (bad[0], "most"))
    totals = filled(T.float32(0), 3)
    with where((flags & (DRAW | LOGPROB)) > 0):
        sums = [T.float32(0)] * 3
        heat = words.float("heat")
        for i, start in enumerate(starts):
            for k in range(WIDTH):
                inside = start + k < vocab
                distance = T.Bind(y[i * WIDTH + k] - changed_top)
                scaled = ((x[i * WIDTH + k] - top) * T.float32(LOG2E), distance * T.float32(LOG2E), distance * heat)
                sums = [
                    T.Bind(total + T.Select(inside, _power(power), T.float32(0)))
                    for total, power in zip(sums, scaled, strict=True)
                ]
        for i, total in enumerate(group.reduce(*((total, "sum") for total in sums))):
            put(totals, total, i)
    with when((flags & DRAW) > 0):
        for i, start in enumerate(starts):
            with T.If(start < columns), T.Then():
                values = [T.Bind(y[i * WIDTH + k]) for k in range(WIDTH)]
                T.buffer_store(Adjusted, vector(values), [row, at(start, WIDTH)])
        teams, waves = threads // team_of(arch), team_of(arch) // arch.wave
        with T.If(tid < teams), T.Then():
            best = functools.reduce(maximum, [tops[tid * waves + i] for i in range(waves)])
            put(Tops, best, row, part * teams + tid)
    with T.If(tid == 0), T.Then():
        bits = [T.reinterpret("float32", value) for value in (token, bad)]
        for index, value in enumerate((top, changed_top, *bits, *(totals[i] for i in range(3)))):
            put(Parts, value, row, part, index)


def _adjust(
    args: SampleArgs, group: Group, row: Expr, flags: Expr, logits: tuple[Buffer, Buffer], first: Expr, starts: list
) -> None:
    """Applies the row's changes and its mask. logits: (input, output), registers of this thread. first: the part's
    first token. starts: the first tokens of this thread's vectors."""
    (x, y), words, threads, tid = logits, Words(args.words, row), group.threads, group.tid
    changes, allowed = args.changes, args.allowed
    held = T.alloc_buffer((threads * WIDTH * STEPS,), "float32", scope="shared")
    for i, start in enumerate(starts):
        for k in range(WIDTH):
            put(held, x[i * WIDTH + k], start - first + k)
    barrier()
    penalty, inverse = words.float("penalty"), words.float("inverse")
    with T.serial(-(-CHANGES // threads)) as step:
        index = T.Bind(step * threads + tid)
        entry = T.Bind(T.min(index, T.int32(CHANGES - 1)))
        change, added = T.Bind(changes[row, entry, 0]), T.Bind(T.reinterpret("float32", changes[row, entry, 1]))
        place = T.Bind((change & T.int32(TOKEN)) - first)
        with T.If((index < words.int("changes")) & (place >= 0) & (place < threads * WIDTH * STEPS)), T.Then():
            # Load and store are in one statement; otherwise TVM would require a barrier between them.
            changed = held[place] * T.Select(held[place] > T.float32(0), inverse, penalty)
            put(held, T.Select((change & T.int32(RECENT)) > 0, changed, held[place]) + added, place)
        barrier()
    masked = T.Bind((flags & MASK) > 0)
    last = int(allowed.shape[1]) - 1
    for i, start in enumerate(starts):
        bits = T.Bind(allowed[row, T.min(T.shift_right(start, T.int32(5)), T.int32(last))])
        for k in range(WIDTH):
            bit = T.shift_right(bits, (start & T.int32(31)) + k) & T.int32(1)
            put(y, T.Select(masked & (bit == 0), T.float32(LOWEST), held[start - first + k]), i * WIDTH + k)


def _power(x: Expr) -> Expr:
    """2**x for x <= 0; about 0 for x < -200."""
    return exp2(maximum(x, T.float32(-200)))


def _choose(args: SampleArgs, vocab: int, found: Found, group: Group, row: Expr) -> None:
    """The second launch: chooses the token of a row."""
    Parts, words, threads, tid = found.parts, Words(args.words, row), group.threads, group.tid
    parts = int(Parts.shape[1])
    flags = words.int("flags")

    def over_parts(start: Expr, join: Join) -> Expr:
        """Joins the parts of each thread by `join`, beginning with `start`."""
        total = filled(start)
        with T.serial(-(-parts // threads)) as step:
            part = T.Bind(step * threads + tid)
            index = T.Bind(T.min(part, T.int32(parts - 1)))
            put(total, T.Select(part < parts, join(total[0], lambda fact: Parts[row, index, fact]), total[0]), 0)
        return T.Bind(total[0])

    def bits(value: Expr) -> Expr:
        return T.reinterpret("int32", value)

    def sums_of(top_of: int, top: Expr, *pairs: tuple[int, Expr]) -> list[Expr]:
        def sum_of(which: int, heat: Expr) -> Expr:
            return over_parts(
                T.float32(0), lambda total, fact: total + fact(which) * _power((fact(top_of) - top) * heat)
            )

        return group.reduce(*((sum_of(*pair), "sum") for pair in pairs))

    lowest, heat = T.float32(LOWEST), T.float32(LOG2E)
    top = over_parts(lowest, lambda best, fact: T.max(best, fact(CHANGED_TOP)))
    bad = over_parts(T.int32(0), lambda any_of, fact: any_of | bits(fact(BAD_BITS)))
    top, bad = group.reduce((top, "max"), (bad, "most"))

    def first_of(token: Expr, fact: Callable[[int], Expr]) -> Expr:
        return T.min(token, T.Select(fact(CHANGED_TOP) == top, bits(fact(TOKEN_BITS)), T.int32(LARGEST)))

    (token,) = group.reduce((over_parts(T.int32(LARGEST), first_of), "least"))
    chosen = Var(local(1, "int32"), token)
    with when(((flags & DRAW) > 0) & (bad == 0)):
        z, z_heat = sums_of(CHANGED_TOP, top, (CHANGED_SUM, heat), (HEATED_SUM, words.float("heat")))
        machine = Workgroup(group.arch, group, args.adjusted, found.tops, row, vocab)
        RowDraw(machine, words, top, (z, z_heat), chosen).emit()
    put_probability = filled(T.float32(0))
    with when(((flags & LOGPROB) > 0) & (bad == 0)):
        raw = over_parts(lowest, lambda best, fact: T.max(best, fact(TOP)))
        (raw,) = group.reduce((raw, "max"))
        (total,) = sums_of(TOP, raw, (SUM, heat))
        logarithm = intrin("float32", "llvm.amdgcn.log.f32", total) * T.float32(math.log(2))
        put(put_probability, args.logits[row, chosen.get()] - raw - logarithm, 0)
    with T.If(tid == 0), T.Then():
        put(args.sampled, T.Select(bad > 0, T.int32(-1), chosen.get()), row)
        put(args.logprobs, put_probability[0], row)
