"""Attention on the CPU: the kernel for one token (`attention_decode.py`) or for a chunk of tokens (`attention_prefill.py`).

Both take the rotated queries and the caches that `rope_kv_write.py` wrote, and give the heads' outputs, float32 or int8 blocks.
"""
from tvm import tirx

from mlc_amd.schedules.cpu.attention_decode import attention_decode
from mlc_amd.schedules.cpu.attention_prefill import attention_prefill


def attention(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [m, heads, d], Kc float16 [kv_heads, ctx/16, d, 16], Vc float16 [kv_heads, ctx, d], then A, S of
    [m, heads*d] in tiles of p tokens if `quantize`, else O float32 [m, heads*d]).

    Causal: token i sees the keys 0 .. state[0] + i. plan: of the module that makes the kernel; None: its default. UserError unless 64
    divides ctx and 32 divides d.
    """
    if m == 1:
        return attention_decode(heads, kv_heads, d, ctx, quantize, isa, name, plan)
    return attention_prefill(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan)
