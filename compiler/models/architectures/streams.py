"""Decoders whose residual streams are more than x + block(x)."""

import math
from dataclasses import replace
from typing import Any

from mlc_amd.compiler.models.architectures.local import PLAIN_QKV
from mlc_amd.compiler.models.architectures.mixtures import beside_shared
from mlc_amd.compiler.models.architectures.stateful import check_heads, delta_net, qwen_experts, recurrent_layers
from mlc_amd.compiler.models.architectures.uniform import INDEX_ROPE, indexed_rotations, latent_attention, read_indexer
from mlc_amd.compiler.models.compressed.attention import BACK, BLOCK_ROPE, COMPRESSED_ROPE
from mlc_amd.compiler.models.compressed.config import OVERLAPPING, CompressedConfig
from mlc_amd.compiler.models.config import Block, ExpertsConfig, IndexerConfig, LayerConfig, Mixer, ModelConfig, Norms
from mlc_amd.compiler.models.metadata import (
    ROPE,
    Keys,
    check_multiple,
    dense,
    dense_then,
    each_layer,
    predicting_layers,
    read_attention,
    read_layers,
    read_model,
    read_rope,
    read_taps,
    read_uniform,
    rotations,
    shared_expert,
    vocabulary,
)
from mlc_amd.compiler.models.recurrent_config import NGRAMS, ChannelDeltaConfig, NgramConfig
from mlc_amd.compiler.models.registry import architecture
from mlc_amd.compiler.models.residuals.config import CheckpointConfig, GatedConfig, HyperConfig
from mlc_amd.schedules.operators.experts import LIMITED, SITU

MOST_STREAMS = 8  # a thread has a matrix of streams by streams in its registers
LONG_BLOCKS = 128  # positions of the blocks of deepseek4 that do not overlap


def _stream_count(keys: Keys) -> int:
    return keys.integer("hyper_connection.count", maximum=MOST_STREAMS)


@architecture("hy_v4", ignored=("attn_output.scale",))
def hy_v4(keys: Keys) -> ModelConfig:
    """Hunyuan 4. As deepseek32 or deepseek2 with a gate and sinks in attention, limits of the experts' activations, and
    hyper connections."""
    indexed = keys.integer("attention.indexer.top_k", 0, minimum=0) > 0
    types = keys.integers("attention.indexer.types", read_layers(keys), 1, minimum=0) if indexed else []
    norm_eps = keys.number("attention.layer_norm_rms_epsilon", minimum=0.0)

    def mixer(own: Keys) -> Mixer:
        indexer = read_indexer(own, bool(types[own.layer or 0]), last=True, eps=norm_eps) if types else None
        return latent_attention(own, ROPE, own_gate="sigmoid", sinks=True, indexer=indexer)

    def experts(own: Keys) -> ExpertsConfig:
        limit = own.number("swiglu_clamp_exp", 0.0, minimum=0.0)
        return beside_shared(own, act=f"{LIMITED}{limit}" if limit else "silu")

    eps, magnitude = (keys.number(f"hyper_connection.{key}", minimum=0.0) for key in ("epsilon", "magnitude"))
    streams = HyperConfig(_stream_count(keys), eps, magnitude, post_eps=eps)
    block = dense_then(keys, experts)
    layers = [LayerConfig(mixer(own), block(own)) for own in each_layer(keys)]
    return read_model(keys, layers, indexed_rotations(keys, neox=False), streams=streams)


