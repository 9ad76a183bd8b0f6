"""qwen2: Qwen 2 and 2.5. As llama, with biases on q, k and v and RoPE pairs half a head apart (config.rope.neox)."""

from mlc_amd.compiler.models.graph import Graph
from mlc_amd.compiler.models.transformer import attention_block, logits, swiglu_block


def decoder(g: Graph):
    x = g.embed("token_embd.weight")
    for layer in range(g.config.layers):
        x = attention_block(g, x, layer)
        x = swiglu_block(g, x, layer)
    return logits(g, x)
