"""smollm3: SmolLM 3. As llama, without RoPE in every fourth layer."""

from dataclasses import replace

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture

STEP = 4  # of every four layers the last one has no RoPE


@architecture("smollm3")
def read(keys: Keys) -> ModelConfig:
    mixer, block = read_attention(keys), read_feed_forward(keys)
    layers = [
        LayerConfig(replace(mixer, rope="" if (i + 1) % STEP == 0 else ROPE), block) for i in range(read_layers(keys))
    ]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=False)})
