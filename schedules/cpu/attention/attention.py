"""Attention on the CPU: the kernel of a step's single rows, each of a sequence of its own (`attention_decode.py`), of a
chunk of rows of one sequence (`attention_prefill.py`), or of both.

They take the rotated and scaled queries and the caches that `rope_kv_write.py` wrote, and give the heads' outputs,
float32 or int8 blocks.
"""

from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.attention import attention_decode, attention_prefill
from mlc_amd.schedules.cpu.attention.cache import Cache, RowTable
from mlc_amd.schedules.cpu.base.kernel import kernel
from mlc_amd.schedules.cpu.linear.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.linear.quantize import Output
from mlc_amd.schedules.operators.attention import Attention


class Args(NamedTuple):
    """A kernel's parameters as buffers."""

    state: object  # int32 [4]
    rows: RowTable
    Q: object  # float32 [m, heads, width]: rotated, scaled by Attention.query_scale
    cache: Cache
    sinks: object  # float32 [heads], or None
    output: Output  # [m, heads*value_d]


def kernel_module(m, single):
    """The module whose plan the kernel of m rows takes, of which up to `single` may be single rows."""
    return attention_decode if m == single else attention_prefill


def attention(spec: Attention, m, single, p, quantize, isa, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32 [m, 2], pages as in `cache.py`, Qo float32 [m, heads, width], the cache,
    [Sinks float32 [heads] if spec.sinks], then A, S of [m, heads*value_d] in tiles of p rows if `quantize`, else O
    float32 [m, heads*value_d]).

    single: how many rows at the front may be of different sequences; the rows after state[0] are then a chunk. With
    single = 0 all rows are, with single = m none. Rows that are not live, or have no place in the cache, are left out
    (a single row of m = 1 takes the last place). plan: of the `kernel_module`'s type; None: its default. UserError for
    shapes that `cache_types` refuses, and for int8 blocks of heads that are not whole blocks.
    """
    if quantize and spec.value_d % QUANT:
        raise UserError(
            f"attention gives int8 blocks of {QUANT} columns, not of heads of {spec.value_d}; quantize separately"
        )
    with kernel(name) as (builder, state):
        rows, cache = RowTable(m), Cache(spec, isa).declare_pages()
        Q = T.arg("Qo", T.buffer((m, spec.heads, spec.width), "float32"))
        cache.declare()
        sinks = T.arg("Sinks", T.buffer((spec.heads,), "float32")) if spec.sinks else None
        args = Args(state, rows, Q, cache, sinks, Output(m, spec.heads * spec.value_d, p, quantize, "O"))
        plan = plan or kernel_module(m, single).default_plan(isa)
        if m == single == 1:
            attention_decode.emit_attention(spec, args, isa, plan)
        elif single:
            attention_decode.emit_single_rows(
                spec, m, args, isa, plan if m == single else attention_decode.default_plan(isa)
            )
        if m > single:
            attention_prefill.emit_attention(spec, m, args, isa, plan, chunk_behind_single=single > 0)
    return builder.get()
