"""The first part of a mixture of experts for one token, in one launch: its norm, the router's logits, and the choice.

    y = x * G / sqrt(mean(x*x) + eps), L = y W^T [+ bias], and of L what `route.py` makes

In: `state` int32[4], X float32 [1, k], G float32 [k], W in a float format. Out: y in the layouts that experts read, Ids
and Weights [1, used].

A workgroup makes one expert's logit: 1 / sqrt(..) is a factor of the sum of x * G * W, so both sums are made together.
Its logit goes to Logits; in the last workgroup to arrive (`arrival.py`) a wave chooses, as in `route.py`.
"""

from collections.abc import Sequence

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.arrival import LINE, Outbox, arrive, zero_after
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, rsqrt, uniform, wave_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK, plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, act_args, emit_store, load_columns
from mlc_amd.schedules.gpu.base.registers import local, put
from mlc_amd.schedules.gpu.base.step import kernel, state_arg
from mlc_amd.schedules.gpu.experts.route import Held, choice_args, routing_args
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.operators import NormRoute
from mlc_amd.schedules.tir import Expr

THREADS = 256  # of a workgroup, at most: of 2048 columns each thread has two loads
STEPS = 4  # whose loads are issued before the first is used


def scratch_shapes(count: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Parameter name -> (shape, dtype) of the buffers that the workgroups of `count` experts meet in. "Arrived" must be
    zero before the first launch and is zero after each; "Logits" may hold anything."""
    return {"Logits": ((count, LINE), "float32"), "Arrived": ((1,), "int32")}


@registry.builds(NormRoute)
def norm_route(op: NormRoute, arch: Device, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state, X float32 [1, k], G float32 [k], planes of W [count, k], [bias float32 [count]], [B, F as of
    `route`], Logits, Arrived of `scratch_shapes`, y in `layout`, [y as float32, if `both`], Ids, Weights).

    ValueError for a format that is not float, and as of `route`; UserError unless 32 divides k.
    """
    ((fmt, count),), k, threads = op.weights, op.k, min(THREADS, arch.threads)
    waves = threads // arch.wave
    if fmt.kind != "float":
        raise ValueError(f"a router in {fmt.name} does not take float32")
    if k % BLOCK:
        raise UserError(f"the hidden size must be a multiple of {BLOCK}, not {k}")
    with kernel(name, coherent=("Logits", "Arrived")) as ir:
        state_arg()
        X, G = T.arg("X", T.buffer((1, k), "float32")), T.arg("G", T.buffer((k,), "float32"))
        planes = plane_args(fmt, count, k, "W_")
        WB = T.arg("WB", T.buffer((count,), "float32")) if op.router_bias else None
        B, F = routing_args(op)
        Logits, Arrived = (T.arg(which, T.buffer(*of)) for which, of in scratch_shapes(count).items())
        layouts = [op.layout, ""] if op.both else [op.layout]
        outs = [act_args(1, k, each, None if each else ["Y"]) for each in layouts]
        Ids, Weights = choice_args(op)
        with launch((count,), (arch.wave, waves)) as (expert, lane, wave):
            tid, weights = T.Bind(wave * arch.wave + lane), load.views(fmt, planes, WIDTH)
            units, steps = k // WIDTH, -(-k // (threads * WIDTH))
            # what is needed at the end and known now: its loads wait with the others
            held, own_bias = Held(arch, op, lane, B, F), None if WB is None else T.Bind(WB[expert])

            def unit_of(step: Expr) -> tuple[Expr, Expr | None]:
                """(unit of this thread in that step, live); live is None where all threads have one."""
                unit = step * threads + tid
                whole = units % threads == 0 or (isinstance(step, int) and (step + 1) * threads <= units)
                return (T.Bind(unit), None) if whole else (T.Bind(T.min(unit, T.int32(units - 1))), unit < units)

            # The columns that this workgroup stores: steps expert, expert + count, ..
            own = []
            for first in range(0, steps, count):
                step = expert + first
                unit, live = unit_of(T.min(step, T.int32(steps - 1)))
                own.append((load_columns(X, 0, unit * WIDTH), load_columns(G, unit * WIDTH), unit, step < steps, live))

            square, product = local(1), local(1)
            put(square, T.float32(0), 0)
            put(product, T.float32(0), 0)

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
            scale = rsqrt(fma(squares, T.float32(1 / k), T.float32(op.eps)))

            logit = T.Bind(products * scale if own_bias is None else products * scale + own_bias)
            outbox = Outbox(arch, tid, threads, (1,))
            outbox.send(tid == 0, Logits, ([logit], None, (expert, 0)))
            outbox.publish()
            old = arrive(arch, Arrived, 0, tid)
            chooses = T.Bind(uniform(arch, wave) == 0)
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
                for each, out in zip(layouts, outs, strict=True):
                    emit_store(arch, each, out, y, 0, T.Bind(unit * WIDTH), mine if live is None else mine & live)
    return ir.get()


def _workgroup_sums(arch: Device, waves: int, totals: Sequence[Expr], wave: Expr, lane: Expr) -> list[Expr]:
    """The sums over the workgroup of each of `totals`, registers."""
    parts = T.alloc_buffer((len(totals), waves), "float32", scope="shared")
    for i, total in enumerate(totals):
        mine = wave_sum(arch, T.Bind(total[0]))
        with T.If(lane == 0), T.Then():
            put(parts, mine, i, wave)
    barrier()
    found = []
    for i in range(len(totals)):
        total = parts[i, 0]
        for w in range(1, waves):
            total = total + parts[i, w]
        found.append(T.Bind(total))
    return found
