"""The graph of decoders. A layer has a mixer (attention, or a mixer that keeps a state) and a feed-forward block, which
is dense or a mixture of experts:

    x = embedding, or an image's row of features
    x = x + norm(mixer(h))                                           h = norm(x)     each norm where the layer has one
    x = x + norm(W_down (act(W_gate h) * W_up h))                    h = norm(x)
    logits = W_out norm(x)

    attention = W_o attention(rope(W_q h), rope(W_k h), W_v h); recurrent.py has the other mixers

All functions take the variants of an architecture from its `ModelConfig`. They emit operators through a `Graph`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tvm import relax

from mlc_amd.compiler.models import decoder_parts, exchanges, images, indexers, packed, recurrent
from mlc_amd.compiler.models import mixture as mixture_graph
from mlc_amd.compiler.models.compressed import attention as compressed
from mlc_amd.compiler.models.compressed.config import CompressedConfig
from mlc_amd.compiler.models.config import AttentionConfig, ExpertsConfig, LatentConfig, LayerConfig, Norms
from mlc_amd.compiler.models.residuals import ngrams, streams
from mlc_amd.compiler.models.residuals.config import ATTENTION, FEED_FORWARD
from mlc_amd.runtime.artifact.io_names import DRAFTED
from mlc_amd.schedules.operators.layouts import padded

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op


def decoder(g: Graph):
    """Emits the whole model. Returns the logits of the rows whose logits the function computes."""
    g.input = decoder_parts.embedding(g, images.inputs(g))
    return logits(g, layers(g, streams.opened(g, g.input)))


def layers(g: Graph, x):
    """Emits all layers except those that guess tokens."""
    for i, layer in enumerate(g.config.decoder_layers):
        g.hidden[i] = x
        x = ngrams.added(g, x, i)
        x = images.deepstack(g, decoder_layer(g, x, i, layer), i)
    return x


def decoder_layer(g: Graph, x, i: int, layer: LayerConfig):
    """x after layer i."""
    if layer.parallel:
        h = g.norm(x, f"blk.{i}.{layer.mixer_norms.before}")
        own = layer.feed_forward_norms.before
        return add_all(g, x, [*mixer(g, h, i), *feed_forward(g, g.norm(x, f"blk.{i}.{own}") if own else h, i)])
    f, given, beside = layer.feed_forward, x, layer.experts if layer.experts_norm else None
    early = router_of(g, x, i) if isinstance(f, ExpertsConfig) and f.early else None
    if layer.mixers:
        x = residual_block(g, x, i, ATTENTION, layer.mixer_norms, mixer)
    if f:
        x = residual_block(g, x, i, FEED_FORWARD, layer.feed_forward_norms, partial(feed_forward, router=early))
    if beside:
        x = add_all(g, x, mixture(g, g.norm(given, f"blk.{i}.{layer.experts_norm}"), i, beside))
    if layer.skip:
        x = g.add(x, g.multiply(g.input, g.number(f"blk.{i}.layer_output_scale.weight")))
    return x


def router_of(g: Graph, h, i: int):
    """The router's logits."""
    return g.linear(h, f"blk.{i}.ffn_gate_inp.weight", exact=True)


def residual_block(g: Graph, x, i: int, which: str, norms: Norms, block):
    """Emits x + after(block(before(x))) for a block of layer i, and the norms of the sum. norms: the names of weights.
    block(h): emits the block, and returns terms, whose sum is its result. which: the name of the block in its layer.
    With residual streams, `norms` has only `before`."""
    if g.config.streams:

        def result(h):
            return streams.result(g, block(g, g.norm(h, f"blk.{i}.{norms.before}") if norms.before else h, i))

        return streams.around(g, x, i, which, result)
    h = g.norm(x, f"blk.{i}.{norms.before}") if norms.before else x
    terms = block(g, h, i)
    if norms.factor != 1.0:
        terms = [decoder_parts.scaled_term(g, term, norms.factor) for term in terms]
    x = g.scaled(h, norms.residual) if norms.residual else x
    if norms.after:
        terms = [g.norm(add_all(g, terms[0], terms[1:]), f"blk.{i}.{norms.after}", eps=norms.after_eps)]
    y = add_all(g, x, terms)
    if norms.joined:
        y = g.norm(y, f"blk.{i}.{norms.joined}")
    return g.norm(g.add(y, x), f"blk.{i}.{norms.again}") if norms.again else y


