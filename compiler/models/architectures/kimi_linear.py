"""kimi-linear: Kimi Linear. Most layers are delta nets whose states decay channel by channel, the others have latent
attention without rotation; which, the number of KV heads says layer by layer. After a few dense layers experts beside a
shared one."""

from mlc_amd.compiler.models.architectures.deepseek2 import latent_attention
from mlc_amd.compiler.models.config import (
    ChannelDeltaConfig,
    ExpertsConfig,
    LayerConfig,
    Mixer,
    ModelConfig,
    SharedExpertConfig,
)
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    check_multiple,
    feed_forward,
    read_experts,
    read_layers,
    read_model,
    read_taps,
)
from mlc_amd.compiler.models.registry import architecture

VECTOR = 16  # columns that kernels of delta nets take at once


@architecture("kimi-linear")
def read(keys: Keys) -> ModelConfig:
    count = read_layers(keys)
    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    dense = feed_forward(keys, keys.integer("feed_forward_length")) if leading else None
    experts = _experts(keys, leading) if leading < count else None
    delta, attention = _delta_net(keys), latent_attention(keys, "")
    mixers: list[Mixer] = [
        attention if heads else delta for heads in keys.integers("attention.head_count_kv", count, minimum=0)
    ]
    layers = [LayerConfig(mixer, dense if i < leading else experts) for i, mixer in enumerate(mixers)]
    return read_model(keys, layers, {})


def _delta_net(keys: Keys) -> ChannelDeltaConfig:
    heads, size = keys.integer("attention.head_count"), keys.integer("kda.head_dim")
    check_multiple(keys, "columns of a head of delta nets", size, VECTOR)
    check_multiple(keys, "columns of all heads of delta nets", heads * size)
    return ChannelDeltaConfig(heads, size, read_taps(keys, "ssm.conv_kernel"))


def _experts(keys: Keys, leading: int) -> ExpertsConfig:
    size = keys.integer("expert_feed_forward_length")
    shared = keys.integer("expert_shared_count", 0, minimum=0)
    return read_experts(
        keys,
        size,
        scale=keys.number("expert_weights_scale", 1.0, minimum=0.0) or 1.0,
        selection_bias=f"blk.{leading}.exp_probs_b.bias" in keys.tensors,
        shared=SharedExpertConfig(size * shared) if shared else None,
    )