@architecture("deepseek4", ignored=("exp_probs_b_vl.bias",))
def deepseek4(keys: Keys) -> ModelConfig:
    """DeepSeek V4. Attention to compressed keys, hyper connections, experts with limits on their activations, and a
    shared one; in the first layers, experts are chosen by token."""
    predicting, vocab = predicting_layers(keys, known=False), vocabulary(keys)
    ratios = keys.numbers("attention.compress_ratios")  # of layers that predict, too
    if len(ratios) < read_layers(keys):
        raise keys.error("attention.compress_ratios has fewer entries than the model layers; convert the model again")
    hashed = keys.integer("hash_layer_count", 0, minimum=0)
    sizes: dict[str, Any] = {
        name: keys.integer(f"attention.{key}")
        for name, key in {
            "heads": "head_count", "head_dim": "key_length", "window": "sliding_window", "query_rank": "q_lora_rank",
            "groups": "output_group_count", "rank": "output_lora_rank", "index_heads": "indexer.head_count",
            "index_dim": "indexer.key_length", "used": "indexer.top_k",
        }.items()
    }  # fmt: skip
    for name in ("head_dim", "index_dim"):
        check_multiple(keys, f"columns of keys ({name})", sizes[name])
    if sizes["heads"] % sizes["groups"]:
        raise keys.error(f"{sizes['heads']} heads do not divide into {sizes['groups']} groups; convert the model again")

    def block(own: Keys) -> ExpertsConfig:
        limit = own.number("swiglu_clamp_exp", 0.0, minimum=0.0)
        of_shared = own.number("swiglu_clamp_shexp", limit, minimum=0.0)
        act, of = (f"{LIMITED}{one}" if one else "silu" for one in (limit, of_shared))
        shared = shared_expert(
            own.integer("expert_feed_forward_length") * own.integer("expert_shared_count", 0, minimum=0), act=of
        )
        table = vocab if (own.layer or 0) < hashed else 0
        return beside_shared(own, act=act, shared=shared, gating="sqrt_softplus", table=table)

    def mixer(own: Keys) -> CompressedConfig:
        ratio = ratios[own.layer or 0]
        if ratio not in (0, OVERLAPPING, LONG_BLOCKS):
            raise keys.error(f"blocks of {ratio} positions are not supported; use another model")
        return CompressedConfig(**sizes, ratio=ratio)

    iterations = keys.integer("hyper_connection.sinkhorn_iterations")
    streams = HyperConfig(
        _stream_count(keys), keys.number("hyper_connection.epsilon", minimum=0.0), 2.0, iterations=iterations
    )
    layers = predicting.of(lambda own: LayerConfig(mixer(own), block(own)))
    rotating = keys.integer("rope.dimension_count")
    columns = min(sizes["head_dim"], sizes["index_dim"])  # all keys rotate alike
    plain = read_rope(keys, columns, neox=False, scaled=False, dim=rotating)
    base = keys.number("attention.compress_rope_freq_base")
    far = read_rope(keys, columns, neox=False, dim=rotating, base=base, log_multiplier=1.0)
    ropes = {ROPE: plain, COMPRESSED_ROPE: far}
    ropes |= {name + BACK: replace(rope, back=True) for name, rope in ropes.items()}
    ropes |= {
        f"{BLOCK_ROPE}{ratio}": replace(far, offset=1 - ratio)
        for ratio in (OVERLAPPING, LONG_BLOCKS)
        if ratio in ratios
    }
    return read_model(keys, layers, ropes, streams=streams, unused=predicting.unused)


