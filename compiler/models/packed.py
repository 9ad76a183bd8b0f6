"""Parts of encoders' graphs that replace those of decoders: attention without a cache, and activations, for the rows of
many texts in one step."""

from collections.abc import Sequence
from typing import Any, Protocol

from tvm import relax, te

from mlc_amd.compiler.models.config import AttentionConfig, ModelConfig, RopeConfig
from mlc_amd.compiler.ops import shape_of, tensor_type
from mlc_amd.schedules.operators import Activate, Operator, PackedAttention

OPS: Any = relax.op  # Any: TVM declares that arguments must be expressions, but accepts numbers too


class Graph(Protocol):
    """The part of compiler/models/graph.py's Graph that this module uses."""

    bb: Any
    config: ModelConfig
    m: int
    rows: relax.Var
    parameters: dict[str, tuple]

    def columns(self, x, first: int, count: int) -> relax.Var: ...

    def emit(self, op: Operator, args: Sequence) -> relax.Var: ...

    def head_norm(self, block: str, which: str, a: AttentionConfig) -> relax.Var: ...

    def parameter(self, name: str, kind: str, ty) -> relax.Var: ...


def activate(g: Graph, x, act: str) -> relax.Var:
    """act(x)."""
    m, k = shape_of(x)
    return g.emit(Activate(act=act, k=k, m=m, layout=""), [x])


def attention(g: Graph, q, k, v, layer: int) -> relax.Var:
    """Head norms, RoPE and attention within each text, as the layer's AttentionConfig describes."""
    a, e = g.config.layers[layer].attention, g.config.encoder
    assert a and e, "a layer of an encoder with attention"
    causal, block = e.causal, f"blk.{layer}."
    if a.head_norms:
        q, k = (
            _head_norms(g, x, n, g.head_norm(block, w, a), a) for x, n, w in ((q, a.heads, "q"), (k, a.kv_heads, "k"))
        )
    if rope := g.config.ropes.get(a.rope):
        table = g.parameters[f"{a.rope}.table"][0]
        q, k = (rotated(g, x, table, a.head_dim, rope) for x in (q, k))
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


def rotated(g: Graph, x, table, d: int, rope: RopeConfig, start: int = 0) -> relax.Var:
    """x with `rope.dim` columns of each head, from column `start` of the head on, rotated by the angles of the row's
    position. table: float32 [positions, rope.dim]. d: columns of a head."""
    half, last = rope.dim // 2, shape_of(x)[1] - 1

    def rotate(rows, x, table):
        def element(row, column: Any):
            position: Any = te.max(te.min(rows[row, 0], table.shape[0] - 1), 0)
            place: Any = column % d - start
            first = place < half if rope.neox else place % 2 == 0
            step = half if rope.neox else 1
            other = te.if_then_else(first, -x[row, te.min(column + step, last)], x[row, te.max(column - step, 0)])
            pair: Any = te.max(te.min(place % half if rope.neox else place // 2, half - 1), 0)
            turned = x[row, column] * table[position, 2 * pair] + other * table[position, 2 * pair + 1]
            return te.if_then_else(te.all(place >= 0, place < rope.dim), turned, x[row, column])

        return te.compute(x.shape, element, "rotated")

    return g.bb.emit_te(rotate, g.rows, x, table, primfunc_name_hint="rotate_rows")
