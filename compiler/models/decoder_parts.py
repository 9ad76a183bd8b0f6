"""What a few decoders have in their graph besides: absolute positions, limits of q, k and v, layer norms of heads,
gates on attention's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm import relax

from mlc_amd.compiler.models import exchanges
from mlc_amd.compiler.models.config import AttentionConfig
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.operators import Embed, RmsNorm

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op
GATES = {"sigmoid": OPS.sigmoid, "softplus": OPS.nn.softplus}  # of AttentionConfig.own_gate


def embedded(g: Graph, name: str, numbers) -> relax.Var:
    """Rows of a table. numbers: int32 [m]."""
    tensor = g.model.tensors[name]
    rows, k = tensor.shape
    return g.emit(Embed(fmt=tensor.format, vocab=rows, k=k, m=g.m), [numbers, g.weight(name)])


def embedding(g: Graph, x) -> relax.Var:
    """x, the rows of the embedding, normalized or plus the row of each one's position, as the model has it."""
    if g.config.embedding_norm:
        m, k = shape_of(x)
        x = g.emit(RmsNorm(k=k, m=m, eps=g.config.norm_eps, rows="all", layout=""), [x, g.ones(k)])
    if not g.config.positions:
        return x
    numbers = g.bb.emit(OPS.reshape(g.columns(g.rows, 0, 1), (g.m,)))
    return g.add(x, embedded(g, "position_embd.weight", numbers))


def scaled_term(g: Graph, x, factor: float) -> relax.Var:
    """x * factor, which is a term of a sum over GPUs where x is one."""
    return exchanges.terms_of(g, g.bb.emit(OPS.multiply(x, relax.const(factor, "float32"))), x)


def clamped(g: Graph, x, limit: float) -> relax.Var:
    return g.bb.emit(OPS.clip(x, -limit, limit))


def each_norm(g: Graph, x, name: str, a: AttentionConfig) -> relax.Var:
    """Layer norm of each head, which has weights of its own."""
    m, columns = shape_of(x)
    parts = g.bb.emit(OPS.reshape(x, (m, columns // a.head_dim, a.head_dim)))
    center = g.bb.emit(OPS.subtract(parts, g.bb.emit(OPS.mean(parts, -1, keepdims=True))))
    normed = g.bb.emit(OPS.nn.rms_norm(center, g.ones(a.head_dim), -1, g.config.norm_eps))
    return g.multiply(g.bb.emit(OPS.reshape(normed, (m, columns))), g.vector(name + ".weight", exact=True))


def gated(g: Graph, y, gate, a: AttentionConfig) -> relax.Var:
    """Attention's output y times a function of gate, of the columns of each head or of its one column."""
    m, columns = shape_of(y)
    if a.own_gate == "sigmoid" and not a.head_gate:
        return g.gate(y, gate, a.head_dim)
    own = a.heads if a.head_gate else columns
    factor = g.bb.emit(GATES[a.own_gate](g.columns(gate, 0, own)))
    parts = g.bb.emit(OPS.reshape(y, (m, a.heads, columns // a.heads)))
    factors = g.bb.emit(OPS.reshape(factor, (m, a.heads, own // a.heads)))
    return g.bb.emit(OPS.reshape(g.bb.emit(OPS.multiply(parts, factors)), (m, columns)))
