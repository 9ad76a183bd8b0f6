"""Sparse attention by an indexer in a decoder's graph: which keys a row of latent attention sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import relax

from mlc_amd.compiler.models import packed
from mlc_amd.compiler.models.index_keys import chooses, operator
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.operators import LayerNorm

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph


def selected(g: Graph, h, latent, i: int) -> relax.Var | None:
    """The keys that each row of layer i sees, int32 [m, used]; None: all. h: the layer's rows; latent: of its
    queries."""
    a = g.config.layers[i].attention
    assert a, "a layer with attention"
    if not chooses(a, g.ctx):
        return None
    of, block = a.indexer, f"blk.{i}.indexer."
    assert of, "a layer with an indexer"
    if not of.own:
        return g.chosen
    rope, table = g.config.ropes[of.rope], g.parameters[f"{of.rope}.table"][0]
    q, k = g.linear(latent, block + "attn_q_b.weight"), g.linear(h, block + "attn_k.weight")
    norm = LayerNorm(k=of.dim, m=g.m, eps=of.eps, bias=True, rows="all", layout="")
    k = g.emit(norm, [g.columns(k, 0, of.dim), g.vector(block + "k_norm.weight"), g.vector(block + "k_norm.bias")])
    q, k = (packed.rotated(g, x, table, of.dim, rope, of.dim - rope.dim if of.last else 0) for x in (q, k))
    w = g.linear(h, block + "proj.weight", exact=True)
    cache = g.parameters[f"ik.{i}"][0]
    found = g.emit(operator(a, g.ctx, shape_of(q)[0]), [g.rows, g.pages(0), q, w, k, cache])
    g.chosen = g.bb.emit(relax.TupleGetItem(found, 0))
    return g.chosen