@architecture("qwen4exp", "experts", "shared", "states", ignored=tuple(f"attn_{which}.bias" for which in "qkv"))
def qwen4exp(keys: Keys) -> ModelConfig:
    """Qwen 4 Exp. As qwen35moe with gated hyper connections, sigmoid gates of the delta nets, embeddings of the last
    tokens, and attention to the best blocks of keys."""
    streams = GatedConfig(_stream_count(keys), keys.integer("hyper_connection.low_rank"))
    recurrent = recurrent_layers(keys, read_layers(keys))
    with_ngrams = keys.numbers("ple.layers") if keys.has("ple.layers") else []
    ratios = keys.integers("attention.compress_ratios", len(recurrent), 0, minimum=0)

    def mixer(own: Keys) -> Mixer:
        i = own.layer or 0
        if recurrent[i]:
            return delta_net(own, sigmoid=True, ngrams=_ngrams(own, streams.count) if i in with_ngrams else None)
        heads, dim, used = (own.integer(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k"))
        indexer = IndexerConfig(heads, dim, used, INDEX_ROPE, block=max(ratios[i], 2))
        variant: dict[str, Any] = {"indexer": indexer if ratios[i] else None}
        return read_attention(own, head_norms=True, output_gate=True, merged_qkv=False, **variant)

    layers = [
        LayerConfig(mixer(own), qwen_experts(own), mixer_norms=Norms(), feed_forward_norms=Norms())
        for own in each_layer(keys)
    ]
    ropes = rotations(keys, layers, neox=True)
    blocks = {a.indexer.block for layer in layers if (a := layer.attention) and a.indexer}
    if blocks - {max(blocks, default=0)}:
        raise keys.error("the layers' blocks of keys differ in size, which is not supported; use another model")
    if blocks:
        ropes[INDEX_ROPE] = replace(ropes[ROPE], offset=1 - max(blocks))
    return read_model(keys, layers, ropes, streams=streams, output_norm="")


def _ngrams(keys: Keys, streams: int) -> NgramConfig:
    size, heads = keys.integer("ple.ngram_size", minimum=2), keys.integer("ple.heads_per_ngram")
    multipliers, offsets, sizes = (
        tuple(keys.numbers(f"ple.{name}")) for name in ("layer_multipliers", "head_offsets", "head_vocab_sizes")
    )
    count = (size - 1) * heads
    if min(len(offsets), len(sizes)) < count or len(multipliers) < size or 0 in sizes:
        raise keys.error(f"the file has too few numbers for hashes of {count} heads; convert the model again")
    if max(multipliers) * vocabulary(keys) >> 63 or max(sizes[:count]) >> 25:
        raise keys.error("the numbers of hashes are too large, which is not supported; use another model")
    end = keys.integer("ple.eos_token_id", 0, minimum=0)
    rows = max(first + own for first, own in zip(offsets[:count], sizes[:count], strict=True))
    return NgramConfig(
        size, heads, keys.integer("embedding_length_per_layer_input"), keys.rows(NGRAMS) or rows,
        keys.integer("ple.conv_kernel"), streams, end, keys.integer("ple.image_token_id", end, minimum=0),
        multipliers[:size], offsets[:count], sizes[:count],
    )  # fmt: skip


@architecture("kimi-k3", ignored=(*PLAIN_QKV, "attn_output.scale"))
def kimi_k3(keys: Keys) -> ModelConfig:
    """Kimi K3. As kimi-linear; decays have a bound, latent attention a gate, experts read a latent; the residual stream
    begins anew every few layers, and blocks read all of its parts."""
    heads, size = keys.at(0).integer("attention.head_count"), keys.integer("kda.head_dim")
    check_heads(keys, heads, size)
    bound, taps = keys.number("kda.gate_lower_bound", 0.0, minimum=-math.inf), read_taps(keys, "ssm.conv_kernel")
    delta = ChannelDeltaConfig(heads, size, taps, bound, sign=-1.0, gates=("ssm_g",))
    kv_heads = keys.integers("attention.head_count_kv", read_layers(keys), minimum=0)
    numbers = (keys.number(f"activation.situ_{which}", minimum=0.0) for which in ("beta", "linear_beta"))
    act = SITU + "_".join(map(str, numbers))

    def experts(own: Keys) -> ExpertsConfig:
        size, latent = (own.integer(f"expert_{key}", 0, minimum=0) for key in ("feed_forward_length", "latent_length"))
        shared = shared_expert(size * max(own.integer("expert_shared_count", 0, minimum=0), 1), act=act)
        fields: dict[str, Any] = {"latent_name": "routed", "latent_norm": own.owns("ffn_routed_norm.weight")}
        return beside_shared(own, act=act, shared=shared, latent=latent, **fields)

    def block(own: Keys) -> Block:
        return dense(own, act) if (own.layer or 0) < leading else experts(own)

    def mixer(own: Keys) -> Mixer:
        gate = "sigmoid" if own.owns("attn_gate.weight") else ""
        return latent_attention(own, "", own_gate=gate) if kv_heads[own.layer or 0] else delta

    leading = keys.integer("leading_dense_block_count", 0, minimum=0)
    step = keys.integer("attn_res.block_size", minimum=0)
    return read_uniform(keys, False, mixer, block, streams=CheckpointConfig(step) if step else None)
