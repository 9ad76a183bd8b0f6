"""starcoder2: StarCoder 2. Layer norms and matrices with biases, a feed-forward block without a gate."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("starcoder2")
def read(keys: Keys) -> ModelConfig:
    mixer, block = read_attention(keys), read_feed_forward(keys, act="gelu", gated=False, bias=True)
    layers = [LayerConfig(mixer, block)] * read_layers(keys)
    ropes = {ROPE: read_rope(keys, mixer.head_dim, neox=True)}
    return read_model(keys, layers, ropes, norm="layer", norm_bias=True)
