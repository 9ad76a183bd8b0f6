"""The second half of a mixture of experts for few tokens on the GPU, in one launch: y = R + the sum over a
token's slots of weight * (D h + bias), D being the down projection of the slot's expert.

In: `state` int32[4], activations with a row for each slot (as in `gemv.py`), Groups int32 [m, used], the planes of a
stack of matrices, biases of its rows. Out: Y float32 [m, n]. Each token has workgroups of its own: the experts of a few
tokens are different ones, mostly. Workgroups of the same rows run side by side, so where experts are the same, their
rows come from memory once.

Slots side by side belong to different waves of a workgroup, whose sums meet in LDS and are added in the order of slots;
the rows of a slot are computed as in `gemv.py`.
"""

from dataclasses import replace
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, uniform, wave_sum
from mlc_amd.schedules.gpu.base.planes import plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import act_args
from mlc_amd.schedules.gpu.base.registers import local, put
from mlc_amd.schedules.gpu.base.step import if_live, kernel, state_arg
from mlc_amd.schedules.gpu.experts.experts import bias_args, check_rows, expert_at, ids_arg, weights_arg
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.gemv import check
from mlc_amd.schedules.gpu.linear.gemv_plan import CHOICES, Plan, fitted, full_plan, lanes_of, loads, steps_at_once
from mlc_amd.schedules.gpu.linear.gemv_rows import Strip, emit_acts, emit_sums, span_of, units_of
from mlc_amd.schedules.operators import ExpertDown
from mlc_amd.schedules.space import Kernel, Space
from mlc_amd.schedules.tir import Expr

FULL = 2  # workgroups for each compute unit: with fewer an H200 is slower
ROWS, WAVES = 2, 8  # of a plan, where rows are enough; waves that compute different slots' parts of the same rows


class Split(NamedTuple):
    """plan: as the kernel uses it. lanes: that share a row. waves: of a workgroup. side: slots side by side; steps: of
    a wave, each with a slot. rows: of a workgroup. groups: workgroups."""

    plan: Plan
    lanes: int
    waves: int
    side: int
    steps: int
    rows: int
    groups: int


