"""granite: IBM Granite 3 and 4, dense. As llama, with factors on the embedding, the attention's scores, the outputs of
the blocks and the logits."""

from mlc_amd.compiler.models.config import ExpertsConfig, FeedForwardConfig, LayerConfig, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import ROPE, read_attention, read_feed_forward, read_layers, read_model, read_rope
from mlc_amd.compiler.models.tensors import tensors
from mlc_amd.compiler.models.transformer import decoder

__all__ = ["decoder", "read", "tensors"]


def read(keys: Keys) -> ModelConfig:
    return read_granite(keys, read_feed_forward(keys))


def read_granite(keys: Keys, block: FeedForwardConfig | ExpertsConfig) -> ModelConfig:
    """A Granite model with that block in every layer.

    The residual stream x of the original is kept as x / residual_scale: then blocks add their outputs as they are, and
    norms, whose results do not depend on a factor of x, only need another epsilon."""
    residual = keys.number("residual_scale", 0.0, minimum=0.0) or 1.0
    mixer = read_attention(
        keys,
        rope=ROPE if keys.flag("rope.scaling.finetuned", True) else "",
        scale=keys.number("attention.scale", 0.0, minimum=0.0),
    )
    return read_model(
        keys,
        [LayerConfig(mixer, block)] * read_layers(keys),
        {ROPE: read_rope(keys, mixer.head_dim, neox=False)} if mixer.rope else {},
        norm_eps=keys.number("attention.layer_norm_rms_epsilon") / residual**2,
        embedding_scale=(keys.number("embedding_scale", 0.0, minimum=0.0) or 1.0) / residual,
        logit_scale=1.0 / (keys.number("logit_scale", 0.0, minimum=0.0) or 1.0),
    )
