"""llama: Llama 2 and 3.x, Mistral, TinyLlama, SmolLM. Grouped queries, interleaved RoPE pairs, SwiGLU; biases where the
file has them."""

from mlc_amd.compiler.models.graph import Graph
from mlc_amd.compiler.models.transformer import attention_block, logits, swiglu_block


def decoder(g: Graph):
    x = g.embed("token_embd.weight")
    for layer in range(g.config.layers):
        x = attention_block(g, x, layer)
        x = swiglu_block(g, x, layer)
    return logits(g, x)
