"""mistral3: Ministral 3 and Mistral Small 3. As llama; the temperature of attention changes with the position."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, TemperatureConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("mistral3")
def read(keys: Keys) -> ModelConfig:
    scale = keys.number("attention.temperature_scale", 0.0, minimum=0.0)
    length = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    mixer = read_attention(keys, temperature=TemperatureConfig(scale, length) if scale else None)
    layers = [LayerConfig(mixer, read_feed_forward(keys))] * read_layers(keys)
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=False)})
