"""granitehybrid: IBM Granite 4 H. Most layers are selective state spaces (Mamba-2), the others attention; which, the
number of KV heads says layer by layer. Every layer has a dense block or experts beside a shared one."""

from mlc_amd.compiler.models.architectures.granite import attention_variant, read_layers_of
from mlc_amd.compiler.models.architectures.mamba2 import read_mamba2
from mlc_amd.compiler.models.config import ExpertsConfig, FeedForwardConfig, Mixer, ModelConfig, SharedExpertConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import attention, read_experts, read_feed_forward, read_layers
from mlc_amd.compiler.models.registry import architecture


@architecture("granitehybrid")
def read(keys: Keys) -> ModelConfig:
    layers = read_layers(keys)
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, keys.integer("embedding_length") // heads))
    mamba, variant = read_mamba2(keys), attention_variant(keys)
    mixers: list[Mixer] = [
        attention(keys, heads, kv, head_dim, **variant) if kv else mamba
        for kv in keys.integers("attention.head_count_kv", layers, minimum=0)
    ]
    return read_layers_of(keys, mixers, _block(keys), head_dim)


def _block(keys: Keys) -> FeedForwardConfig | ExpertsConfig:
    if not keys.integer("expert_count", 0, minimum=0):
        return read_feed_forward(keys)
    shared = keys.integer("expert_shared_feed_forward_length", 0, minimum=0)
    size = keys.integer("feed_forward_length")
    return read_experts(keys, size, gating="softmax", shared=SharedExpertConfig(shared) if shared else None)
