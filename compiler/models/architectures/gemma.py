"""gemma: Gemma 1. As llama with a GELU gate, a scaled embedding and its own head size."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("gemma")
def read(keys: Keys) -> ModelConfig:
    mixer = read_attention(keys)
    layers = [LayerConfig(mixer, read_feed_forward(keys, act="gelu"))] * read_layers(keys)
    scale = keys.integer("embedding_length") ** 0.5
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True)}, embedding_scale=scale)
