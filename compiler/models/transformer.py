"""The two blocks that the architectures here share, and the frame around them.

x = x + W_o attention(rope(W_q h), rope(W_k h), W_v h)     h = rms_norm(x)
x = x + W_down (silu(W_gate h) * W_up h)                   h = rms_norm(x)
"""

from mlc_amd.compiler.models.graph import Graph


def attention_block(g: Graph, x, layer: int, head_norms: tuple[str, str] | None = None):
    """`head_norms`: names of the q and k head norms' weights within the block."""
    block = f"blk.{layer}."
    h = g.rms_norm(x, block + "attn_norm.weight")
    q, k, v = (g.linear(h, f"{block}attn_{which}.weight") for which in "qkv")
    a = g.attention(q, k, v, layer, tuple(block + name for name in head_norms) if head_norms else None)
    return g.add(x, g.linear(a, block + "attn_output.weight"))


def swiglu_block(g: Graph, x, layer: int):
    block = f"blk.{layer}."
    h = g.rms_norm(x, block + "ffn_norm.weight")
    gate, up = g.linear(h, block + "ffn_gate.weight"), g.linear(h, block + "ffn_up.weight")
    return g.add(x, g.linear(g.multiply(g.silu(gate), up), block + "ffn_down.weight"))


def logits(g: Graph, x):
    """Of every token, or of the last live one; the embedding serves as output where the file has no output.weight
    (tied)."""
    h = g.rms_norm(x, "output_norm.weight", row="all" if g.all_logits else "last")
    return g.linear(h, "output.weight" if g.has("output.weight") else "token_embd.weight")
