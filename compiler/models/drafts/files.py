"""Reads drafts that read rows of the model for which they guess: GGUF's architectures `eagle3`, `dflash` and
`gemma4-assistant`.

In: the metadata and the names of tensors in a draft's file (`read_draft`). Out: `Draft`; `joined` returns the
configuration of a model with its draft. Names of keys, defaults, and which tensors are optional are llama.cpp's
(src/models/eagle3.cpp, dflash.cpp, gemma4-assistant.cpp).
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlc_amd.compiler.models.config import LayerConfig, ModelConfig, Norms, RopeConfig
from mlc_amd.compiler.models.drafts.config import DraftConfig, PredictorConfig
from mlc_amd.compiler.models.keys import Keys
from mlc_amd.compiler.models.metadata import (
    LOCAL_ROPE,
    NORMS_AROUND,
    ROPE,
    attention,
    check_multiple,
    read_attention,
    read_feed_forward,
    read_layers,
    read_rope,
    rotations,
)
from mlc_amd.compiler.models.tensors import Shape, layer_tensors
from mlc_amd.runtime.artifact.manifest_draft import MOST_BLOCK
from mlc_amd.runtime.errors import UserError, shorten

PREFIX = "draft."  # prefix of the names of a draft's tensors outside of layers, and of its ropes
TOKENS = "d2t"  # the tensor with the token of each row of a draft's output
PLACES = f"{PREFIX}t2d"  # the inverse, a vector: the row of each token, -1 for none
# A tensor that only another kind of dflash has: the name of this kind
OTHER_KINDS = {"markov_w1.weight": "DSpark", "selector_hidden.weight": "DFlash 2", "hc_head_fn.weight": "DSpark"}
EMBEDDINGS = "token_embd.weight", "output.weight"
UNUSED = ("masked_embd_centroids.weight", "masked_embd_ordering")


@dataclass(frozen=True)
class Draft:
    """The contents of a draft's file. tokens: size of the vocabulary; 0 if the file does not say. unused: tensors that
    are not read."""

    config: DraftConfig
    layers: tuple[LayerConfig, ...]
    ropes: dict[str, RopeConfig]
    columns: int  # columns of the model's rows that it reads
    tokens: int
    unused: tuple[str, ...] = ()


Reader = Callable[[Keys], Draft]


def read_draft(metadata: dict[str, object], tensors: Collection[str], path: str) -> Draft:
    """The draft in a file. tensors: shapes by name. Raises UserError for a draft that cannot be compiled."""
    keys = Keys(metadata, tensors, path)
    keys.prefix = keys.string("general.architecture")
    if keys.prefix not in DRAFTS:
        raise keys.error(f"architecture {shorten(keys.prefix)} is not a draft that reads a model's rows")
    return DRAFTS[keys.prefix](keys)


def _draft(keys: Keys, layers: list[LayerConfig], ropes: dict[str, RopeConfig], columns: int, **variant) -> Draft:
    """A draft with these layers. columns: see `Draft`. variant: fields of DraftConfig."""
    hidden = keys.integer("embedding_length")
    check_multiple(keys, "hidden size", hidden)
    for layer in layers:
        check_multiple(keys, "feed-forward size", getattr(layer.feed_forward, "size", 0))
    fields: dict[str, Any] = {
        "architecture": keys.prefix,
        "file": keys.path,
        "hidden": hidden,
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon", minimum=0.0),
        "embedding": "token_embd.weight" in keys.tensors,
        "head": "output.weight" if "output.weight" in keys.tensors else "",
        "vocab": keys.rows(TOKENS),
    }
    listed = keys.metadata.get("tokenizer.ggml.tokens")
    tokens = len(listed) if isinstance(listed, list) and listed else keys.integer("vocab_size", 0, minimum=0)
    config = DraftConfig(**(fields | variant))
    unused = tuple(name for name in UNUSED if name in keys.tensors)
    return Draft(config, tuple(layers), ropes, columns, tokens, unused)


def _target_layers(keys: Keys) -> tuple[int, ...]:
    found = keys.metadata.get(keys.full("target_layers"))
    if not isinstance(found, list) or not found or not all(type(one) is int and 0 <= one < 1 << 16 for one in found):
        raise keys.error(f"metadata key {keys.full('target_layers')} is not a list of layers; convert the model again")
    if len(set(found)) < len(found):
        raise keys.error(f"{keys.full('target_layers')} names a layer twice; convert the model again")
    return tuple(found)


def eagle3(keys: Keys) -> Draft:
    """EAGLE-3: one layer, whose attention reads a token, and a row made of the rows of three layers of the model."""
    kept = _target_layers(keys)
    if len(kept) != 3 or read_layers(keys) != 1:
        raise keys.error("an eagle3 draft has one layer, and reads three of the model; convert the model again")
    own = keys.at(0)
    layers = [LayerConfig(read_attention(own), read_feed_forward(own), mixer_norms=Norms())]
    return _draft(
        keys,
        layers,
        rotations(keys, layers, neox=False),
        keys.integer("target_hidden_size"),
        kept=kept,
        drafted=keys.integer("embedding_length"),
        early_norm=keys.flag("norm_before_fc", False),
        normed_residual=keys.flag("norm_before_residual", False),
    )


def dflash(keys: Keys) -> Draft:
    """DFlash: guesses a block of tokens at once. The rows of the block attend to each other, and to keys made of rows
    of the model."""
    if kind := next((kind for name, kind in OTHER_KINDS.items() if name in keys.tensors), None):
        raise keys.error(f"drafts of the kind {kind} are not supported; use a plain DFlash draft")
    block, causal = keys.integer("block_size", 16, minimum=2, maximum=MOST_BLOCK), keys.flag("attention.causal", False)
    count = read_layers(keys)
    window = keys.integer("attention.sliding_window", 0, minimum=0)
    local = keys.flags("attention.sliding_window_pattern", count) if window else [False] * count
    scale = keys.number("attention.scale", 0.0, minimum=0.0)
    act = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu"}.get(keys.string("hidden_activation", "silu"))
    if act is None:
        raise keys.error(f"metadata key {keys.full('hidden_activation')} is not supported; use another draft")

    def layer(own: Keys, is_local: bool) -> LayerConfig:
        shared = not own.owns("attn_v.weight")
        mixer = read_attention(
            own, head_norms=True, scale=scale, window=window if is_local else 0, images=not causal,
            value_is_key=shared, value_norm=shared, sinks=own.owns("attn_sinks.weight"),
        )  # fmt: skip
        mixer_norms, block_norms = (
            Norms(before, after if own.owns(f"{after}.weight") else "")
            for before, after in (("attn_norm", "post_attention_norm"), ("ffn_norm", "post_ffw_norm"))
        )
        block = read_feed_forward(own, act=act)
        return LayerConfig(mixer, block, mixer_norms, block_norms, output_scale=own.owns("layer_output_scale.weight"))

    layers = [layer(keys.at(i), is_local) for i, is_local in enumerate(local)]
    tied = {"head": "token_embd.weight"} if {"token_embd.weight"} == {*EMBEDDINGS} & {*keys.tensors} else {}
    return _draft(
        keys,
        layers,
        rotations(keys, layers, neox=True, sections=()),
        keys.integer("embedding_length"),
        kept=_target_layers(keys),
        block=block,
        mask=keys.integer("tokenizer.ggml.mask_token_id", minimum=0),
        causal=causal,
        embedding_scale=keys.number("embedding_scale", 1.0, minimum=0.0) or 1.0,
        **tied,
    )


def gemma4_assistant(keys: Keys) -> Draft:
    """Gemma 4's assistant: a few small layers that attend to keys and values of the model's last layers."""
    count, columns = read_layers(keys), keys.integer("embedding_length_out")
    local = keys.flags("attention.sliding_window_pattern", count)
    heads = {which: keys.integer(f"attention.key_length{which}") for which in ("", "_swa")}
    bases = {which: keys.number(f"rope.freq_base{which}", 10000.0) for which in heads}
    dims = {which: keys.integer(f"rope.dimension_count{which}", heads[which]) for which in heads}

    def layer(own: Keys, is_local: bool) -> LayerConfig:
        size, rope = heads["_swa" if is_local else ""], LOCAL_ROPE if is_local else ROPE
        # `joined` replaces kv_layer and kv_heads: they follow from the model
        mixer = attention(
            own, own.integer("attention.head_count"), 1, size, rope, scale=1.0, head_norms=True, kv_layer=0,
            window=own.integer("attention.sliding_window") if is_local else 0,
        )  # fmt: skip
        block = read_feed_forward(own, act="gelu")
        return LayerConfig(mixer, block, output_scale=True, **NORMS_AROUND)

    layers = [layer(keys.at(i), is_local) for i, is_local in enumerate(local)]
    # The row of position p stands for the token at p + 1.
    ropes = {
        ROPE: read_rope(keys, heads[""], neox=True, base=bases[""], dim=dims[""], offset=1),
        LOCAL_ROPE: read_rope(
            keys, heads["_swa"], True, False, base=bases["_swa"], dim=dims["_swa"], factors="", offset=1
        ),
    }
    used = {a.rope for one in layers if (a := one.attention)}
    ropes = {name: rope for name, rope in ropes.items() if name in used}
    return _draft(keys, layers, ropes, columns, kept=(), drafted=columns, own_keys=False, head="token_embd.weight")


DRAFTS: dict[str, Reader] = {"eagle3": eagle3, "dflash": dflash, "gemma4-assistant": gemma4_assistant}


def tensors(draft: Draft, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor in the draft's file, except TOKENS."""
    d = draft.config
    rows = len(d.kept) * model.hidden
    if d.embedding:
        yield "token_embd.weight", (model.vocab, d.hidden)
    for rope in draft.ropes.values():
        if rope.factors:
            yield rope.factors, (rope.dim // 2,)
    if d.kept:
        yield "fc.weight", (d.hidden, rows)
    if d.block or d.early_norm:
        yield "enc.output_norm.weight", (d.hidden if d.block else rows,)
    if not d.own_keys:
        yield "nextn.pre_projection.weight", (d.hidden, 2 * model.hidden)
        yield "nextn.post_projection.weight", (model.hidden, d.hidden)
    own = replace(model, hidden=d.hidden, norm_weights=True)
    for i, layer in enumerate(draft.layers):
        for name, shape in layer_tensors(own, layer):
            first = name in ("attn_q.weight", "attn_k.weight", "attn_v.weight") and d.architecture == "eagle3"
            yield f"blk.{i}.{name}", (shape[0], 2 * d.hidden) if first else shape
        if d.architecture == "eagle3":
            yield from ((f"blk.{i}.{name}.weight", (d.hidden,)) for name in ("attn_norm", "attn_norm_2"))
        if layer.output_scale:
            yield f"blk.{i}.layer_output_scale.weight", (1,)
    yield "output_norm.weight", (d.hidden,)
    if d.head == "output.weight":
        yield "output.weight", (d.vocab or model.vocab, d.hidden)


def joined(model: ModelConfig, draft: Draft) -> ModelConfig:
    """The configuration of a model with a draft, which replaces its layer for multi-token prediction. Raises UserError
    if the draft is for another model."""
    d, count = draft.config, len(model.decoder_layers)
    if model.encoder:
        raise UserError(f"{d.file}: an embedding model has no use for a draft; leave it out")
    if draft.columns != model.hidden or max(d.kept, default=0) > count or draft.tokens not in (0, model.vocab):
        wanted = draft.columns, draft.tokens or "any", max(d.kept, default=1)
        raise UserError(
            f"{d.file}: this draft is for another model, of {wanted[0]} columns, {wanted[1]} tokens and {wanted[2]} "
            f"layers or more; this one has {model.hidden}, {model.vocab} and {count}"
        )
    if not d.own_keys and model.architecture != "gemma4":
        raise UserError(f"{d.file}: a {d.architecture} draft is for gemma4 models, not {model.architecture}")
    if d.mask >= model.vocab:
        raise UserError(f"{d.file}: its mask token is {d.mask}, the model has {model.vocab} tokens")
    if not (d.embedding and d.head) and d.hidden != model.hidden:
        raise UserError(
            f"{d.file}: it has no token_embd or output of its own, and those of the model have another width"
        )
    ropes = {f"{PREFIX}{name}": _renamed(rope) for name, rope in draft.ropes.items()}
    layers = [_layer(model, draft, layer) for layer in draft.layers]
    kept = d.kept if d.own_keys else (count,)
    return replace(
        model,
        layers=(*model.decoder_layers, *layers),
        ropes=model.ropes | ropes,
        draft=replace(d, kept=kept),
    )


def _renamed(rope: RopeConfig) -> RopeConfig:
    return replace(rope, factors=rope.factors and PREFIX + rope.factors)


def _layer(model: ModelConfig, draft: Draft, layer: LayerConfig) -> LayerConfig:
    """A layer of the draft, as a layer of the model."""
    a, layers = layer.attention, model.decoder_layers
    assert a
    if not draft.config.own_keys:
        # It attends to the keys that the last layer uses or, with a window, the last layer but one.
        index = len(layers) - (2 if a.window else 1)
        source = layers[index].attention if index >= 0 else None
        if source and source.kv_layer is not None:
            index, source = source.kv_layer, layers[source.kv_layer].attention
        a = replace(a, kv_layer=index, kv_heads=source.kv_heads if source else 0)
        if not source or (a.head_dim, a.window) != (source.head_dim, source.window) or a.heads % source.kv_heads:
            raise UserError(f"{draft.config.file}: this draft is for a model with other attention in its last layers")
        # The row of position p stands for the token at p + 1, and attends to the keys up to p: one key less.
        a = replace(a, window=a.window and a.window - 1)
    return replace(layer, mixer=replace(a, rope=a.rope and PREFIX + a.rope), predictor=PredictorConfig())