def add_all(g: Graph, x, terms: list):
    """x plus all terms, added one after the other, so that each addition can be fused with the product that computes
    the term. Terms of a sum over GPUs are added to one another first, as each such sum needs an exchange."""
    partial = [term for term in terms if term in g.terms]
    if x not in g.terms and len(partial) > 1:
        terms = [term for term in terms if term not in g.terms] + [add_all(g, partial[0], partial[1:])]
    for term in terms:
        x = g.add(x, term)
    return x


def mixer(g: Graph, h, i: int) -> list:
    """The terms of all mixers of layer i. h: the normed rows."""
    return [term for own in g.config.layers[i].mixers for term in MIXERS[type(own)](g, h, i)]


def attention(g: Graph, h, i: int) -> list:
    """The term of attention of layer i. h: the normed rows."""
    a, block = g.config.layers[i].attention, f"blk.{i}."
    assert a, "a layer with attention"
    if a.latent:
        return latent_attention(g, h, i, a.latent)
    if a.kv_layer is not None:
        q = g.linear(h, block + "attn_q.weight")
        return [g.linear(g.attention(q, None, None, i), block + "attn_output.weight")]
    q, k = (g.linear(h, f"{block}attn_{which}.weight") for which in "qk")
    v = k if a.value_is_key else g.linear(h, f"{block}attn_v.weight")
    if a.clamp:
        q, k, v = (decoder_parts.clamped(g, x, a.clamp) for x in (q, k, v))
    if a.row_norms:
        q, k = (g.norm(x, f"{block}attn_{which}_norm") for x, which in ((q, "q"), (k, "k")))
    if a.each_norm:
        q, k = (decoder_parts.each_norm(g, x, f"{block}attn_{which}_norm", a) for x, which in ((q, "q"), (k, "k")))
    if a.head_factors:
        q, k = (decoder_parts.bare_norm(g, x, a, name) for x, name in ((q, f"{block}attn_q_norm.weight"), (k, "")))
    if g.config.encoder:
        y = g.attention(q, k, v, i)
    else:
        y = decoder_parts.attended(g, q, k, v, i, indexers.selected_blocks(g, h, i))
    if a.output_gate:
        y = g.gate(y, g.linear(h, block + "attn_q_gate.weight"), a.head_dim)
    if a.own_gate:
        y = decoder_parts.gated(g, y, g.linear(h, block + "attn_gate.weight"), a)
    return [g.linear(y, block + "attn_output.weight")]


def latent_attention(g: Graph, h, i: int, latent: LatentConfig) -> list:
    """Latent attention: keys and values are one compressed vector for each token. `LatentConfig` has the formula."""
    block, x, a = f"blk.{i}.", h, g.config.layers[i].attention
    assert a, "a layer with attention"
    if latent.query_rank:
        x = g.rms_norm(g.linear(h, block + "attn_q_a.weight"), block + "attn_q_a_norm.weight")
    rotating, key = g.linear(x, f"{block}attn_q_rope.weight"), g.linear(h, block + "attn_kv_a_mqa.weight")
    if latent.nope:
        q = g.head_linear(g.linear(x, f"{block}attn_q_nope.weight"), block + "attn_k_b.weight")
    else:
        q = g.bb.emit(OPS.zeros((g.m, latent.rank * a.heads), "float32"))
    if latent.key_norm:
        key = decoder_parts.normed_end(g, key, latent.rank, block + "attn_k_norm.weight")
    y = g.latent_attention(q, rotating, key, i, indexers.selected(g, h, x, i))
    y = g.head_linear(y, block + "attn_v_b.weight")
    if a.own_gate:
        y = decoder_parts.gated(g, y, g.linear(h, block + "attn_gate.weight"), a)
    return [g.linear(y, block + "attn_output.weight")]


MIXERS = {AttentionConfig: attention, CompressedConfig: compressed.attention, **recurrent.MIXERS}


def feed_forward(g: Graph, h, i: int, router=None) -> list:
    """The terms of the feed-forward block of layer i. h: the normed rows. router: see `mixture`."""
    f = g.config.layers[i].feed_forward
    assert f, "a layer with a feed-forward block"
    return (
        mixture(g, h, i, f, router)
        if isinstance(f, ExpertsConfig)
        else [dense(g, h, f"blk.{i}.ffn_{{}}", f.act, f.gated, f"blk.{i}.ffn.act.scales" if f.divided else "")]
    )


