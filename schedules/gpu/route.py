"""The router of a mixture of experts: from each row's logits to its experts and their weights.

In: `state` int32[4], L float32 [m, n] with the logits of `count` experts in front, and optionally B (added to the
probabilities that choose, not to the weights) and F (factors of the weights), a number for each expert. Out, for live
rows: Ids int32 [m, used], best first, and Weights float32 [m, used]. Of equal experts the lower one is first.

A wave makes a row; its lanes have the experts lane, lane + wave, ...; each of `used` steps takes the best one left. All
arithmetic is float32: a rounded logit would choose other experts.
"""

import functools
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import LOG2E
from mlc_amd.schedules.experts import GATINGS, MIN_SUM, Experts
from mlc_amd.schedules.gpu.device import barrier, exp2, launch, maximum, rcp, wave_max, wave_min, wave_sum
from mlc_amd.schedules.gpu.planes import padded
from mlc_amd.schedules.gpu.registers import local, put
from mlc_amd.schedules.gpu.step import if_live, kernel, state_arg

TAKEN = -3.0e38  # of an expert that cannot be chosen: below all scores
NONE = 1 << 30  # above all experts' numbers


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen and weighed.

    gating            a name of schedules.experts.GATINGS
    scale, normalize  weights are divided by their sum (at least MIN_SUM) and multiplied by `scale`
    bias, factors     whether there are the parameters B and F
    groups            of neighbouring experts, ranked by the sum of their two best scores; experts of the best
                      `groups_used` groups may be chosen. 0 or 1: all may
    """

    gating: str
    scale: float
    normalize: bool
    bias: bool
    factors: bool
    groups: int
    groups_used: int


def check(experts: Experts, routing: Routing) -> bool:
    """Whether some groups of experts are left out. ValueError for a gating that is not known, and for groups that do
    not fit."""
    count, used, groups = experts.count, experts.used, routing.groups
    grouped = groups > 1 and routing.groups_used < groups
    if routing.gating not in GATINGS:
        raise ValueError(f"unknown gating {routing.gating!r}; known are {', '.join(GATINGS)}")
    if grouped and (count % groups or used > count // groups * routing.groups_used):
        raise ValueError(f"{routing.groups_used} of {groups} groups of {count} experts do not give {used}")
    return grouped


def routing_args(experts: Experts, routing: Routing) -> list:
    """Declares the parameters B and F, as far as there are any: [B or None, F or None]."""
    wanted = (("B", routing.bias), ("F", routing.factors))
    return [T.arg(which, T.buffer((padded(experts.count),), "float32")) if there else None for which, there in wanted]


def choice_args(experts: Experts, m) -> list:
    """Declares the parameters Ids and Weights."""
    dtypes = {"Ids": "int32", "Weights": "float32"}
    return [T.arg(which, T.buffer((m, experts.used), dtype)) for which, dtype in dtypes.items()]


def route(n, m, experts: Experts, routing: Routing, arch, name) -> tirx.PrimFunc:
    """Kernel (state, L float32 [m, n], [B float32 [count, padded to 16]], [F as B], Ids int32 [m, used], Weights
    float32 [m, used]). ValueError as of `check`."""
    count, used, wave = experts.count, experts.used, arch.wave
    grouped = check(experts, routing)
    with kernel(name) as ir:
        state, L = state_arg(), T.arg("L", T.buffer((m, n), "float32"))
        B, F = routing_args(experts, routing)
        Ids, Weights = choice_args(experts, m)
        with launch((m,), (wave,)) as (row, lane):
            held = Held(arch, count, lane, routing, grouped)
            places = [T.Bind(lane + first) for first in range(0, used, wave)]  # a lane's share of the chosen ones
            ids, values = local(len(places), "int32"), local(len(places))
            for i in range(len(places)):
                put(ids, T.int32(0), i)
                put(values, T.float32(TAKEN), i)
            with if_live(state, m, row):
                held.load(lambda expert: L[row, expert], B)
                if grouped:
                    held.leave_groups()
                with T.serial(used) as j:
                    expert, value = held.take()
                    for i, place in enumerate(places):
                        put(ids, T.Select(place == j, expert, ids[i]), i)
                        put(values, T.Select(place == j, value, values[i]), i)
                inside = [place < used for place in places]
                weights = weigh(arch, routing, [T.Bind(values[i]) for i in range(len(places))], inside)
                for i, (place, weight) in enumerate(zip(places, weights, strict=True)):
                    with T.If(inside[i]), T.Then():
                        put(Ids, ids[i], row, place)
                        put(Weights, weight * F[ids[i]] if F is not None else weight, row, place)
    return ir.get()


class Held:
    """What a wave holds of a row: for each of a lane's experts its number, its probability and the score that chooses
    it."""

    def __init__(self, arch, count, lane, routing, grouped):
        self.arch, self.count, self.lane, self.routing = arch, count, lane, routing
        self.steps = -(-count // arch.wave)
        self.numbers = [T.Bind(lane + i * arch.wave) for i in range(self.steps)]
        self.p, self.scores = local(self.steps), local(self.steps)
        if grouped:
            self.all = T.alloc_buffer((count,), "float32", scope="shared")
            self.ranks = T.alloc_buffer((routing.groups,), "float32", scope="shared")
            self.open = T.alloc_buffer((routing.groups,), "int32", scope="shared")

    def _inside(self, i):
        """Whether number i of a lane's experts exists; None: on every lane."""
        return None if (i + 1) * self.arch.wave <= self.count else self.numbers[i] < self.count

    def _or(self, i, value, otherwise):
        inside = self._inside(i)
        return T.Bind(value if inside is None else T.Select(inside, value, T.float32(otherwise)))

    def _index(self, i):
        """The expert's number, inside the arrays in any case."""
        return self.numbers[i] if self._inside(i) is None else T.min(self.numbers[i], T.int32(self.count - 1))

    def load(self, logit, B):
        """logit(expert): of the row. B: of `route`, or None."""
        logits = [self._or(i, logit(self._index(i)), TAKEN) for i in range(self.steps)]
        values = {"softmax": self._softmax, "sigmoid": self._sigmoid, "softmax_used": list}[self.routing.gating](logits)
        for i, value in enumerate(values):
            put(self.p, value, i)
            score = value if B is None else value + B[self._index(i)]
            put(self.scores, self._or(i, score, TAKEN), i)

    def _softmax(self, logits):
        top = wave_max(self.arch, functools.reduce(maximum, logits))
        parts = [self._or(i, exp2((x - top) * T.float32(LOG2E)), 0.0) for i, x in enumerate(logits)]
        inverse = rcp(wave_sum(self.arch, T.Bind(functools.reduce(lambda x, y: x + y, parts))))
        return [T.Bind(x * inverse) for x in parts]

    def _sigmoid(self, logits):
        return [rcp(T.float32(1) + exp2(x * T.float32(-LOG2E))) for x in logits]

    def leave_groups(self):
        """Takes away the experts of all but the best groups."""
        groups, used, size = self.routing.groups, self.routing.groups_used, self.count // self.routing.groups
        for i in range(self.steps):
            with T.If(self.numbers[i] < self.count), T.Then():
                put(self.all, self.scores[i], self.numbers[i])
        barrier()
        for first in range(0, groups, self.arch.wave):
            group = T.Bind(self.lane + first)
            with T.If(group < groups), T.Then():
                best, second = local(1), local(1)
                put(best, T.float32(TAKEN), 0)
                put(second, T.float32(TAKEN), 0)
                with T.serial(size) as i:
                    x = T.Bind(self.all[group * size + i])
                    put(second, T.Select(x > best[0], best[0], T.Select(x > second[0], x, second[0])), 0)
                    put(best, T.Select(x > best[0], x, best[0]), 0)
                put(self.ranks, best[0] + second[0], group)
        barrier()
        for first in range(0, groups, self.arch.wave):
            group = T.Bind(self.lane + first)
            with T.If(group < groups), T.Then():
                mine, above = T.Bind(self.ranks[group]), local(1, "int32")
                put(above, T.int32(0), 0)
                with T.serial(groups) as other:
                    x = T.Bind(self.ranks[other])
                    before = (x > mine) | ((x == mine) & (other < group))
                    put(above, above[0] + T.cast(before, "int32"), 0)
                put(self.open, T.cast(above[0] < used, "int32"), group)
        barrier()
        for i in range(self.steps):
            is_open = self.open[self._index(i) // size] > 0
            put(self.scores, T.Select(is_open, self.scores[i], T.float32(TAKEN)), i)

    def take(self):
        """(the best expert left, its probability), the same in all lanes; it is not there any more afterwards."""
        best = functools.reduce(maximum, [T.Bind(self.scores[i]) for i in range(self.steps)])
        best = wave_max(self.arch, best)
        first = T.int32(NONE)
        for i in reversed(range(self.steps)):
            first = T.Select(self.scores[i] == best, self.numbers[i], first)
        # scores that are no numbers equal nothing
        expert = T.Bind(T.min(wave_min(self.arch, T.Bind(first)), T.int32(self.count - 1)))
        value = T.float32(0)
        for i in range(self.steps):
            here = T.Bind(self.numbers[i] == expert)
            value = value + T.Select(here, self.p[i], T.float32(0))
            put(self.scores, T.Select(here, T.float32(TAKEN), self.scores[i]), i)
        return expert, wave_sum(self.arch, T.Bind(value))


def weigh(arch, routing, values, inside):
    """The weights of the chosen experts, of which a lane has those that are `inside`: their probabilities, or logits
    for softmax_used."""
    factor = T.float32(routing.scale)
    if routing.gating == "softmax_used":
        top = wave_max(arch, functools.reduce(maximum, values))
        values = [exp2((x - top) * T.float32(LOG2E)) for x in values]
    if routing.gating == "softmax_used" or routing.normalize:
        values = [T.Bind(T.Select(here, x, T.float32(0))) for x, here in zip(values, inside, strict=True)]
        total = wave_sum(arch, T.Bind(functools.reduce(lambda x, y: x + y, values)))
        if routing.gating != "softmax_used":
            total = maximum(total, T.float32(MIN_SUM))
        factor = T.Bind(factor * rcp(total))
    return [T.Bind(x * factor) for x in values]
