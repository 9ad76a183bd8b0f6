"""The tensors of a decoder. In: its `ModelConfig`. Out: names and shapes of the tensors in the file, and of the parts
into which merged tensors are divided.

Shapes are (columns,), (rows, columns) or (experts, rows, columns), where rows are outputs. Names are those of llama.cpp
(src/llama-arch.cpp).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mlc_amd.compiler.models import recurrent_tensors
from mlc_amd.compiler.models.config import (
    BARE,
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    Norms,
)
from mlc_amd.compiler.models.drafts.config import PredictorConfig
from mlc_amd.compiler.models.encoders.config import EncoderConfig
from mlc_amd.compiler.models.recurrent_config import NGRAM_NORMS, NGRAMS, DeltaNetConfig
from mlc_amd.compiler.models.recurrent_tensors import BLOCK, Listed, Part, Shape
from mlc_amd.compiler.models.residuals.config import ATTENTION, FEED_FORWARD, GatedConfig, Streams


def tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of every tensor of the file, in order."""
    c = config
    yield "token_embd.weight", (c.vocab, c.hidden)
    for name, dim in {
        name: rope.dim for rope in c.ropes.values() for name in (rope.factors, rope.long_factors) if name
    }.items():
        yield name, (dim // 2,)
    if c.embedding_norm not in ("", BARE):
        yield from _norm(c, c.embedding_norm)
    for layer in c.layers:
        if isinstance(d := layer.mixer, DeltaNetConfig) and d.ngrams:
            yield NGRAMS, (d.ngrams.rows, d.ngrams.dim)
    if c.positions:
        yield "position_embd.weight", (c.positions, c.hidden)
    if c.encoder:
        yield from _present(_encoder(c, c.encoder))
    for i, layer in enumerate(c.layers):
        for name, shape in layer_tensors(c, layer):
            yield f"blk.{i}.{name}", shape
    if c.streams:
        yield from c.streams.tensors("output_hc", c.hidden)
    if c.output_norm:
        yield from _norm(c, c.output_norm)
    if not c.tied:
        yield "output.weight", (c.vocab, c.hidden)


def layer_tensors(config: ModelConfig, layer: LayerConfig) -> Iterator[tuple[str, Shape]]:
    """(name within the layer, shape) of every tensor of a layer."""
    yield from _norms(config, layer.mixer_norms, "before")
    for mixer in layer.mixers:
        yield from _present(_MIXERS[type(mixer)](config.hidden, mixer))
    yield from _norms(config, layer.mixer_norms, "after", "joined", "again")
    if config.streams:
        for block in (ATTENTION, FEED_FORWARD):
            yield from config.streams.tensors(f"hc_{block}", config.hidden)
    if layer.predictor:
        yield from _present(_predictor(config, layer.predictor))
    if layer.experts and layer.experts_norm:
        yield from _norm(config, layer.experts_norm)
        yield from expert_tensors(config.hidden, layer.experts)
    f = layer.feed_forward
    if f is None:
        return
    yield from _norms(config, layer.feed_forward_norms, "before")
    yield from _present(_experts(config.hidden, f) if isinstance(f, ExpertsConfig) else _feed_forward(config.hidden, f))
    yield from _norms(config, layer.feed_forward_norms, "after", "joined", "again")
    if layer.skip:
        yield "layer_output_scale.weight", (1,)


def optional(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of the tensors that a file may have for another tensor: the bias of a norm or a matrix, the scale
    of a matrix' product (for experts one for each), and the scale with which its input was rounded, which nothing
    reads."""
    if not name.endswith(".weight") or name.endswith(UNBIASED):
        return
    base = name.removesuffix("weight")
    if is_vector(name, shape):
        yield f"{base}bias", shape
        return
    stack = shape[:-2]
    if not stack:
        yield f"{base}bias", shape[:-1]
    yield f"{base}{SCALE}", stack or (1,)
    yield f"{base}{INPUT_SCALE}", stack or (1,)


def factor_names(block: str) -> tuple[str, str]:
    """The names of the factors on each expert's input and output (compiler/gguf/parts.py). block: the layer,
    "blk.0."."""
    return f"{block}ffn_exps.input_{SCALE}", f"{block}ffn_exps.output_{SCALE}"


def expert_tensors(hidden: int, experts: ExpertsConfig) -> Iterator[tuple[str, Shape]]:
    """(name within the layer, shape) of the tensors of a mixture of experts."""
    return _present(_experts(hidden, experts))


def _present(listed: Listed) -> Iterator[tuple[str, Shape]]:
    return ((name, shape) for present, name, shape in listed if present)


def _norm(config: ModelConfig, name: str, suffix: str = ".weight") -> Iterator[tuple[str, Shape]]:
    if config.norm_weights:
        yield name + suffix, (config.hidden,)


def _norms(config: ModelConfig, norms: Norms, *which: str) -> Iterator[tuple[str, Shape]]:
    for one in which:
        if name := getattr(norms, one):
            yield from _norm(config, name, "" if norms.bare == one else ".weight")


def _encoder(c: ModelConfig, e: EncoderConfig) -> Listed:
    yield e.types > 0, "token_types.weight", (e.types, c.hidden)
    yield e.norm, "token_embd_norm.weight", (c.hidden,)
    columns = c.hidden
    for layer in e.head:
        yield True, f"{layer.name}.weight", (layer.rows, columns)
        yield layer.norm, f"{layer.name}.norm.weight", (layer.rows,)
        columns = layer.rows


def _latent(hidden: int, a: AttentionConfig, of: LatentConfig) -> Listed:
    rotating = a.head_dim - of.rank
    queries = a.heads * (of.nope + rotating)
    yield of.query_rank > 0, "attn_q_a.weight", (of.query_rank, hidden)
    yield of.query_rank > 0, "attn_q_a_norm.weight", (of.query_rank,)
    yield of.query_rank > 0, "attn_q_b.weight", (queries, of.query_rank)
    yield not of.query_rank, "attn_q.weight", (queries, hidden)
    yield True, "attn_kv_a_mqa.weight", (of.rank + rotating, hidden)
    yield True, "attn_kv_a_norm.weight", (of.rank,)
    yield of.key_norm, "attn_k_norm.weight", (rotating,)
    yield bool(a.own_gate), "attn_gate.weight", (a.heads if a.head_gate else a.heads * of.value, hidden)
    yield not of.merged and of.nope > 0, "attn_k_b.weight", (a.heads, of.rank, of.nope)
    yield not of.merged, "attn_v_b.weight", (a.heads, of.value, of.rank)
    yield of.merged, "attn_kv_b.weight", (a.heads * (of.nope + of.value), of.rank)
    yield a.sinks, "attn_sinks.weight", (a.heads,)
    yield True, "attn_output.weight", (hidden, a.heads * of.value)
    if (i := a.indexer) and i.own:
        yield True, "indexer.k_norm.weight", (i.dim,)
        yield True, "indexer.k_norm.bias", (i.dim,)
        yield True, "indexer.proj.weight", (i.heads, hidden)
        yield True, "indexer.attn_k.weight", (i.dim, hidden)
        yield True, "indexer.attn_q_b.weight", (i.heads * i.dim, of.query_rank)


def _attention(hidden: int, a: AttentionConfig) -> Listed:
    if a.latent:
        yield from _latent(hidden, a, a.latent)
        return
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    values = a.kv_heads * a.values
    if a.merged_qkv:
        yield True, "attn_qkv.weight", (q + kv + values, hidden)
    else:
        own = a.kv_layer is None
        for which, rows, present in (("q", q, True), ("k", kv, own), ("v", values, own and not a.value_is_key)):
            both = which == "q" and a.output_gate
            yield present, f"attn_{which}.weight", (rows * (2 if both else 1), hidden)
    yield bool(a.own_gate), "attn_gate.weight", (a.heads if a.head_gate else q, hidden)
    for which, rows in (("q", q), ("k", kv)):
        norm = rows if a.row_norms else a.head_dim
        present = which == "q" or a.kv_layer is None
        yield present and (a.row_norms or (a.head_norms and a.norm_weights)), f"attn_{which}_norm.weight", (norm,)
        yield bool(a.each_norm), f"attn_{which}_norm.weight", (rows // a.head_dim, a.head_dim)
    yield a.head_factors, "attn_q_norm.weight", (a.heads, 1)
    if i := a.indexer:
        yield True, "indexer.q_proj.weight", (i.heads * i.dim, hidden)
        yield True, "indexer.k_proj.weight", (i.dim, hidden)
        yield True, "indexer.q_norm.weight", (i.dim,)
        yield True, "indexer.k_norm.weight", (i.dim,)
    yield a.sinks, "attn_sinks.weight", (a.heads,)
    yield True, "attn_output.weight", (hidden, a.heads * a.values)


_MIXERS: dict[type, Callable[[int, Any], Listed]] = {AttentionConfig: _attention, **recurrent_tensors.TENSORS}


def _feed_forward(hidden: int, f: FeedForwardConfig) -> Listed:
    yield f.gated and not f.merged, "ffn_gate.weight", (f.size, hidden)
    yield True, "ffn_up.weight", (f.size * (2 if f.merged else 1), hidden)
    yield True, "ffn_down.weight", (hidden, f.size)
    yield f.divided, "ffn.act.scales", (f.size,)


def _predictor(c: ModelConfig, p: PredictorConfig) -> Listed:
    yield True, "nextn.eh_proj.weight", (c.hidden, 2 * c.hidden)
    yield True, "nextn.enorm.weight", (c.hidden,)
    yield True, "nextn.hnorm.weight", (c.hidden,)
    yield p.embedding, "nextn.embed_tokens.weight", (c.vocab, c.hidden)
    yield p.head, "nextn.shared_head_head.weight", (c.vocab, c.hidden)
    yield p.norm, "nextn.shared_head_norm.weight", (c.hidden,)


def _experts(hidden: int, e: ExpertsConfig) -> Listed:
    yield True, "ffn_gate_inp.weight", (e.count, hidden)
    yield e.selection_bias, e.bias_name, (e.count,)
    yield e.table > 0, EXPERT_TABLE, (e.table, e.used)
    columns = e.latent or hidden
    yield e.latent > 0, f"ffn_{e.latent_name}_down.weight", (e.latent, hidden)
    yield e.latent > 0, f"ffn_{e.latent_name}_up.weight", (hidden, e.latent)
    yield e.latent_norm, f"ffn_{e.latent_name}_norm.weight", (e.latent,)
    yield e.merged, "ffn_gate_up_exps.weight", (e.count, 2 * e.size, columns)
    for name in ("gate", "up") if e.gated else ("up",):
        yield not e.merged, f"ffn_{name}_exps.weight", (e.count, e.size, columns)
        yield e.biases, f"ffn_{name}_exps.bias", (e.count, e.size)
    yield True, "ffn_down_exps.weight", (e.count, columns, e.size)
    yield e.biases, "ffn_down_exps.bias", (e.count, hidden)
    if of := e.adjugate:
        yield True, "ffn_gate_chexps.weight", (of.count, of.size, hidden)
        yield True, "ffn_up_chexps.weight", (of.count, of.size, hidden)
        yield True, "ffn_down_chexps.weight", (of.count, hidden, of.size)
    if s := e.shared:
        yield s.gated_output, "ffn_gate_inp_shexp.weight", (hidden,)
        yield s.gated and not s.merged, f"ffn_gate{s.suffix}.weight", (s.size, hidden)
        yield True, f"ffn_up{s.suffix}.weight", (s.size * (2 if s.merged else 1), hidden)
        yield True, f"ffn_down{s.suffix}.weight", (hidden, s.size)


EXPERT_TABLE = "ffn_gate_tid2eid.weight"  # see ExpertsConfig.table: numbers of experts, as float32
# Ends of the names of matrices that are not multiplied: taps of convolutions, vectors of Mamba-2
CONVOLUTIONS = ("conv.weight", "conv1d.weight", *(f"conv1d_{which}.weight" for which in "qkv"))
SCALE, INPUT_SCALE = "scale", "input_scale"  # ends of names, instead of "weight"
# Ends of the names of tensors with neither biases nor scales: tables, matrices of a single head, tensors of states
UNBIASED = (
    "embd.weight", "attn_k_b.weight", "attn_v_b.weight", "attn_kv_b.weight", "ssm_norm.weight", EXPERT_TABLE,
    "attn_output_a.weight", "ape.weight", *CONVOLUTIONS,
)  # fmt: skip
STATE_SPACE = ("ssm_a", "ssm_d", "ssm_norm.weight")
HEAD_NORMS = "attn_q_norm.weight", "attn_k_norm.weight"  # these may have a row for each head
STREAM_NORMS = (
    *(f"{name}_norm.weight" for name in ("hc", "hc_attn", "hc_ffn")),
    *(f"norm_{of}.weight" for of in NGRAM_NORMS),
)  # these have a row for each stream


def is_vector(name: str, shape: Shape) -> bool:
    """Whether the artifact has the tensor as float32, unchanged: norms, biases, convolutions."""
    return len(shape) == 1 or name.endswith((".bias", *CONVOLUTIONS, *STATE_SPACE, *HEAD_NORMS, *STREAM_NORMS))


def _stream_parts(hidden: int, s: Streams | None, name: str) -> Iterator[Part]:
    """The parts for residual streams, padded with zeros if the columns between two matrices are not a multiple of a
    block."""
    if isinstance(s, GatedConfig) and s.rank % BLOCK:
        filled, columns = -(-s.rank // BLOCK) * BLOCK, s.count * hidden
        down, up = f"{name}_down.weight", f"{name}_up.weight"
        yield Part(down, down, 0, (s.rank, columns), filled=(filled, columns))
        yield Part(up, up, 0, (columns, s.rank), filled=(columns, filled))


def merged_parts(config: ModelConfig) -> Iterator[Part]:
    """The parts into which merged tensors are divided."""
    yield from _stream_parts(config.hidden, config.streams, "output_hc")
    for i, layer in enumerate(config.layers):
        merging = (own for own in layer.mixers if type(own) in _MIXER_PARTS)
        mixer = (part for own in merging for part in _MIXER_PARTS[type(own)](config.hidden, own))
        blocks = *_block_parts(config.hidden, layer.feed_forward), *_block_parts(config.hidden, layer.experts)
        names = [f"hc_{block}" for block in (ATTENTION, FEED_FORWARD)]
        streams = (part for name in names for part in _stream_parts(config.hidden, config.streams, name))
        for part in (*mixer, *blocks, *streams):
            yield part._replace(name=f"blk.{i}.{part.name}", source=f"blk.{i}.{part.source}")


def _attention_parts(hidden: int, a: AttentionConfig) -> Iterator[Part]:
    if of := a.latent:
        rotating = a.head_dim - of.rank
        source, columns = ("attn_q_b.weight", of.query_rank) if of.query_rank else ("attn_q.weight", hidden)
        if of.nope:
            yield Part("attn_q_nope.weight", source, 0, (a.heads, of.nope, columns))
        yield Part("attn_q_rope.weight", source, of.nope, (a.heads, rotating, columns))
        if of.merged:
            if of.nope:
                yield Part("attn_k_b.weight", "attn_kv_b.weight", 0, (a.heads, of.rank, of.nope), transposed=True)
            yield Part("attn_v_b.weight", "attn_kv_b.weight", of.nope, (a.heads, of.value, of.rank))
    if a.output_gate:
        rows, source = a.heads * a.head_dim, "attn_q.weight"
        for name, first in (("attn_q_gate.weight", a.head_dim), (source, 0)):
            yield Part(name, source, 0, (rows, hidden), a.heads, ((first, a.head_dim),))
    if a.merged_qkv:
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        for which, first, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, a.kv_heads * a.values)):
            yield Part(f"attn_{which}.weight", "attn_qkv.weight", first, (rows, hidden))


_MIXER_PARTS: dict[type, Callable[[int, Any], Iterator[Part]]] = {
    AttentionConfig: _attention_parts, **recurrent_tensors.PARTS,
}  # fmt: skip


def _block_parts(hidden: int, f: FeedForwardConfig | ExpertsConfig | None) -> Iterator[Part]:
    if isinstance(f, ExpertsConfig):
        if f.table:
            yield Part(EXPERT_TABLE, EXPERT_TABLE, 0, (f.table, f.used), filled=(f.table, -(-f.used // BLOCK) * BLOCK))
        yield from _parts_of(f, (f.count,), f.latent or hidden, "ffn_{}_exps.weight", "ffn_gate_up_exps.weight")
        if f.adjugate:
            yield from _parts_of(
                replace(f, size=f.adjugate.size, merged=False), (f.adjugate.count,), hidden, "ffn_{}_chexps.weight"
            )
        if f.shared:
            name = f"ffn_{{}}{f.shared.suffix}.weight"
            yield from _parts_of(f.shared, (), hidden, name, name.format("up"))
            if f.shared.gated_output:
                name = "ffn_gate_inp_shexp.weight"
                yield Part(name, name, 0, (1, hidden))
    elif f:
        yield from _parts_of(f, (), hidden, "ffn_{}.weight", "ffn_up.weight")


def _parts_of(f, stack: Shape, columns: int, name: str, merged: str = "") -> Iterator[Part]:
    """The parts of the matrices of a block (stack: the leading dimensions of experts): the halves of a merged matrix;
    and all matrices padded with rows or columns of zeros to a multiple of the block that kernels need."""
    filled, halves = -(-f.size // BLOCK) * BLOCK, merged if getattr(f, "merged", False) else ""
    if filled == f.size and not halves:
        return
    for i, which in enumerate(("gate", "up") if f.gated else ("up",)):
        own = name.format(which)
        first = i * f.size if halves else 0
        yield Part(own, halves or own, first, (*stack, f.size, columns), filled=(*stack, filled, columns))
    if filled != f.size:
        own = name.format("down")
        yield Part(own, own, 0, (*stack, columns, f.size), filled=(*stack, columns, filled))
