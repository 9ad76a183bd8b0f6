"""The second half of a mixture of experts for few tokens: y = R + the sum over a token's slots of weight * (D h +
bias), where D is the down projection of the slot's expert.

Each token has workgroups of its own, because a few tokens mostly have different experts. Workgroups with the same rows
run at the same time, so if experts are the same, their rows are read from memory once. Different waves of a workgroup
have different slots; their sums are exchanged through LDS and added in the order of slots.
"""

from collections.abc import Callable
from dataclasses import replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import barrier, fma, launch, uniform, wave_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK, plane_args
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import act_args
from mlc_amd.schedules.gpu.base.registers import filled, put
from mlc_amd.schedules.gpu.base.step import builds, if_live
from mlc_amd.schedules.gpu.exchange.exchange import PAIR, Sum
from mlc_amd.schedules.gpu.experts.experts import bias_args, check_rows, expert_at, ids_arg
from mlc_amd.schedules.gpu.linear import gemv, gemv_plan, gemv_rows, load
from mlc_amd.schedules.gpu.linear.gemv_plan import CHOICES, Plan, Split
from mlc_amd.schedules.gpu.linear.gemv_rows import Strip, emit_acts, span_of
from mlc_amd.schedules.operators import ExpertDown
from mlc_amd.schedules.space import Kernel, planned
from mlc_amd.schedules.tir import Buffer, Expr, declared

# For `expert_down`. DOWN_FULL: least number of workgroups for each compute unit (an H200 is slower with fewer).
# DOWN_ROWS: rows of a plan if there are enough workgroups. MOST_ROWS: upper limit if workgroups have blocks.
# DOWN_WAVES: waves that compute different slots of the same rows.
DOWN_FULL, DOWN_ROWS, MOST_ROWS, DOWN_WAVES = 2, 2, 16, 8


