"""LFM2 and LFM2.5: most layers mix by short gated convolutions, the others by attention with head norms; which, the
number of KV heads says layer by layer."""

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, ShortConvConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    attention_or,
    check_multiple,
    dense_then,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_taps,
)
from mlc_amd.compiler.models.registry import architecture


@architecture("lfm2")
def lfm2(keys: Keys) -> ModelConfig:
    """Dense blocks."""
    return _read(keys, [read_feed_forward(keys)] * read_layers(keys))


@architecture("lfm2moe")
def lfm2moe(keys: Keys) -> ModelConfig:
    """Experts after the leading dense layers, chosen by sigmoid (which the file says) and a bias."""
    experts = read_experts(keys, keys.integer("expert_feed_forward_length"), selection_bias=True)
    return _read(keys, dense_then(keys, read_layers(keys), lambda keys, leading: experts))


def _read(keys: Keys, blocks: list) -> ModelConfig:
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    conv = ShortConvConfig(read_taps(keys, "shortconv.l_cache"))
    check_multiple(keys, "hidden size", keys.integer("embedding_length"))
    mixers, head_dim = attention_or(keys, conv, ROPE, head_norms=True, window=window)
    rotates = any(mixer is not conv for mixer in mixers)
    ropes = {ROPE: read_rope(keys, head_dim, neox=True)} if rotates else {}
    layers = [LayerConfig(mixer, block) for mixer, block in zip(mixers, blocks, strict=True)]
    return read_model(keys, layers, ropes, output_norm="token_embd_norm")
