"""Attention on the CPU: the kernel for one token (`attention_decode.py`) or for a chunk of tokens (`attention_prefill.py`).

Both take the rotated queries and the caches that `rope_kv_write.py` wrote, and give the heads' outputs, float32 or int8 blocks.
"""
from tvm import tirx

from mlc_amd.schedules.cpu import attention_decode, attention_prefill

FEW = 4                         # tokens that are too few to convert keys and values for


def kernel_module(m):
    """The module of the kernel for m tokens."""
    return attention_decode if m <= FEW else attention_prefill


def attention(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [m, heads, d], Kc float16 [kv_heads, ctx/16, d, 16], Vc float16 [kv_heads, ctx, d], then A, S of
    [m, heads*d] in tiles of p tokens if `quantize`, else O float32 [m, heads*d]).

    Causal: token i sees the keys 0 .. state[0] + i. plan: of the module that makes the kernel; None: its default. UserError unless 64
    divides ctx and 32 divides d.
    """
    emit = attention_decode.attention_decode if kernel_module(m) is attention_decode else attention_prefill.attention_prefill
    return emit(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan)
