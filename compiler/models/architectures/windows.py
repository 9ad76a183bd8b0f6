"""Decoders in which some layers attend to the last keys only: a window or a chunk of them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlc_amd.compiler.models.config import (
    AttentionConfig,
    Block,
    LayerConfig,
    ModelConfig,
    RopeConfig,
    SharedExpertConfig,
    TemperatureConfig,
)
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    NORMS_AFTER,
    NORMS_AROUND,
    NORMS_BEFORE,
    ROPE,
    SHARED_NORM,
    Keys,
    dense,
    each_layer,
    experts_alone,
    last_of,
    local_layers,
    read_attention,
    read_feed_forward,
    read_layers,
    read_model,
    read_uniform,
    rotations,
)
from mlc_amd.compiler.models.registry import architecture

EXAONE4_32B = 64  # layers of the one EXAONE 4 with windows
GEMMA2_27B, GEMMA3_27B = 46, 62  # layers of the models whose scores are scaled by the hidden size, not the head's
CHUNK = 8192  # llama4: tokens of a chunk, and of a step of the temperature
MAVERICK = 128  # experts of the one Llama 4 without norms over the heads
NOPE_STEP = 4  # llama4: of every four layers the last one has no RoPE


Read = Callable[..., AttentionConfig]  # of the keys of a layer


def _layers(
    keys: Keys, pattern: int, mixer: Read, local: dict[str, Any] | None,
    block: Callable[[Keys], Block], **norms: Any,
) -> list[LayerConfig]:  # fmt: skip
    """The layers. The last one of every `pattern` layers has `mixer`, the others `mixer` with the fields of `local`;
    local None: all have `mixer`."""
    count = read_layers(keys)
    windowed = local_layers(keys, count, pattern) if local else [False] * count
    return [
        LayerConfig(mixer(own, **(local if local and is_local else {})), block(own), **norms)
        for own, is_local in zip(each_layer(keys), windowed, strict=True)
    ]


def _window(keys: Keys) -> int:
    """The window of layers that have one; 0: no layer has a window."""
    return keys.integer("attention.sliding_window", 0, minimum=0)


@architecture("cohere2", "dense")
def cohere2(keys: Keys) -> ModelConfig:
    """Command R7B. One layer norm for attention and feed-forward, which run in parallel; three of four layers attend to
    a window of keys and have RoPE, the last has neither; scaled logits."""
    local = {"window": keys.integer("attention.sliding_window"), "rope": ROPE}
    layers = _layers(keys, 4, partial(read_attention, rope=""), local, read_feed_forward, **SHARED_NORM)
    ropes = rotations(keys, layers, neox=False)
    return read_model(keys, layers, ropes, norm="layer", logit_scale=keys.number("logit_scale"))


@architecture("exaone4")
def exaone4(keys: Keys) -> ModelConfig:
    """EXAONE 4. Norms after the blocks only, and over each head of q and k. In the large model three of four layers
    attend to a window of keys, and the fourth has no RoPE."""
    mixer, local = partial(read_attention, head_norms=True), None
    if read_layers(keys) == EXAONE4_32B:
        local = {"window": keys.integer("attention.sliding_window"), "rope": ROPE}
        mixer = partial(mixer, rope="")
    layers = _layers(keys, 4, mixer, local, read_feed_forward, **NORMS_AFTER)
    return read_model(keys, layers, rotations(keys, layers, neox=True))


@architecture("gemma2")
def gemma2(keys: Keys) -> ModelConfig:
    """Gemma 2. RMS norms before and after each block, GELU gate, scaled embedding, softcaps on attention's scores and
    on the logits; every other layer, the first included, attends to a window of keys."""
    mixer = _gemma_attention(keys, GEMMA2_27B, softcap=keys.number("attn_logit_softcapping", 50.0))
    local = {"window": keys.integer("attention.sliding_window", 4096)}
    return _read_gemma(keys, 2, mixer, local, keys.number("final_logit_softcapping", 30.0))


@architecture("gemma3")
def gemma3(keys: Keys) -> ModelConfig:
    """Gemma 3. As gemma2 with norms over the heads of q and k instead of softcaps; five of six layers attend to a
    window of keys, with a RoPE of their own."""
    mixer, local = _gemma_attention(keys, GEMMA3_27B, head_norms=True, images=True), None
    if window := _window(keys):
        local = {"window": window, "rope": LOCAL_ROPE}
    return _read_gemma(keys, 6, mixer, local, keys.number("final_logit_softcapping", 0.0, minimum=0.0))


def _gemma_attention(keys: Keys, by_hidden: int, **variant) -> Read:
    """by_hidden: numbers of layers of models whose scores are scaled by the hidden size."""
    if read_layers(keys) == by_hidden:
        variant["scale"] = (keys.integer("embedding_length") / keys.integer("attention.head_count")) ** -0.5
    return partial(read_attention, **variant)


def _read_gemma(keys: Keys, pattern: int, mixer, local, softcap: float) -> ModelConfig:
    layers = _layers(keys, pattern, mixer, local, partial(read_feed_forward, act="gelu"), **NORMS_AROUND)
    ropes = rotations(keys, layers, neox=True) | local_rotations(keys, layers, neox=True)
    scale = keys.integer("embedding_length") ** 0.5
    return read_model(keys, layers, ropes, embedding_scale=scale, logit_softcap=softcap)


def local_rotations(keys: Keys, layers: Sequence[LayerConfig], neox: bool, **variant) -> dict[str, RopeConfig]:
    """{LOCAL_ROPE: its RoPE}, if layers use it: with a base of its own, without context extension. `variant`: see
    `read_rope`."""
    base = keys.number("rope.freq_base_swa", 10000.0)
    return rotations(keys, layers, neox, LOCAL_ROPE, **({"scaled": False, "base": base} | variant))


@architecture("gpt-oss")
def gpt_oss(keys: Keys) -> ModelConfig:
    """Attention with sinks, a window in every other layer, the first included; biases everywhere; experts with a
    clamped SwiGLU, chosen by their logits."""
    experts = experts_alone("softmax_used", normalize=False, act="swiglu_oai", biases=True)
    local = {"window": keys.integer("attention.sliding_window")}
    layers = _layers(keys, 2, partial(read_attention, sinks=True), local, experts, **NORMS_BEFORE)
    return read_model(keys, layers, rotations(keys, layers, neox=True))


@architecture("llama4")
def llama4(keys: Keys) -> ModelConfig:
    """Llama 4, text. Three of four layers have RoPE and attend to a chunk of keys, the last one has a temperature. The
    experts' input, instead of their output, is multiplied by the weight; there is a shared expert."""
    # heads are normalized after RoPE, without weights: rotations keep the norm, so before is the same
    local = {"chunk": CHUNK, "head_norms": keys.integer("expert_count") != MAVERICK, "norm_weights": False}
    every = {"rope": "", "temperature": TemperatureConfig(0.1, CHUNK, offset=1)}
    size, step = keys.integer("expert_feed_forward_length"), keys.integer("interleave_moe_layer_step", 1)
    shared = SharedExpertConfig(size)
    experts = experts_alone("sigmoid", normalize=False, weigh_input=True, shared=shared)
    return read_uniform(
        keys,
        neox=False,
        mixer=lambda own: read_attention(own, **(every if last_of(own, NOPE_STEP) else local)),
        block=lambda own: experts(own) if last_of(own, step) else dense(own),
    )


@architecture("olmo2")
def olmo2(keys: Keys) -> ModelConfig:
    """OLMo 2 and 3. Norms after the blocks only, RMS norms over all of q and all of k. In OLMo 3 three of four layers
    attend to a window of keys, with an unscaled RoPE."""
    window = _window(keys)
    local = {"window": window, "rope": LOCAL_ROPE} if window else None
    layers = _layers(keys, 4, partial(read_attention, row_norms=True), local, read_feed_forward, **NORMS_AFTER)
    ropes = rotations(keys, layers, neox=True) | rotations(keys, layers, True, LOCAL_ROPE, scaled=False)
    return read_model(keys, layers, ropes)
