"""Emits the functions of drafts that read rows of the model for which they guess (files.py reads these drafts).

eagle3, of a row with the token at position p, the model's rows x_a, x_b, x_c at p, and the next token t:

    g = fc [x_a | x_b | x_c], or of their norm; for a guess after that one y
    y = g + attention of [norm(embedding of t) | norm(g)]     attention among the rows of this layer, at position p
    y = y + feed-forward(norm(y)); logits of the token after t = output norm(y)

gemma4-assistant, with h = output_norm(x_p):

    y = layers of pre_projection [embedding of t | h], which attend to keys and values of the model up to p
    logits of the token after t = token_embd norm(y); for a guess after that one post_projection norm(y) takes the place
    of h, and p stays

dflash, of a row's x_a, x_b ..:

    keys and values of each layer = W_k g, W_v g; g = norm(fc [x_a | x_b ..])

and for the block, which begins with the first token that is not computed and continues with tokens `mask`:

    logits of each place = output norm(y), y = layers of the embedding; rows attend to earlier keys and to each other

llama.cpp computes them in the same way (src/models/eagle3.cpp, gemma4-assistant.cpp, dflash.cpp;
common/speculative.cpp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te, tirx

from mlc_amd.compiler.models import transformer
from mlc_amd.compiler.models.config import LayerConfig, Norms
from mlc_amd.compiler.models.drafts.config import DraftConfig
from mlc_amd.compiler.models.drafts.files import PLACES, PREFIX
from mlc_amd.compiler.models.residuals.config import FEED_FORWARD
from mlc_amd.compiler.ops import shape_of
from mlc_amd.runtime.artifact.io_names import DRAFTED
from mlc_amd.schedules.operators.layouts import padded

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

LOWEST = -1e30  # the logit of tokens that a draft does not know; finite


def draft(g: Graph):
    """One drafting function. Returns the logits of the rows that it answers; g.drafted becomes the rows that the next
    guess reads."""
    d = g.config.draft
    assert d
    return GUESSES[d.architecture](g, d)


def keys(g: Graph) -> list[relax.Var]:
    """The function after a step of the decoder, for drafts with blocks: writes keys and values for the step's rows.
    Returns the caches."""
    d = g.config.draft
    assert d
    x = g.rms_norm(_fused(g, d), f"{PREFIX}enc.output_norm.weight")
    return [cache for i, _ in _layers(g) for cache in g.write_keys(*_keys_of(g, x, i), i)]


def _keys_of(g: Graph, x, i: int):
    a, block = g.config.layers[i].attention, f"blk.{i}."
    assert a
    k = g.linear(x, block + "attn_k.weight")
    return k, k if a.value_is_key else g.linear(x, block + "attn_v.weight")


def _layers(g: Graph) -> list[tuple[int, LayerConfig]]:
    """(number, configuration) of the draft's layers."""
    return list(enumerate(g.config.layers))[len(g.config.decoder_layers) :]


def _fused(g: Graph, d: DraftConfig):
    """The rows of the model's layers, combined to one row each."""
    x = g.joined(*(g.kept(layer) for layer in d.kept))
    if d.early_norm:
        x = g.rms_norm(x, f"{PREFIX}enc.output_norm.weight")
    return g.linear(x, f"{PREFIX}fc.weight")


def _embedding(g: Graph, d: DraftConfig, scale: float = 1.0):
    return g.embed((PREFIX if d.embedding else "") + "token_embd.weight", scale)


def _logits(g: Graph, d: DraftConfig, x):
    """The logits of all tokens, by the draft's output matrix or, without one, the model's."""
    matrix = PREFIX + d.head if d.head else "token_embd.weight" if g.config.tied else "output.weight"
    y = g.linear(g.answers(x, f"{PREFIX}output_norm"), matrix)
    return _of_tokens(g, y) if d.vocab else y


def _of_tokens(g: Graph, logits):
    """Converts logits of the rows of the draft's output matrix to logits of all tokens."""
    tokens, m = g.config.vocab, shape_of(logits)[0]

    def spread(places, logits):
        def element(row, token):
            place = tirx.Cast("int32", places[te.min(token, tokens - 1)])
            known = tirx.all(token < tokens, place >= 0)
            return tirx.if_then_else(known, logits[row, te.max(place, 0)], tirx.const(LOWEST, "float32"))

        return te.compute((m, padded(tokens)), element, "spread")

    return g.bb.emit_te(spread, g.vector(PLACES), logits, primfunc_name_hint="spread_logits")


def _eagle3(g: Graph, d: DraftConfig):
    i, _ = _layers(g)[0]
    block = f"blk.{i}."
    h = g.gathered(DRAFTED, d.drafted) if g.spec.chained else _fused(g, d)
    e, normed = g.rms_norm(_embedding(g, d), block + "attn_norm.weight"), g.rms_norm(h, block + "attn_norm_2.weight")
    terms = transformer.attention(g, g.joined(e, normed), i)
    x = transformer.add_all(g, normed if d.normed_residual else h, terms)
    g.drafted = transformer.residual_block(g, x, i, FEED_FORWARD, Norms("ffn_norm"), transformer.feed_forward)
    return _logits(g, d, g.drafted)


def _assistant(g: Graph, d: DraftConfig):
    c = g.model.config
    if g.spec.chained:
        h = g.gathered(DRAFTED, d.drafted)
    else:
        h = g.rms_norm(g.kept(d.kept[0]), f"{c.output_norm}.weight", eps=c.norm_eps)
    both = g.joined(g.embed("token_embd.weight", c.embedding_scale), h)
    x = _through(g, g.linear(both, f"{PREFIX}nextn.pre_projection.weight"))
    g.drafted = g.linear(g.norm(x, f"{PREFIX}output_norm"), f"{PREFIX}nextn.post_projection.weight")
    return _logits(g, d, x)


def _block(g: Graph, d: DraftConfig):
    return _logits(g, d, _through(g, _embedding(g, d, d.embedding_scale)))


def _through(g: Graph, x):
    """x after all layers of the draft."""
    for i, layer in _layers(g):
        x = transformer.decoder_layer(g, x, i, layer)
        if layer.output_scale:
            x = g.multiply(x, g.number(f"blk.{i}.layer_output_scale.weight"))
    return x


GUESSES: dict[str, Any] = {"eagle3": _eagle3, "dflash": _block, "gemma4-assistant": _assistant}
