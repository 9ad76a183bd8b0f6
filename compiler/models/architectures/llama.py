"""llama: Llama 2 and 3.x, Mistral, Mixtral, TinyLlama, SmolLM. Grouped queries, interleaved RoPE pairs, SwiGLU; biases
where the file has them; a mixture of experts in every layer where it counts experts."""

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import read_experts, read_uniform
from mlc_amd.compiler.models.registry import architecture


@architecture("llama")
def read(keys: Keys) -> ModelConfig:
    experts = None
    if keys.integer("expert_count", 0, minimum=0):
        experts = read_experts(keys, keys.integer("feed_forward_length"))
    return read_uniform(keys, neox=False, feed_forward=experts)