def dense(g: Graph, h, name: str, act: str, gated: bool = True, divisor: str = ""):
    """A dense feed-forward block. name: of its matrices, with {} in the place of gate, up and down. divisor: name of a
    tensor by which the columns before down are divided."""
    up = g.linear(h, name.format("up") + ".weight", scaled_bias=True)
    if gated:
        gate = g.linear(h, name.format("gate") + ".weight", scaled_bias=True)
        y = g.multiply(*decoder_parts.activated(g, gate, up, act))
    else:
        y = packed.activate(g, up, act) if g.config.encoder else g.activation(up, act)
    if divisor:
        y = g.bb.emit(OPS.divide(y, g.vector(divisor, exact=True)))
    return g.linear(y, name.format("down") + ".weight", scaled_bias=True)


def mixture(g: Graph, h, i: int, e: ExpertsConfig, router=None) -> list:
    """The terms of the chosen experts of each row, and of the shared expert. router: the router's logits, by default
    computed from h."""
    block = f"blk.{i}."
    terms = []
    if e.shared:
        y = dense(g, h, f"{block}ffn_{{}}{e.shared.suffix}", e.shared.act, e.shared.gated)
        if e.shared.gated_output:
            y = g.times_sigmoid(y, g.linear(h, block + "ffn_gate_inp_shexp.weight", exact=True))
        if e.shared.factor != 1.0:
            y = decoder_parts.scaled_term(g, y, e.shared.factor)
        terms.append(y)
    if router is None:
        router = router_of(g, h, i)
    ids, weights = mixture_graph.route(g, router, e, block)
    if e.adjugate:
        y = exchanges.whole(g, mixture_graph.mixed(g, h, ids, weights, e, block))
        return [*terms, y, *mixture_graph.adjugate(g, y, router, ids, e, block)]
    if e.latent:
        name = f"{block}ffn_{e.latent_name}_"
        y = mixture_graph.mixed(g, g.linear(h, f"{name}down.weight"), ids, weights, e, block)
        y = g.rms_norm(y, f"{name}norm.weight") if e.latent_norm else y
        return [*terms, g.linear(y, f"{name}up.weight")]
    return [*terms, mixture_graph.mixed(g, h, ids, weights, e, block)]


def logits(g: Graph, x):
    """The logits of the decoder. If the file has no output.weight (tied), the embedding is the output matrix."""
    c = g.config
    return head(g, x, c.output_norm, "token_embd.weight" if c.tied else "output.weight")


def head(g: Graph, x, norm: str, matrix: str):
    """The logits by this norm and this matrix."""
    c = g.config
    g.hidden[len(c.decoder_layers)] = x
    y = exchanges.gathered(g, g.linear(streams.answers(g, x, norm), matrix), matrix, padded(c.vocab))
    y = g.scaled(y, c.logit_scale) if c.logit_scale != 1.0 else y
    return g.softcap(y, c.logit_softcap) if c.logit_softcap else y


def predictor(g: Graph):
    """Multi-token prediction (MTP): an additional layer of a model, which guesses the token after the next one.

    For the row at position p, with the decoder's output x_p and the next token t:

        h' = eh_proj [norm(embedding of t) | norm(h)]      norms enorm and hnorm; h = output_norm(x_p)
        y = shared_head_norm(layer(h'))                    attention among the rows of this layer, at position p
        logits of the token after t = shared_head_head y

    The embedding, the last norm and the last matrix are the decoder's if the layer has none of its own. For the next
    guess, y takes the place of h, and the guessed token that of t.

    Source: llama.cpp (graph_mtp in src/models/qwen35.cpp, glm4-moe.cpp, deepseek2.cpp), where h is also the decoder's
    output after its last norm, and y the output of a guess after its norm. There, the row of t has the position of t
    instead of p; the result is the same, because RoPE depends only on distances.

    Returns the logits of the rows whose logits the function computes. Sets g.drafted to y of all rows.
    """
    c, i = g.config, g.config.predictor
    assert i is not None, "a model with a layer that predicts"
    layer, own = c.layers[i], f"blk.{i}.nextn."
    has = layer.predictor
    assert has
    output = "token_embd.weight" if c.tied else "output.weight"
    images.place(g)
    h = g.gathered(DRAFTED, c.hidden) if g.spec.chained else g.norm(g.kept(i), c.output_norm)
    e = g.embed(own + "embed_tokens.weight" if has.embedding else "token_embd.weight", c.embedding_scale)
    both = g.joined(g.rms_norm(e, own + "enorm.weight"), g.rms_norm(h, own + "hnorm.weight"))
    x = g.linear(both, own + "eh_proj.weight")
    x = decoder_layer(g, x, i, layer)
    norm = own + "shared_head_norm" if has.norm else c.output_norm
    g.drafted = g.norm(x, norm)
    return head(g, x, norm, own + "shared_head_head.weight" if has.head else output)
