"""Attention on the CPU: the kernel for one row or a few (`attention_decode.py`) or for a chunk
(`attention_prefill.py`).

Both take the rotated and scaled queries and the caches that `rope_kv_write.py` wrote, and give the heads' outputs,
float32 or int8 blocks.
"""

from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.attention import Attention
from mlc_amd.schedules.cpu import attention_decode, attention_prefill
from mlc_amd.schedules.cpu.cache import Cache
from mlc_amd.schedules.cpu.kernel import kernel
from mlc_amd.schedules.cpu.quantize import BLOCK as QUANT
from mlc_amd.schedules.cpu.quantize import Output

# Limits of the decode kernel, whose products are unrolled over its queries: rows, and rows times heads of a group.
DECODE_ROWS, DECODE_QUERIES = 4, 64


class Args(NamedTuple):
    """A kernel's parameters as buffers."""

    state: object  # int32 [4]
    Q: object  # float32 [m, heads, width]: rotated, scaled by Attention.query_scale
    cache: Cache
    sinks: object  # float32 [heads], or None
    output: Output  # [m, heads*d]


def kernel_module(m, group):
    """The module of the kernel for m rows and groups of so many heads."""
    return attention_decode if m == 1 or (m <= DECODE_ROWS and m * group <= DECODE_QUERIES) else attention_prefill


def attention(spec: Attention, m, p, quantize, isa, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [m, heads, width], Kc, Vc as in `cache.py`, [Sinks float32 [heads] if
    spec.sinks], then A, S of [m, heads*d] in tiles of p rows if `quantize`, else O float32 [m, heads*d]).

    Rows that are not live, or have no place in the cache, are left out (a single row of m = 1 takes the last place).
    plan: of the `kernel_module`'s type; None: its default. UserError for shapes that `cache_types` refuses,
    and for int8 blocks of heads that are not whole blocks.
    """
    if quantize and spec.d % QUANT:
        raise UserError(
            f"attention gives int8 blocks of {QUANT} columns, not of heads of {spec.d}; quantize separately"
        )
    module = kernel_module(m, spec.group)
    with kernel(name) as (builder, state):
        Q = T.arg("Qo", T.buffer((m, spec.heads, spec.width), "float32"))
        cache = Cache(spec, isa)
        sinks = T.arg("Sinks", T.buffer((spec.heads,), "float32")) if spec.sinks else None
        args = Args(state, Q, cache, sinks, Output(m, spec.heads * spec.d, p, quantize, "O"))
        module.emit_attention(spec, m, args, isa, plan or module.default_plan(isa))
    return builder.get()
