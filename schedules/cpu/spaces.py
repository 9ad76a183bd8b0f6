"""The plans of CPU kernels. The fields of a plan are described by its dataclass, in the kernel's module.

Norms and the small kernels around attention have none: together they take two to four hundredths of the time.
"""

from mlc_amd.schedules import operators
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention import attention_decode, attention_prefill
from mlc_amd.schedules.cpu.attention.attention import kernel_module
from mlc_amd.schedules.cpu.attention.attention_block import product_blocks
from mlc_amd.schedules.cpu.attention.cache import BLOCK as BLOCK_KEYS
from mlc_amd.schedules.cpu.linear import linear_plan
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.space import Kernel, Space


def _rows_space(op, isa, tasks) -> Space:
    """The space of a kernel of weight rows. tasks(plan): what decides how its rows are shared out, and the number of
    tasks."""
    segments, k, m = op.weights, op.k, op.m
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


@registry.plans(operators.Linear, operators.ExpertLinear, operators.ExpertDown)
def _linear(op, arch) -> Space:
    segments, k = op.weights, op.k

    def tasks(plan):
        held = tuple(linear_plan.row_tiles(fmt, n, k, plan) for fmt, n in segments)
        return held, sum(-(-n // ROWS) // tiles for (_, n), tiles in zip(segments, held, strict=True))

    return _rows_space(op, arch.isa, tasks)


@registry.plans(operators.GateUp, operators.ExpertGateUp)
def _gate_up(op, arch) -> Space:
    """Of experts, by a row's experts: of many rows at least that many."""
    blocks = op.n // BLOCK * getattr(op, "used", 1)
    return _rows_space(op, arch.isa, lambda plan: (None, blocks))


@registry.plans(operators.CausalAttention)
def _attention(op, arch) -> Space:
    isa, group, kv_heads, d, m = arch.isa, op.layer.group, op.layer.kv_heads, op.layer.d, op.m

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

    module = kernel_module(m, op.single)
    return Space(
        module.Plan, module.choices(isa), module.default_plan(isa), decode if module is attention_decode else prefill
    )
