"""The router of a mixture of experts on GPUs: the kernels of `Route` and `NormRoute`, which choose the experts of each
row, and compute their weights.

In: `state` int32[4]; L float32 [m, n], whose first `count` columns are the experts' logits; optionally, a number for
each expert: B (added to the probabilities for the choice, but not to the weights) and F (factors of the weights). Out,
for live rows: Ids int32 [m, used], the best expert first, and Weights float32 [m, used]. Of equal experts the one with
the lower number is first.

A wave processes a row. A lane has the experts lane, lane + wave size, .. in registers. Each of `used` steps chooses the
best of the remaining experts. All arithmetic is float32, because rounded logits would choose other experts.

`norm_route` does this for one row, and before it the norm and the logits, in one launch: y = x * G / sqrt(mean(x*x) +
eps), L = y W^T [+ bias]. A workgroup computes the logit of one expert. 1 / sqrt(..) is a factor of the sum of x * G *
W, so the sum of squares and this sum are computed in the same loop. Each workgroup stores its logit to Logits. A wave
of the last workgroup that arrives (base/arrival.py) chooses the experts.
"""

import functools
from collections.abc import Callable, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import device
from mlc_amd.schedules.gpu.base.arrival import LINE, Outbox, arrive, zero_after
from mlc_amd.schedules.gpu.base.device import barrier, exp2, fma, launch, maximum, rcp, rsqrt, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.norm import row_scale
from mlc_amd.schedules.gpu.base.planes import BLOCK, padded, plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, emit_store, load_columns, result_args
from mlc_amd.schedules.gpu.base.registers import filled, local, owned, put
from mlc_amd.schedules.gpu.base.step import builds, exchanges, if_live
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.operators import NormRoute
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.operators.experts import GATINGS, MIN_SUM, Route, Routing
from mlc_amd.schedules.runs import softplus
from mlc_amd.schedules.tir import Buffer, Expr, declared

THREADS = 256  # largest number of threads of a workgroup; for 2048 columns each thread then has two loads
STEPS = 4  # number of steps whose loads are issued before the first one is used
LOWEST = -3.0e38  # less than all scores
LEAST = 1e-30  # lower bound of softplus before the square root
LAST = -(1 << 31)  # key of experts that cannot be chosen: less than the keys of all scores
NONE = 1 << 30  # larger than the numbers of all experts


