"""llama4: Llama 4, text. Of four layers three have RoPE and see a chunk of keys, the last has a temperature; experts
take their input times its weight, beside a shared expert."""

from dataclasses import replace

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, SharedExpertConfig, TemperatureConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    feed_forward,
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_rope,
)
from mlc_amd.compiler.models.registry import architecture

STEP = 4  # of every four layers the last one has no RoPE
CHUNK = 8192  # tokens of a chunk, and of a step of the temperature
EXPERTS_MAVERICK = 128  # the one model without norms over the heads


@architecture("llama4")
def read(keys: Keys) -> ModelConfig:
    # heads are normalized after RoPE, without weights: rotations keep the norm, so before is the same
    norms = keys.integer("expert_count") != EXPERTS_MAVERICK
    local = read_attention(keys, chunk=CHUNK, head_norms=norms, norm_weights=False)
    temperature = TemperatureConfig(0.1, CHUNK, offset=1)
    mixer = replace(local, rope="", chunk=0, head_norms=False, temperature=temperature)
    size, step = keys.integer("expert_feed_forward_length"), keys.integer("interleave_moe_layer_step", 1)
    experts = read_experts(
        keys, size, gating="sigmoid", normalize=False, weigh_input=True, shared=SharedExpertConfig(size)
    )
    dense = feed_forward(keys, keys.integer("feed_forward_length"))
    layers = [
        LayerConfig(mixer if (i + 1) % STEP == 0 else local, experts if (i + 1) % step == 0 else dense)
        for i in range(read_layers(keys))
    ]
    return read_model(keys, layers, {ROPE: read_rope(keys, mixer.head_dim, neox=False)})
