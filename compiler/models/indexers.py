"""Sparse attention in a decoder's graph: an indexer chooses the keys that a row attends to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax

from mlc_amd.compiler.models import packed
from mlc_amd.compiler.models.index_keys import chooses, operator
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.operators import CausalConv, LayerNorm

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op


def selected(g: Graph, h, latent, i: int) -> relax.Var | None:
    """The positions of the keys that each row of layer i attends to, int32 [m, used]; None for all keys. For latent
    attention. h: the rows of the layer; latent: the latent of the queries."""
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


def selected_blocks(g: Graph, h, i: int) -> relax.Var | None:
    """The blocks of keys that each row of layer i attends to, int32 [m, sets * blocks]; None for all keys. For
    attention that is not latent. h: the rows of the layer."""
    a = g.config.layers[i].attention
    if not chooses(a, g.ctx):
        return None
    assert a and a.indexer, "a layer with an indexer"
    of, block, eps = a.indexer, f"blk.{i}.indexer.", g.config.norm_eps
    q, k = (g.linear(h, f"{block}{which}_proj.weight") for which in "qk")
    if not of.by_head:
        conv = CausalConv(
            channels=of.dim, taps=of.block, single=g.spec.single, m=g.m, gated=False, act="", bias=False
        )  # fmt: skip
        k = g.run(conv, [k, g.vector(block + "mean")], i, "mean")
    q = g.columns(q, 0, of.heads * of.dim)
    parts = g.bb.emit(OPS.reshape(q, (g.m, of.heads, of.dim)))
    normed = g.bb.emit(OPS.nn.rms_norm(parts, g.vector(block + "q_norm.weight", exact=True), -1, eps))
    q = g.bb.emit(OPS.reshape(normed, (g.m, of.heads * of.dim)))
    k = g.rms_norm(g.columns(k, 0, of.dim), block + "k_norm.weight")
    tables = a.rope, a.rope if of.by_head else of.rope
    q, k = (
        packed.rotated(g, x, g.parameters[f"{rope}.table"][0], of.dim, g.config.ropes[rope])
        for x, rope in zip((q, k), tables, strict=True)
    )
    found = g.emit(operator(a, g.ctx, g.m), [g.rows, g.pages(0), q, k, g.parameters[f"ik.{i}"][0]])
    return g.bb.emit(relax.TupleGetItem(found, 0))
