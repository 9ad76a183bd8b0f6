"""seed_oss: Seed OSS. As qwen2, with its own head size."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("seed_oss")
def read(keys: Keys) -> ModelConfig:
    mixer, norms = read_attention(keys), Norms(before="post_attention_norm")
    layers = [LayerConfig(mixer, read_feed_forward(keys), feed_forward_norms=norms)] * read_layers(keys)
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=True)})
