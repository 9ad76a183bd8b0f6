"""The plans of CPU kernels. The fields of a plan are described by its dataclass, in the kernel's module.

Norms and the small kernels around attention have none: together they take two to four hundredths of the time.
"""

from mlc_amd.schedules.cpu.attention import attention_decode, attention_prefill
from mlc_amd.schedules.cpu.attention.attention import kernel_module
from mlc_amd.schedules.cpu.attention.attention_block import product_blocks
from mlc_amd.schedules.cpu.attention.cache import BLOCK as BLOCK_KEYS
from mlc_amd.schedules.cpu.linear import linear_plan
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.plans.space import Kernel, Space


def _rows_space(workload, isa, tasks) -> Space:
    """The space of a kernel of weight rows. tasks(plan): what decides how its rows are shared out, and the number of
    tasks."""
    segments, k, m = workload.weights, workload.args["k"], workload.args["m"]
    p = min(m, isa.tokens)
    default = linear_plan.default_plan(isa, m, p, segments, k)
    whole = segments[0][0].kind == "int8"

    def decode(plan) -> Kernel:
        if whole and k // BLOCK % plan.unroll:
            raise ValueError(f"{plan} does not divide {k} columns")
        ahead = plan.ahead and (plan.ahead, plan.locality)
        return Kernel((plan.unroll if whole else 0, ahead), tasks(plan)[1], 1, plan.ahead)

    def prefill(plan) -> Kernel:
        if plan.tokens > p:
            raise ValueError(f"{plan} has more than the {p} tokens of a tile")
        if plan.tokens % plan.interleave:
            raise ValueError(f"{plan} does not divide its tokens")
        held, count = tasks(plan)
        interleaved = tuple(linear_plan.interleave_of(fmt, plan) for fmt, _ in segments)
        tokens = (plan.tokens, interleaved, plan.unpack) if whole else min(plan.tokens, linear_plan.FLOAT_TOKENS)
        return Kernel((tokens, held), count, 1, plan.tokens)

    return Space(type(default), linear_plan.choices(isa, m, p), default, decode if m == 1 else prefill)


def _linear(workload, arch) -> Space:
    segments, k = workload.weights, workload.args["k"]

    def tasks(plan):
        held = tuple(linear_plan.row_tiles(fmt, n, k, plan) for fmt, n in segments)
        return held, sum(-(-n // ROWS) // tiles for (_, n), tiles in zip(segments, held, strict=True))

    return _rows_space(workload, arch.isa, tasks)


def _gate_up(workload, arch) -> Space:
    """Of experts, by a row's experts: of many rows at least that many."""
    args = workload.args
    blocks = args["n"] // BLOCK * args.get("used", 1)
    return _rows_space(workload, arch.isa, lambda plan: (None, blocks))


def _attention(workload, arch) -> Space:
    args, isa = workload.args, arch.isa
    group, kv_heads, d, m = args["heads"] // args["kv_heads"], args["kv_heads"], args["d"], args["m"]

    def products(plan, rows):
        cuts = [product_blocks(plan.registers, rows, columns, isa) for columns in (BLOCK_KEYS, d)]
        return tuple((len(mine), vectors) for cut in cuts for mine, vectors in cut)

    def decode(plan) -> Kernel:
        return Kernel((products(plan, group), plan.ahead and (plan.ahead, plan.locality)), kv_heads, 1, plan.ahead)

    def prefill(plan) -> Kernel:
        tokens = attention_prefill.tile_tokens(plan, m, group, kv_heads)
        return Kernel(
            (products(plan, plan.rows), plan.rows, plan.blocks_per_pass, plan.convert, tokens),
            -(-m // tokens) * kv_heads,
            1,
            plan.rows,
        )

    module = kernel_module(m, args["single"])
    return Space(
        module.Plan, module.choices(isa), module.default_plan(isa), decode if module is attention_decode else prefill
    )


SPACES = {
    "linear": _linear,
    "gate_up": _gate_up,
    "attention": _attention,
    "expert_gate_up": _gate_up,
    "expert_linear": _linear,
    "expert_down": _linear,
}
