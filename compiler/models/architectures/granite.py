"""IBM Granite 3 and 4: factors on the embedding, the attention's scores, the outputs of the blocks and the logits."""

from collections.abc import Sequence
from typing import Any

from mlc_amd.compiler.models.architectures.state_spaces import read_mamba2
from mlc_amd.compiler.models.config import ExpertsConfig, FeedForwardConfig, LayerConfig, Mixer, ModelConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    ROPE,
    attention_or,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layers,
    read_model,
    read_rope,
    shared_expert,
)
from mlc_amd.compiler.models.registry import architecture


@architecture("granite")
def granite(keys: Keys) -> ModelConfig:
    """Granite 3 and 4, dense. As llama, with those factors."""
    return _read_uniform(keys, read_feed_forward(keys))


@architecture("granitemoe")
def granitemoe(keys: Keys) -> ModelConfig:
    """Granite 3 and 4 with experts in every layer, beside a shared expert in some models."""
    return _read_uniform(keys, _experts(keys))


@architecture("granitehybrid")
def granitehybrid(keys: Keys) -> ModelConfig:
    """Granite 4 H. Most layers are selective state spaces (Mamba-2), the others attention; which, the number of KV
    heads says layer by layer. Every layer has a dense block or experts beside a shared one."""
    mixers, head_dim = attention_or(keys, read_mamba2(keys), **_attention_variant(keys))
    sparse = keys.integer("expert_count", 0, minimum=0)
    return _read(keys, mixers, _experts(keys) if sparse else read_feed_forward(keys), head_dim)


def _experts(keys: Keys) -> ExpertsConfig:
    shared = shared_expert(keys.integer("expert_shared_feed_forward_length", 0, minimum=0))
    return read_experts(keys, keys.integer("feed_forward_length"), gating="softmax", shared=shared)


def _read_uniform(keys: Keys, block: FeedForwardConfig | ExpertsConfig) -> ModelConfig:
    mixer = read_attention(keys, **_attention_variant(keys))
    return _read(keys, [mixer] * read_layers(keys), block, mixer.head_dim)


def _attention_variant(keys: Keys) -> dict[str, Any]:
    """Fields of Granite's AttentionConfig."""
    return {
        "rope": ROPE if keys.flag("rope.scaling.finetuned", True) else "",
        "scale": keys.number("attention.scale", 0.0, minimum=0.0),
    }


def _read(keys: Keys, mixers: Sequence[Mixer], block: FeedForwardConfig | ExpertsConfig, head_dim: int) -> ModelConfig:
    """A model whose layers have these mixers and that block.

    The residual stream x of the original is kept as x / residual_scale: then blocks add their outputs as they are, and
    norms, whose results do not depend on a factor of x, only need another epsilon."""
    residual = keys.number("residual_scale", 0.0, minimum=0.0) or 1.0
    rotates = bool(_attention_variant(keys)["rope"])
    return read_model(
        keys,
        [LayerConfig(mixer, block) for mixer in mixers],
        {ROPE: read_rope(keys, head_dim, neox=False)} if rotates else {},
        norm_eps=keys.number("attention.layer_norm_rms_epsilon") / residual**2,
        embedding_scale=(keys.number("embedding_scale", 0.0, minimum=0.0) or 1.0) / residual,
        logit_scale=1.0 / (keys.number("logit_scale", 0.0, minimum=0.0) or 1.0),
    )
