"""qwen3: as qwen2 without biases, an RMS norm over each head of q and k before RoPE, and a head size of its own."""

from mlc_amd.compiler.models.graph import Graph
from mlc_amd.compiler.models.transformer import attention_block, logits, swiglu_block

HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")


def decoder(g: Graph):
    x = g.embed("token_embd.weight")
    for layer in range(g.config.layers):
        x = attention_block(g, x, layer, HEAD_NORMS)
        x = swiglu_block(g, x, layer)
    return logits(g, x)
