"""The graph of encoders: rows of many texts in one step, without a cache.

    x = embedding of the token, its position and its type, normalized        each where the model has it
    x = the layers of transformer.py, whose attention is among the rows of a text
    y = for each answer the mean of some rows of norm(x)                     `pooled` int32 [m, 2]: first row, end
    y = W_i y ..., the layers of the head

`segments` int32 [m, 2] has the first row and the end of each row's text, `rows` its position in that, `answers` the
number of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax, te

from mlc_amd.compiler.models import transformer
from mlc_amd.compiler.ops import shape_of, tensor_type
from mlc_amd.schedules.operators import Embed, PackedAttention, Pool

if TYPE_CHECKING:
    from mlc_amd.compiler.models.config import AttentionConfig, RopeConfig
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op


def encoder(g: Graph):
    """The vector of each answer, float32 [m, columns]."""
    c, e = g.config, g.config.encoder
    assert e, "an encoder"
    x = g.embed("token_embd.weight", c.embedding_scale)
    if e.types:
        x = g.add(x, _row(g, "token_types.weight"))
    if e.positions:
        x = g.add(x, _embedded(g, "position_embd.weight", g.bb.emit(OPS.reshape(g.columns(g.rows, 0, 1), (g.m,)))))
    x = transformer.layers(g, g.norm(x, "token_embd_norm") if e.norm else x)
    x = g.norm(x, c.output_norm) if c.output_norm else x
    g.state = g.parameter("answers", "io", tensor_type((4,), "int32"))
    y = g.emit(Pool(k=c.hidden, m=g.m), [g.parameter("pooled", "io", tensor_type((g.m, 2), "int32")), x])
    for layer in e.head:
        y = g.linear(g.columns(y, 0, g.model.tensors[f"{layer.name}.weight"].shape[-1]), f"{layer.name}.weight")
        y = g.activation(y, layer.act) if layer.act else y
        y = g.norm(g.columns(y, 0, layer.rows), f"{layer.name}.norm") if layer.norm else y
    return y


def _embedded(g: Graph, name: str, numbers) -> relax.Var:
    """Rows of a table."""
    tensor = g.model.tensors[name]
    rows, k = tensor.shape
    return g.emit(Embed(fmt=tensor.format, vocab=rows, k=k, m=g.m), [numbers, g.weight(name)])


def _row(g: Graph, name: str) -> relax.Var:
    """The first row of a table, for all rows."""
    return _embedded(g, name, g.bb.emit(OPS.zeros((g.m,), "int32")))


def attention(g: Graph, q, k, v, layer: int) -> relax.Var:
    """Head norms, RoPE and attention among the rows of each text, as the layer's AttentionConfig describes them."""
    a, e = g.config.layers[layer].attention, g.config.encoder
    assert a and e, "a layer of an encoder with attention"
    causal, block = e.causal, f"blk.{layer}."
    if a.head_norms:
        q, k = (
            _head_norms(g, x, n, g.head_norm(block, w, a), a) for x, n, w in ((q, a.heads, "q"), (k, a.kv_heads, "k"))
        )
    if rope := g.config.ropes.get(a.rope):
        table = g.parameters[f"{a.rope}.table"][0]
        q, k = (_rotated(g, x, table, a.head_dim, rope) for x in (q, k))
    op = PackedAttention(
        heads=a.heads, kv_heads=a.kv_heads, d=a.head_dim, m=g.m, scale=a.scale, causal=causal, alibi=a.alibi,
        window=(a.window - 1 if causal else a.window // 2) if a.window else 0,
    )  # fmt: skip
    segments = g.parameter("segments", "io", tensor_type((g.m, 2), "int32"))
    return g.emit(op, [segments, q, k, v])


def _head_norms(g: Graph, x, heads: int, weight, a: AttentionConfig) -> relax.Var:
    parts = g.bb.emit(OPS.reshape(g.columns(x, 0, heads * a.head_dim), (g.m, heads, a.head_dim)))
    normed = g.bb.emit(OPS.nn.rms_norm(parts, weight, -1, g.config.norm_eps))
    return g.bb.emit(OPS.reshape(normed, (g.m, heads * a.head_dim)))


def _rotated(g: Graph, x, table, d: int, rope: RopeConfig) -> relax.Var:
    """The first columns of each head rotated by the angles of the row's position."""
    half, last = rope.dim // 2, shape_of(x)[1] - 1

    def rotate(rows, x, table):
        def element(row, column):
            position = te.max(te.min(rows[row, 0], table.shape[0] - 1), 0)
            place = column % d
            first = place < half if rope.neox else place % 2 == 0
            pair = place % half if rope.neox else place // 2
            step = half if rope.neox else 1
            other = te.if_then_else(first, -x[row, te.min(column + step, last)], x[row, te.max(column - step, 0)])
            pair = te.min(pair, half - 1)
            turned = x[row, column] * table[position, 2 * pair] + other * table[position, 2 * pair + 1]
            return te.if_then_else(place < rope.dim, turned, x[row, column])

        return te.compute(x.shape, element, "rotated")

    return g.bb.emit_te(rotate, g.rows, x, table, primfunc_name_hint="rotate_rows")
