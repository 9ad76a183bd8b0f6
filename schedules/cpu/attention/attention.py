"""The kernel of `CausalAttention` on the CPU. It consists of code for single rows, which may be of any sequences
(attention_decode.py), of code for a chunk of rows of one sequence (attention_prefill.py), or of both.

In: queries, rotated and scaled, and the cache, both as kv_write.py writes them. Out: the outputs of all heads, float32
or int8 blocks.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention import attention_decode, attention_prefill
from mlc_amd.schedules.cpu.attention.attention_block import BLOCK, Step, product_blocks
from mlc_amd.schedules.cpu.attention.cache import Cache, RowTable
from mlc_amd.schedules.cpu.base.arch import Arch, tile_rows
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.linear.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.operators import CausalAttention
from mlc_amd.schedules.space import Kernel, Space

Plan = attention_decode.Plan | attention_prefill.Plan


def default_plan(op: CausalAttention, arch: Arch) -> Plan:
    """The plan without tuning: that of attention_decode.py if all rows may be single rows, otherwise that of
    attention_prefill.py."""
    return (attention_decode if op.m == op.single else attention_prefill).default_plan(arch.isa)


@registry.builds(CausalAttention)
def attention(op: CausalAttention, arch: Arch, name: str, plan: Plan | None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32 [m, 2], pages as in `cache.py`, Qo float32 [m, heads, width], the cache,
    [Sinks float32 [heads] if the layer has them], then A, S of [m, heads*value_d] in tiles if `layout`, else O float32
    [m, heads*value_d]).

    single: the largest number of single rows, which are the first state[0] rows; the rows after them are a chunk. With
    single = 0 all rows are a chunk, with single = m all are single rows. No output is computed for rows that are not
    live, or whose position is not in the cache (the position of a single row is clamped instead). Raises UserError
    for shapes that `cache_types` refuses, and for int8 blocks if heads are not whole blocks.
    """
    spec, m, single, isa, quantized = op.layer, op.m, op.single, arch.isa, bool(op.layout)
    if quantized and spec.value_d % QUANT:
        raise UserError(
            f"attention makes int8 blocks of {QUANT} columns, not of heads of {spec.value_d}; quantize separately"
        )
    plan = plan or default_plan(op, arch)
    with kernel(name) as (builder, state):
        rows, cache = RowTable(m), Cache(spec, isa).declare_pages()
        Q = T.arg("Qo", T.buffer((m, spec.heads, spec.width), "float32"))
        cache.declare()
        sinks = T.arg("Sinks", T.buffer((spec.heads,), "float32")) if spec.sinks else None
        output = Output(m, spec.heads * spec.value_d, tile_rows(m, arch), quantized, "O")
        step = Step(spec, isa, m, state, rows, Q, cache, sinks, output)
        if single:
            of_single = plan if isinstance(plan, attention_decode.Plan) else attention_decode.default_plan(isa)
            emit = attention_decode.emit_attention if m == 1 else attention_decode.emit_single_rows
            emit(step, of_single)
        if isinstance(plan, attention_prefill.Plan):
            attention_prefill.emit_attention(step, plan, after_single=single > 0)
    return builder.get()


@registry.plans(CausalAttention)
def attention_plans(op: CausalAttention, arch: Arch) -> Space:
    isa, group, kv_heads, d = arch.isa, op.layer.group, op.layer.kv_heads, op.layer.d

    def products(plan: Plan, rows: int) -> tuple[tuple[int, int], ...]:
        cuts = [product_blocks(plan.registers, rows, columns, isa) for columns in (BLOCK, d)]
        return tuple((len(mine), vectors) for cut in cuts for mine, vectors in cut)

    def decode(plan: attention_decode.Plan) -> Kernel:
        return Kernel((products(plan, group), plan.ahead and (plan.ahead, plan.locality)), kv_heads, 1, plan.ahead)

    def prefill(plan: attention_prefill.Plan) -> Kernel:
        tokens = attention_prefill.tile_tokens(plan, op.m, group, kv_heads)
        same = products(plan, plan.rows), plan.rows, plan.blocks_per_pass, plan.convert, tokens
        return Kernel(same, -(-op.m // tokens) * kv_heads, 1, plan.rows)

    default = default_plan(op, arch)
    if isinstance(default, attention_decode.Plan):
        return Space(attention_decode.Plan, attention_decode.choices(isa), default, decode)
    return Space(attention_prefill.Plan, attention_prefill.choices(isa), default, prefill)
