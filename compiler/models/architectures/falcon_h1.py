"""falcon-h1: Falcon H1. In every layer attention and a selective state space (Mamba-2) read the same norm. The weight
of the norm before the dense block is named without ".weight"."""

from mlc_amd.compiler.models.architectures.mamba2 import read_mamba2
from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("falcon-h1")
def read(keys: Keys) -> ModelConfig:
    mixer = read_attention(keys)
    layer = LayerConfig(
        mixer,
        read_feed_forward(keys),
        feed_forward_norms=Norms(before="ffn_norm", bare=True),
        beside=read_mamba2(keys, norm="blk.0.ssm_norm.weight" in keys.tensors),
    )
    return read_model(keys, [layer] * read_layers(keys), {ROPE: read_rope(keys, mixer.head_dim, neox=True)})
