"""Emits the embeddings of a row's last tokens; `NgramConfig` has the formula.

The tokens before a row come from a convolution that shifts: column j of its result is 1 + the token j positions before,
or 0 if there is none.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tvm import relax, te, tirx

from mlc_amd.compiler.models.decoder_parts import embedded
from mlc_amd.compiler.models.recurrent_config import BITS, LAGS, LIMBS, NGRAMS, DeltaNetConfig, NgramConfig
from mlc_amd.compiler.models.residuals.streams import normed_streams
from mlc_amd.schedules.operators import CausalConv

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op
LEAST = 1e-6  # lower limit of |s| before the square root


def added(g: Graph, x, i: int) -> relax.Var:
    """The streams x plus the n-gram embeddings that layer i adds before its blocks."""
    d = g.config.layers[i].mixer
    if not isinstance(d, DeltaNetConfig) or not (n := d.ngrams):
        return x
    block, hidden = f"blk.{i}.ple_", g.config.hidden
    parts = [embedded(g, NGRAMS, numbers) for numbers in _numbers(g, n, i)]
    e = g.joined(*(g.columns(part, 0, n.dim) for part in parts))
    key, value = (g.linear(e, f"{block}{name}.weight") for name in ("key", "value"))
    key = normed_streams(g, g.columns(key, 0, n.streams * hidden), f"{block}norm_key.weight", n.streams)
    query = normed_streams(g, x, f"{block}norm_query.weight", n.streams)
    streams = ([g.columns(x, s * hidden, hidden) for x in (key, query)] for s in range(n.streams))
    products = [g.bb.emit(OPS.sum(g.multiply(*both), -1, keepdims=True)) for both in streams]
    gates = g.bb.emit_te(_gates, g.scaled(g.joined(*products), hidden**-0.5), primfunc_name_hint="gates")

    def spread(value, gates):
        return te.compute(
            (g.m, n.streams * hidden), lambda r, c: value[r, c % hidden] * gates[r, c // hidden], "spread"
        )

    v = g.bb.emit_te(spread, value, gates, primfunc_name_hint="spread_values")
    y = _convolved(g, normed_streams(g, v, f"{block}norm_conv.weight", n.streams), i, "taps", n.reach, "silu")
    return g.add(x, g.add(v, y))


def _convolved(g: Graph, x, i: int, which: str, taps: int, act: str = "") -> relax.Var:
    columns, state = int(x.ty.shape[1]), {"taps": "ngram_conv", "lags": "ngram"}[which]
    op = CausalConv(channels=columns, taps=taps, single=g.spec.single, m=g.m, gated=False, act=act, bias=False)
    return g.run(op, [x, g.vector(f"blk.{i}.ple_{which}")], i, state)


def _numbers(g: Graph, n: NgramConfig, i: int) -> list[relax.Var]:
    """For each head, the row of the table, int32 [m]."""

    def columns(tokens):
        def element(r, c):
            token = te.if_then_else(tokens[r] < 0, n.image, tokens[r])
            return (token + 1).astype("float32")

        return te.compute((g.m, LAGS), element, "numbered")

    def token(before, j: int):
        def element(r):
            there: Any = before[r, j].astype("int32")
            if not j:
                return te.max(there - 1, 0)
            lags = [before[r, lag].astype("int32") for lag in range(1, j + 1)]
            cut = tirx.any(*(tirx.any(one == 0, one == n.end + 1) for one in lags))
            return te.if_then_else(cut, n.end, there - 1)

        return te.compute((g.m,), element, "token")

    def number(*products, head: int):
        def element(r):
            total = tirx.const(n.offsets[head], "int32")
            size, found = n.sizes[head], tirx.const(0, "int32")
            for limb in range(LIMBS):
                mixed = tirx.const(0, "int32")
                for j, product in enumerate(products):
                    mixed = mixed ^ product[r, j * LIMBS + limb].astype("int32")
                found = found + tirx.truncmod(mixed * ((1 << limb * BITS) % size), size)
            return total + tirx.truncmod(found, size)

        return te.compute((g.m,), element, "number")

    x = g.bb.emit_te(columns, g.tokens, primfunc_name_hint="token_columns")
    before = _convolved(g, x, i, "lags", n.size)
    tokens = [g.bb.emit_te(token, before, j, primfunc_name_hint="lagged_tokens") for j in range(n.size)]
    products = [embedded(g, f"blk.{i}.ple_products.weight", one) for one in tokens]
    found = []
    for head in range(len(n.sizes)):
        own = partial(number, head=head)
        found.append(g.bb.emit_te(own, *products[: head // n.heads + 2], primfunc_name_hint="ngram_numbers"))
    return found


def _gates(s):
    def element(*at):
        root = te.sqrt(te.max(te.abs(s[at]), tirx.const(LEAST, "float32")))
        return te.sigmoid(te.if_then_else(s[at] > 0, root, te.if_then_else(s[at] < 0, -root, 0.0)))

    return te.compute(s.shape, element, "gates")
