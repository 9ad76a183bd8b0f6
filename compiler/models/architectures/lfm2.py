"""lfm2: LFM2 and LFM2.5. Most layers mix by short gated convolutions, the others by attention with head norms; which,
the number of KV heads says layer by layer."""

from mlc_amd.compiler.models.config import LayerConfig, Mixer, ModelConfig, RopeConfig, ShortConvConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    attention,
    check_multiple,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    read_taps,
)
from mlc_amd.compiler.models.registry import architecture

OUTPUT_NORM = "token_embd_norm"


@architecture("lfm2")
def read(keys: Keys) -> ModelConfig:
    mixers, ropes = read_mixers(keys)
    block = read_feed_forward(keys)
    return read_model(keys, [LayerConfig(mixer, block) for mixer in mixers], ropes, output_norm=OUTPUT_NORM)


def read_mixers(keys: Keys) -> tuple[list[Mixer], dict[str, RopeConfig]]:
    """Of each layer, and the rotation of those with attention."""
    heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", max(1, keys.integer("embedding_length") // heads))
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    conv = ShortConvConfig(read_taps(keys, "shortconv.l_cache"))
    check_multiple(keys, "hidden size", keys.integer("embedding_length"))
    mixers: list[Mixer] = [
        attention(keys, heads, kv, head_dim, ROPE, head_norms=True, window=window) if kv else conv
        for kv in keys.integers("attention.head_count_kv", read_layers(keys), minimum=0)
    ]
    return mixers, {ROPE: read_rope(keys, head_dim, neox=True)} if any(mixer is not conv for mixer in mixers) else {}