def check(routing: Routing) -> bool:
    """Whether experts can only be chosen from some groups. Raises ValueError for an unknown gating, for groups that do
    not divide the experts, and if the chosen groups have too few experts."""
    count, used, groups = routing.experts, routing.used, routing.groups
    grouped = groups > 1 and routing.groups_used < groups
    if routing.gating not in GATINGS:
        raise ValueError(f"unknown gating {routing.gating!r}; known are {', '.join(GATINGS)}")
    if grouped and (count % groups or used > count // groups * routing.groups_used):
        raise ValueError(
            f"{used} experts cannot be chosen from {routing.groups_used} of {groups} groups of {count} experts"
        )
    return grouped


def routing_args(routing: Routing) -> list[Buffer | None]:
    """Declares the parameters B and F if the operator has them: [B or None, F or None]."""
    each = (padded(routing.experts),)
    return declared(B=each if routing.bias else None, F=each if routing.factors else None)


def choice_args(routing: Routing) -> list[Buffer]:
    """Declares the parameters Ids and Weights."""
    return [T.arg(which, T.buffer(*of)) for which, of in zip(("Ids", "Weights"), routing.choice(), strict=True)]


@builds(Route)
def route(op: Route, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, L float32 [m, n], [B float32 [count, padded to 16]], [F, in the shape of B], Ids int32 [m, used],
    Weights float32 [m, used]). Raises ValueError as `check` does."""
    L = T.arg("L", T.buffer((op.m, op.n), "float32"))
    B, F = routing_args(op)
    Ids, Weights = choice_args(op)
    with launch((op.m,), (arch.wave,)) as (row, lane):
        held = Held(arch, op, lane, B, F)
        with if_live(state, op.m, row):
            held.load(lambda expert: L[row, expert])
            held.choose()
            held.store(row, Ids, Weights)


class Held:
    """A row in the registers of a wave: for each of a lane's experts its number, its probability, its score for the
    choice, and its place among the chosen experts. B, F: parameters of `route`, or None. Raises ValueError as `check`
    does."""

    def __init__(self, arch: Device, routing: Routing, lane: Expr, B: Buffer | None, F: Buffer | None):
        self.arch, self.count, self.used, self.lane, self.routing = arch, routing.experts, routing.used, lane, routing
        self.grouped = check(routing)
        self.steps = -(-self.count // arch.wave)
        self.numbers = [T.Bind(lane + i * arch.wave) for i in range(self.steps)]
        self.biases, self.factors = self._entries(B), self._entries(F)
        self.p, self.scores = local(self.steps), local(self.steps)
        self.keys, self.places = local(self.steps, "int32"), local(self.steps, "int32")
        if self.grouped:
            self.all = T.alloc_buffer((self.count,), "float32", scope="shared")
            self.ranks = T.alloc_buffer((routing.groups,), "float32", scope="shared")
            self.open = T.alloc_buffer((routing.groups,), "int32", scope="shared")

    def _entries(self, parameter: Buffer | None) -> list[Expr] | None:
        """The elements of a parameter for a lane's experts; None for None."""
        return None if parameter is None else [T.Bind(parameter[self._index(i)]) for i in range(self.steps)]

    def _inside(self, i: int) -> Expr | None:
        """A condition: a lane's expert number i exists; None: it exists on every lane."""
        return None if (i + 1) * self.arch.wave <= self.count else self.numbers[i] < self.count

    def _or(self, i: int, value: Expr, otherwise: Expr) -> Expr:
        """`value` if a lane's expert number i exists, else `otherwise`."""
        inside = self._inside(i)
        return T.Bind(value if inside is None else T.Select(inside, value, otherwise))

    def _index(self, i: int) -> Expr:
        """The number of a lane's expert number i, clamped to those that exist."""
        return self.numbers[i] if self._inside(i) is None else T.min(self.numbers[i], T.int32(self.count - 1))

    def load(self, logit: Callable[[Expr], Expr]) -> None:
        """Loads the logits, and computes probabilities and scores. logit(expert): returns the row's logit. All waves of
        a workgroup must execute this; if not `grouped`, one wave is enough."""
        logits = [self._or(i, logit(self._index(i)), T.float32(LOWEST)) for i in range(self.steps)]
        made = {"softmax": self._softmax, "sigmoid": self._sigmoid, "sqrt_softplus": _sqrt_softplus}
        values = made.get(self.routing.gating, list)(logits)
        for i, value in enumerate(values):
            put(self.p, value, i)
            put(self.scores, value if self.biases is None else value + self.biases[i], i)
        if self.grouped:
            self._leave_groups()

    def _softmax(self, logits: list[Expr]) -> list[Expr]:
        top = wave_max(self.arch, functools.reduce(maximum, logits))
        parts = [self._or(i, exp2((x - top) * T.float32(LOG2E)), T.float32(0)) for i, x in enumerate(logits)]
        inverse = rcp(wave_sum(self.arch, T.Bind(functools.reduce(lambda x, y: x + y, parts))))
        return [T.Bind(x * inverse) for x in parts]

    def _sigmoid(self, logits: list[Expr]) -> list[Expr]:
        return [rcp(T.float32(1) + exp2(x * T.float32(-LOG2E))) for x in logits]

    def _leave_groups(self) -> None:
        """Removes the experts outside the best groups from the choice."""
        groups, used, size = self.routing.groups, self.routing.groups_used, self.count // self.routing.groups
        for i in range(self.steps):
            with T.If(self.numbers[i] < self.count), T.Then():
                put(self.all, self.scores[i], self.numbers[i])
        barrier()
        for first in range(0, groups, self.arch.wave):
            group = T.Bind(self.lane + first)
            with T.If(group < groups), T.Then():
                best, second = filled(T.float32(LOWEST)), filled(T.float32(LOWEST))
                with T.serial(size) as i:
                    x = T.Bind(self.all[group * size + i])
                    put(second, T.Select(x > best[0], best[0], T.Select(x > second[0], x, second[0])), 0)
                    put(best, T.Select(x > best[0], x, best[0]), 0)
                put(self.ranks, best[0] + second[0], group)
        barrier()
        for first in range(0, groups, self.arch.wave):
            group = T.Bind(self.lane + first)
            with T.If(group < groups), T.Then():
                mine, above = T.Bind(self.ranks[group]), filled(T.int32(0))
                with T.serial(groups) as other:
                    x = T.Bind(self.ranks[other])
                    before = (x > mine) | ((x == mine) & (other < group))
                    put(above, above[0] + T.cast(before, "int32"), 0)
                put(self.open, T.cast(above[0] < used, "int32"), group)
        barrier()
        for i in range(self.steps):
            is_open = self.open[self._index(i) // size] > 0
            put(self.scores, T.Select(is_open, self.scores[i], T.float32(LOWEST)), i)

    def choose(self) -> None:
        """Sets the places of the best experts to 0, 1, .., of equal experts the lower number first, and those of other
        experts to `used`."""
        for i in range(self.steps):
            put(self.places, T.int32(self.used), i)
            put(self.keys, self._or(i, _key(self.scores[i]), T.int32(LAST)), i)
        with T.serial(self.used) as place:
            keys = [T.Bind(self.keys[i]) for i in range(self.steps)]
            best, number = wave_max(self.arch, T.Bind(functools.reduce(T.max, keys))), T.int32(NONE)
            for mine, key in zip(reversed(self.numbers), reversed(keys), strict=True):
                number = T.Select(key == best, mine, number)
            number = device.wave_min(self.arch, T.Bind(number))
            for i, key in enumerate(keys):
                here = T.Bind(self.numbers[i] == number)
                put(self.places, T.Select(here, place, self.places[i]), i)
                put(self.keys, T.Select(here, T.int32(LAST), key), i)

    def store(self, row: Expr, Ids: Buffer, Weights: Buffer) -> None:
        """Stores the chosen experts and their weights."""
        places = [T.Bind(self.places[i]) for i in range(self.steps)]
        chosen = [T.Bind(place < self.used) for place in places]
        values = [T.Bind(T.Select(here, self.p[i], T.float32(LOWEST))) for i, here in enumerate(chosen)]
        weights = weigh(self.arch, self.routing, values, chosen)
        for i, (place, here, weight) in enumerate(zip(places, chosen, weights, strict=True)):
            with T.If(here), T.Then():
                put(Ids, self.numbers[i], row, place)
                put(Weights, weight if self.factors is None else weight * self.factors[i], row, place)


def _sqrt_softplus(logits: list[Expr]) -> list[Expr]:
    values = [softplus(x) for x in logits]
    return [T.Bind(x * rsqrt(maximum(x, T.float32(LEAST)))) for x in values]


def _key(score: Expr) -> Expr:
    """An int32 key larger than LAST; keys have the order of the float32 scores, NaNs any order."""
    bits = T.Bind(T.reinterpret("int32", score))
    return T.max(bits ^ (T.shift_right(bits, T.int32(31)) & T.int32(0x7FFFFFFF)), T.int32(LAST + 1))


def weigh(arch: Device, routing: Routing, values: list[Expr], chosen: list[Expr]) -> list[Expr]:
    """The weights of a lane's experts. values: the probabilities of chosen experts (for softmax_used their logits), and
    LOWEST for other experts. chosen: conditions: the expert is chosen."""
    factor = T.float32(routing.scale)
    if routing.gating == "softmax_used":
        top = wave_max(arch, functools.reduce(maximum, values))
        values = [exp2((x - top) * T.float32(LOG2E)) for x in values]
    if routing.gating == "softmax_used" or routing.normalize:
        values = [T.Bind(T.Select(here, x, T.float32(0))) for x, here in zip(values, chosen, strict=True)]
        total = wave_sum(arch, T.Bind(functools.reduce(lambda x, y: x + y, values)))
        if routing.gating != "softmax_used":
            total = maximum(total, T.float32(MIN_SUM))
        factor = T.Bind(factor * rcp(total))
    return [T.Bind(x * factor) for x in values]


# ---- with the norm


def scratch_shapes(count: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Parameter name to (shape, dtype) of the buffers through which the workgroups of `count` experts exchange data.
    "Arrived" must be zero before the first launch, and is zero after each launch; "Logits" may have any contents."""
    return {"Logits": ((count, LINE), "float32"), "Arrived": ((1,), "int32")}


@builds(NormRoute)
def norm_route(op: NormRoute, arch: Device, state: Buffer, plan: None) -> None:
    """Kernel (state, X float32 [1, k], G float32 [k], planes of W [count, k], [WB float32 [count]], [B], [F], Logits,
    Arrived, the parameters of `result_args`, Ids, Weights). Raises ValueError for a format that is not float, and as
    `check` does; UserError unless k is a multiple of 32."""
    ((fmt, count),), k, threads = op.weights, op.k, min(THREADS, arch.threads)
    waves = threads // arch.wave
    if fmt.kind != "float":
        raise ValueError(f"a router needs a float format, not {fmt.name}")
    if k % BLOCK:
        raise UserError(f"the hidden size must be a multiple of {BLOCK}, not {k}")
    exchanges("Logits", "Arrived")
    X, G = declared(X=(1, k), G=(k,))
    planes = plane_args(fmt, count, k, "W_")
    (WB,) = declared(WB=(count,) if op.router_bias else None)
    B, F = routing_args(op)
    Logits, Arrived = (T.arg(which, T.buffer(*of)) for which, of in scratch_shapes(count).items())
    outs = result_args(1, k, op)
    Ids, Weights = choice_args(op)
    with launch((count,), (arch.wave, waves)) as (expert, lane, wave):
        tid, weights = T.Bind(wave * arch.wave + lane), load.views(fmt, planes, WIDTH)
        units, steps = k // WIDTH, -(-k // (threads * WIDTH))
        # loads for the end of the kernel, issued together with the first ones
        held, own_bias = Held(arch, op, lane, B, F), None if WB is None else T.Bind(WB[expert])

        def unit_of(step: Expr) -> tuple[Expr, Expr | None]:
            """(this thread's unit in a step, whether it exists); None if all threads have one."""
            unit, live = owned(step * threads, tid, threads, units)
            return T.Bind(unit), live

        # The columns of the norm's result that this workgroup stores: those of steps expert, expert + count, ..
        own = []
        for first in range(0, steps, count):
            step = expert + first
            unit, live = unit_of(T.min(step, T.int32(steps - 1)))
            own.append((load_columns(X, 0, unit * WIDTH), load_columns(G, unit * WIDTH), unit, step < steps, live))

        square, product = filled(T.float32(0)), filled(T.float32(0))

        def add(first: Expr, number: int) -> None:
            loaded = []
            for i in range(number):
                unit, live = unit_of(first + i)
                w = load.fetch_float(fmt, weights, expert, unit, WIDTH)
                loaded.append((load_columns(X, 0, unit * WIDTH), load_columns(G, unit * WIDTH), w, live))
            for x, g, w, live in loaded:
                a, b = T.float32(0), T.float32(0)
                for xi, gi, wi in zip(x, g, w, strict=True):
                    a, b = fma(xi, xi, a), fma(T.Bind(xi * gi), wi, b)
                for total, part in ((square, a), (product, b)):
                    put(total, total[0] + (part if live is None else T.Select(live, part, T.float32(0))), 0)

        loops = steps // STEPS
        if loops > 1:
            with T.serial(loops) as i:
                add(i * STEPS, STEPS)
        for first in range(0 if loops <= 1 else loops * STEPS, steps, STEPS):
            add(first, min(STEPS, steps - first))
        squares, products = _workgroup_sums(arch, waves, (square, product), wave, lane)
        scale = row_scale(squares, k, op.eps)

        logit = T.Bind(products * scale if own_bias is None else products * scale + own_bias)
        outbox = Outbox(arch, tid, threads, (1,))
        outbox.send(tid == 0, Logits, ([logit], None, (expert, 0)))
        outbox.publish()
        old = arrive(arch, Arrived, 0, tid)
        chooses = T.Bind(device.uniform(arch, wave) == 0)
        last = old == count - 1
        with T.serial(T.cast(last if held.grouped else last & chooses, "int32")):
            later = zero_after(arch, old)
            held.load(lambda index: Logits[index, later])
            with T.serial(T.cast(chooses, "int32")):
                held.choose()
                held.store(0, Ids, Weights)
            with T.If(tid == 0), T.Then():
                put(Arrived, T.int32(0), 0)

        for x, g, unit, mine, live in own:
            y = [T.Bind(xi * scale * gi) for xi, gi in zip(x, g, strict=True)]
            for each, out in outs:
                emit_store(arch, each, out, y, 0, T.Bind(unit * WIDTH), mine if live is None else mine & live)


def _workgroup_sums(arch: Device, waves: int, totals: Sequence[Expr], wave: Expr, lane: Expr) -> list[Expr]:
    """The sum over the workgroup of each of `totals`, which are buffers of one element."""
    parts = T.alloc_buffer((len(totals), waves), "float32", scope="shared")
    for i, total in enumerate(totals):
        mine = wave_sum(arch, T.Bind(total[0]))
        with T.If(lane == 0), T.Then():
            put(parts, mine, i, wave)
    barrier()
    return [T.Bind(sum((parts[i, w] for w in range(1, waves)), parts[i, 0])) for i in range(len(totals))]