def down_default(op: ExpertDown, arch: Device) -> Plan:
    """The plan with fewer rows at once where there would be too few workgroups to fill the GPU."""
    plan = full_plan(arch, ROWS, WAVES)
    while plan.rows > 1 and down_split(op, arch, plan).groups < FULL * arch.units:
        plan = replace(plan, rows=plan.rows // 2)
    return plan


def down_split(op: ExpertDown, arch: Device, plan: Plan | None = None) -> Split:
    """How `expert_down` is spread over the GPU; two plans that give the same make the same kernel."""
    fmts = [fmt for fmt, _ in op.weights]
    plan = fitted(plan or down_default(op, arch), fmts, op.k, arch)
    lanes = lanes_of(units_of(fmts, op.k), min(plan.lanes, arch.wave))
    waves = min(plan.waves, arch.threads // arch.wave)
    steps = -(-op.used // waves)
    side = -(-op.used // steps)
    waves -= waves % side
    rows = waves // side * (arch.wave // lanes) * plan.rows
    return Split(plan, lanes, waves, side, steps, rows, -(-op.n // rows))


@registry.plans(ExpertDown)
def plans(op: ExpertDown, arch: Device) -> Space:
    fmts = [fmt for fmt, _ in op.weights]

    def kernel(plan: Plan) -> Kernel:
        split = down_split(op, arch, plan)
        unroll = steps_at_once(fmts, op.k, split.lanes, split.plan.unroll)
        same = split._replace(plan=replace(split.plan, waves=0, lanes=0, unroll=unroll))
        return Kernel(same, split.groups * op.m, split.waves * arch.wave, loads(fmts, op.k, split.plan))

    return Space(Plan, CHOICES, down_default(op, arch), kernel)


@registry.builds(ExpertDown)
def expert_down(op: ExpertDown, arch: Device, name: str, plan: Plan | None = None) -> tirx.PrimFunc:
    """Kernel (state, A, S | X of m * used rows, Groups int32 [m, used], planes of the [count * n, k] stack, [WB
    float32 [count * n]], [Weights float32 [m, used]], [R float32 [m, n]], Y float32 [m, n]). UserError unless n is a
    multiple of 16, ValueError for activations in another layout than the format's."""
    ((fmt, n),), k, experts, used, m = op.weights, op.k, op.of, op.used, op.m
    check_rows(n)
    check(op)
    plan, lanes, waves, side, steps, rows, groups = down_split(op, arch, plan)
    with kernel(name) as ir:
        state = state_arg()
        params, ids = act_args(m * used, k, op.layout), ids_arg(experts, m)
        bufs = plane_args(fmt, op.experts * n, k, "W_")
        biases = bias_args(op.experts * n, "WB") if op.bias else []
        Weights = weights_arg(experts, m) if op.weighted else None
        R = T.arg("R", T.buffer((m, n), "float32")) if op.residual else None
        Y = T.arg("Y", T.buffer((m, n), "float32"))
        with (
            launch((m, groups) if m > 1 else (groups,), (arch.wave, waves)) as (*rest, workgroup, lane, wave),
            if_live(state, m, *rest or [0]),
        ):
            token = rest[0] if rest else 0
            acts, views = emit_acts(params, k, m * used), load.views(fmt, bufs, span_of([fmt], k))
            wave = uniform(arch, wave) if waves > 1 else T.int32(0)
            beside = T.Bind(wave % side)
            group = T.Bind(wave // side * (arch.wave // lanes) + lane // lanes)
            row = T.Bind(T.min(workgroup * rows + group * plan.rows, T.int32(n - plan.rows)))
            part, sums = T.Bind(lane % lanes), local(plan.rows)
            for i in range(plan.rows):
                put(sums, T.float32(0), i)
            # the last step has a slot for some of the waves only
            count = steps if side * steps == used else T.Bind((used - 1 - beside) // side + 1)
            with T.serial(count) as step:
                slot = T.Bind(step * side + beside)
                first = T.Bind(expert_at(ids, [token, slot], experts) * n)
                strips = [Strip(fmt, views, first + row + i) for i in range(plan.rows)]
                found = emit_sums(strips, [acts.of(token * used + slot)], part, lanes, plan.unroll, arch)
                for i in range(plan.rows):
                    weight = Weights[token, slot] if Weights is not None else T.float32(1)
                    put(sums, fma(T.Bind(found[i]), weight, sums[i]), i)
            totals = [wave_sum(arch, T.Bind(sums[i]), lanes) for i in range(plan.rows)]

            def store(row: Expr, total: Expr) -> None:
                """One row's result."""
                for bias in biases:
                    for j in range(used):
                        own = bias[expert_at(ids, [token, j], experts) * n + row]
                        total = fma(own, Weights[token, j], total) if Weights is not None else T.Bind(total + own)
                T.buffer_store(Y, total if R is None else R[token, row] + total, [token, row])

            if side == 1:
                with T.If(part == 0), T.Then():
                    for i, total in enumerate(totals):
                        store(row + i, total)
            else:
                parts = T.alloc_buffer((side, rows), "float32", scope="shared")
                with T.If(part == 0), T.Then():
                    for i, total in enumerate(totals):
                        put(parts, total, beside, group * plan.rows + i)
                barrier()
                for c in range(0, rows, waves * arch.wave):
                    own = T.Bind(wave * arch.wave + lane + c)
                    # the last workgroup's rows were moved to the last ones, as groups of lanes computed them
                    moved = T.Bind(
                        T.min(workgroup * rows + own // plan.rows * plan.rows, T.int32(n - plan.rows)) + own % plan.rows
                    )
                    with T.If(own < rows), T.Then():
                        total = T.Bind(parts[0, own])
                        for j in range(1, side):
                            total = T.Bind(total + parts[j, own])
                        store(moved, total)
    return ir.get()