def down_default(op: ExpertDown, arch: Device) -> Plan:
    """The plan of the rule: fewer rows at the same time if there would be too few workgroups for the GPU."""
    plan = gemv_plan.full_plan(arch, DOWN_ROWS, DOWN_WAVES)
    while plan.rows > 1 and down_split(op, arch, plan).groups < DOWN_FULL * arch.units:
        plan = replace(plan, rows=plan.rows // 2)
    return plan


def down_split(op: ExpertDown, arch: Device, plan: Plan | None = None) -> Split:
    """The distribution of `expert_down` over the GPU; Split.rows are those that a workgroup computes at the same time.
    Plans with the same result make the same kernel. The number of waves is a multiple of the slots that are computed at
    the same time."""
    fmts = [fmt for fmt, _ in op.weights]
    plan = gemv_plan.fitted(plan or down_default(op, arch), fmts, op.k, arch)
    lanes = gemv_plan.lanes_of(gemv_rows.units_of(fmts, op.k), min(plan.lanes, arch.wave))
    waves = min(plan.waves, arch.threads // arch.wave)
    side, _ = _slots(op, waves)
    rows = waves // side * (arch.wave // lanes) * plan.rows
    return Split(replace(plan, waves=waves - waves % side), lanes, rows, -(-op.n // rows))


def _slots(op: ExpertDown, waves: int) -> tuple[int, int]:
    """(slots that are computed at the same time, steps of a wave, each with one slot)."""
    steps = -(-op.used // waves)
    return -(-op.used // steps), steps


@registry.plans(ExpertDown)
@planned(CHOICES, down_default)
def down_plans(op: ExpertDown, arch: Device, plan: Plan) -> Kernel:
    fmts, split = [fmt for fmt, _ in op.weights], down_split(op, arch, plan)
    unroll = gemv_plan.steps_at_once(fmts, op.k, split.lanes, split.plan.unroll)
    same = split._replace(plan=replace(split.plan, lanes=0, unroll=unroll))
    loads = gemv_plan.loads(fmts, op.k, replace(split.plan, waves=plan.waves))
    return Kernel(same, split.groups * op.m, split.plan.waves * arch.wave, loads)


def block_split(op: ExpertDown, arch: Device) -> Split | None:
    """`down_split` for workgroups with blocks of 32 rows, of which they compute as many at the same time as there are
    registers. None if rows are so short that a workgroup computes more than a block at the same time."""
    plan = gemv_plan.full_plan(arch, MOST_ROWS, DOWN_WAVES)
    while BLOCK % (split := down_split(op, arch, plan)).rows:
        if split.plan.rows == 1:
            return None
        plan = replace(plan, rows=split.plan.rows // 2)
    return split._replace(groups=op.n // BLOCK)


@builds(ExpertDown)
def expert_down(op: ExpertDown, arch: Device, state: Buffer, plan: Plan | None) -> None:
    """Kernel (state, A and S, or X, of m * used rows, Groups, planes of the [count * n, k] stack, [WB], [Weights], [R],
    Y). Raises UserError unless n is a multiple of 16, ValueError if activations do not have the layout for the
    format."""
    emit_down(op, arch, state, plan)


def emit_down(
    op: ExpertDown, arch: Device, state: Buffer, plan: Plan | None, adds: Callable[[], Sum] | None = None
) -> None:
    """Emits the code of `expert_down`. adds: see `gemv.emit_linear`; only for one token, and plan is then ignored."""
    ((fmt, n),), k, experts, used, m = op.weights, op.k, op.of, op.used, op.m
    check_rows(n)
    gemv.check(op)
    split = block_split(op, arch) if adds else down_split(op, arch, plan)
    if split is None:
        raise ValueError(f"{op.name}: rows of {k} columns are too short for workgroups with blocks")
    plan, lanes, rows, groups = split
    waves, (side, steps) = plan.waves, _slots(op, plan.waves)
    params, ids = act_args(m * used, k, op.layout), ids_arg(experts, m)
    bufs = plane_args(fmt, op.experts * n, k, "W_")
    biases = bias_args(op.experts * n, "WB") if op.bias else []
    weights, residual = (m, used) if op.weighted else None, (m, n) if op.residual else None
    Weights, R, Y = declared(Weights=weights, R=residual, **{"Y0" if adds else "Y": (m, n)})  # Y is the sum's
    added = adds() if adds else None
    with (
        launch((m, groups) if m > 1 else (groups,), (arch.wave, waves)) as (*rest, workgroup, lane, wave_number),
        if_live(state, m, *rest or [0]),
    ):
        token = rest[0] if rest else 0
        acts, views = emit_acts(params, k, m * used), load.views(fmt, bufs, span_of([fmt], k))
        wave = uniform(arch, wave_number) if waves > 1 else T.int32(0)
        beside = T.Bind(wave % side)
        group, part = T.Bind(wave // side * (arch.wave // lanes) + lane // lanes), T.Bind(lane % lanes)
        # the last step has a slot for some of the waves only
        count = steps if side * steps == used else T.Bind((used - 1 - beside) // side + 1)

        def totals(row: Expr) -> list[Expr]:
            """The sums over a wave's slots for the rows from `row` on, in all lanes of a group."""
            sums = filled(T.float32(0), plan.rows)
            with T.serial(count) as step:
                slot = T.Bind(step * side + beside)
                first = T.Bind(expert_at(ids, [token, slot], experts) * n)
                strips = [Strip(fmt, views, first + row + i) for i in range(plan.rows)]
                found = gemv_rows.emit_sums(strips, [acts.of(token * used + slot)], part, lanes, plan.unroll, arch)
                for i in range(plan.rows):
                    weight = Weights[token, slot] if Weights is not None else T.float32(1)
                    put(sums, fma(T.Bind(found[i]), weight, sums[i]), i)
            return [wave_sum(arch, T.Bind(sums[i]), lanes) for i in range(plan.rows)]

        def biased(row: Expr, total: Expr) -> Expr:
            for bias in biases:
                for j in range(used):
                    own = bias[expert_at(ids, [token, j], experts) * n + row]
                    total = fma(own, Weights[token, j], total) if Weights is not None else T.Bind(total + own)
            return total

        def store(row: Expr, total: Expr) -> None:
            """Stores the result of a row."""
            total = biased(row, total)
            T.buffer_store(Y, total if R is None else R[token, row] + total, [token, row])

        if added:

            def compute() -> Callable[[Expr, Expr, Expr], list[Expr]]:
                parts = T.alloc_buffer((side, BLOCK), "float32", scope="shared")
                with T.serial(BLOCK // rows) as i:
                    first = T.Bind(i * rows + group * plan.rows)
                    found = totals(T.Bind(workgroup * BLOCK + first))
                    with T.If(part == 0), T.Then():
                        for j, total in enumerate(found):
                            put(parts, total, beside, first + j)

                def result(token: Expr, column: Expr, row: Expr) -> list[Expr]:
                    total = [T.Bind(parts[0, column + j]) for j in range(PAIR)]
                    for i in range(1, side):
                        total = [T.Bind(x + parts[i, column + j]) for j, x in enumerate(total)]
                    return [T.Bind(biased(row + j, x)) for j, x in enumerate(total)]

                return result

            gemv.emit_added(arch, added, Y, waves, (workgroup, lane, wave_number), compute)
            return
        row = T.Bind(T.min(workgroup * rows + group * plan.rows, T.int32(n - plan.rows)))
        found = totals(row)
        if side == 1:
            with T.If(part == 0), T.Then():
                for i, total in enumerate(found):
                    store(row + i, total)
            return
        parts = T.alloc_buffer((side, rows), "float32", scope="shared")
        with T.If(part == 0), T.Then():
            for i, total in enumerate(found):
                put(parts, total, beside, group * plan.rows + i)
        barrier()
        for c in range(0, rows, waves * arch.wave):
            own = T.Bind(wave * arch.wave + lane + c)
            # the last workgroup's rows were moved to the last ones, as groups of lanes computed them
            last = T.int32(n - plan.rows)
            moved = T.Bind(T.min(workgroup * rows + own // plan.rows * plan.rows, last) + own % plan.rows)
            with T.If(own < rows), T.Then():
                total = T.Bind(parts[0, own])
                for j in range(1, side):
                    total = T.Bind(total + parts[j, own])
                store(moved, total)
