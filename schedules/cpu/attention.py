"""Attention on the CPU: the kernel for one token or a few (`attention_decode.py`) or for a chunk of tokens
(`attention_prefill.py`).

Both take the rotated queries and the caches that `rope_kv_write.py` wrote, and give the heads' outputs, float32 or int8
blocks.
"""

from tvm import tirx

from mlc_amd.schedules.cpu import attention_decode, attention_prefill

FEW = 4  # tokens that decode's kernel serves, too: too few for tasks of their own
ROWS = 64  # ... if tokens times heads of a group are not more, for its products are unrolled


def kernel_module(m, group):
    """The module of the kernel for m tokens and groups of so many heads."""
    return attention_decode if m == 1 or (m <= FEW and m * group <= ROWS) else attention_prefill


def attention(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float32 [m, heads, d], Kc float16 [kv_heads, ctx/16, d, 16], Vc float16 [kv_heads,
    ctx, d], then A, S of [m, heads*d] in tiles of p tokens if `quantize`, else O float32 [m, heads*d]).

    Causal: token i sees the keys 0 .. state[0] + i. plan: of the module that makes the kernel; None: its default.
    UserError unless 64 divides ctx and 32 divides d.
    """
    few = kernel_module(m, heads // kv_heads) is attention_decode
    emit = attention_decode.attention_decode if few else attention_prefill.attention_prefill
    return emit(heads, kv_heads, d, ctx, m, p, quantize, isa, name, plan)
