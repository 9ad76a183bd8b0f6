"""granite: IBM Granite 3 and 4, dense. As llama, with factors on the embedding, the attention's scores, the outputs of
the blocks and the logits."""

from collections.abc import Sequence
from typing import Any

from mlc_amd.compiler.models.config import ExpertsConfig, FeedForwardConfig, LayerConfig, Mixer, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.registry import architecture


@architecture("granite")
def read(keys: Keys) -> ModelConfig:
    return read_granite(keys, read_feed_forward(keys))


def read_granite(keys: Keys, block: FeedForwardConfig | ExpertsConfig) -> ModelConfig:
    """A Granite model with attention and that block in every layer."""
    mixer = read_attention(keys, **attention_variant(keys))
    return read_layers_of(keys, [mixer] * read_layers(keys), block, mixer.head_dim)


def attention_variant(keys: Keys) -> dict[str, Any]:
    """Fields of Granite's AttentionConfig."""
    return {
        "rope": ROPE if keys.flag("rope.scaling.finetuned", True) else "",
        "scale": keys.number("attention.scale", 0.0, minimum=0.0),
    }


def read_layers_of(
    keys: Keys, mixers: Sequence[Mixer], block: FeedForwardConfig | ExpertsConfig, head_dim: int
) -> ModelConfig:
    """A Granite model whose layers have these mixers and that block.

    The residual stream x of the original is kept as x / residual_scale: then blocks add their outputs as they are, and
    norms, whose results do not depend on a factor of x, only need another epsilon."""
    residual = keys.number("residual_scale", 0.0, minimum=0.0) or 1.0
    rotates = bool(attention_variant(keys)["rope"])
    return read_model(
        keys,
        [LayerConfig(mixer, block) for mixer in mixers],
        {ROPE: read_rope(keys, head_dim, neox=False)} if rotates else {},
        norm_eps=keys.number("attention.layer_norm_rms_epsilon") / residual**2,
        embedding_scale=(keys.number("embedding_scale", 0.0, minimum=0.0) or 1.0) / residual,
        logit_scale=1.0 / (keys.number("logit_scale", 0.0, minimum=0.0) or 1.0),
    )
