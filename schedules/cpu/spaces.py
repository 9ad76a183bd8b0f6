"""The plans of CPU kernels. The fields of a plan are described by its dataclass, in the kernel's module.

Norms and the small kernels around attention have none: together they take two to four hundredths of the time.
"""

from mlc_amd.schedules import operators
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention import attention_decode, attention_prefill
from mlc_amd.schedules.cpu.attention.attention import kernel_module
from mlc_amd.schedules.cpu.attention.attention_block import product_blocks
from mlc_amd.schedules.cpu.attention.cache import BLOCK as BLOCK_KEYS
from mlc_amd.schedules.space import Kernel, Space


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
