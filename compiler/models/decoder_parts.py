"""Parts of graphs that only a few decoders have: absolute positions, limits of q, k and v, norms of heads, ALiBi, gates
on attention's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import relax, te

from mlc_amd.compiler.models import exchanges
from mlc_amd.compiler.models.compressed.config import CompressedConfig
from mlc_amd.compiler.models.config import BARE, AttentionConfig
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.operators import Embed
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.experts import CUT, SITU, numbers_of
from mlc_amd.schedules.operators.layouts import padded

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op
OAI_LIMIT, OAI_SLOPE = 7.0, 1.702  # constants of "swiglu_oai"
GATES = {"sigmoid": OPS.sigmoid, "softplus": OPS.nn.softplus}  # {AttentionConfig.own_gate: function}


def embedded(g: Graph, name: str, numbers) -> relax.Var:
    """Rows of the table `name`. numbers: of the rows, int32 [m]."""
    tensor = g.model.tensors[name]
    rows, k = tensor.shape
    return g.emit(Embed(fmt=tensor.format, vocab=rows, k=k, m=g.m), [numbers, g.weight(name)])


def embedding(g: Graph, x) -> relax.Var:
    """The rows of the embedding, x, with the model's variants: a norm, or the addition of rows for positions."""
    if name := g.config.embedding_norm:
        x = g.rms_norm(x, "") if name == BARE else g.norm(x, name)
    if not g.config.positions:
        return x
    numbers = g.bb.emit(OPS.reshape(g.columns(g.rows, 0, 1), (g.m,)))
    return g.add(x, embedded(g, "position_embd.weight", numbers))


def scaled_term(g: Graph, x, factor: float) -> relax.Var:
    """x * factor. If x is a term of a sum over GPUs, so is the result."""
    return exchanges.terms_of(g, g.bb.emit(OPS.multiply(x, relax.const(factor, "float32"))), x)


def clamped(g: Graph, x, limit: float) -> relax.Var:
    """x clamped to [-limit, limit]."""
    return g.bb.emit(OPS.clip(x, -limit, limit))


def each_norm(g: Graph, x, name: str, a: AttentionConfig) -> relax.Var:
    """The norm of each head, with weights for each head."""
    if a.each_norm == "layer":
        m, columns = shape_of(x)
        parts = g.bb.emit(OPS.reshape(x, (m, columns // a.head_dim, a.head_dim)))
        center = g.bb.emit(OPS.subtract(parts, g.bb.emit(OPS.mean(parts, -1, keepdims=True))))
        x = g.bb.emit(OPS.reshape(center, (m, columns)))
    return g.multiply(bare_norm(g, x, a), g.vector(name + ".weight", exact=True))


def bare_norm(g: Graph, x, a: AttentionConfig | CompressedConfig, factors: str = "") -> relax.Var:
    """RMS norm of each head, without weights. factors: name of a tensor with a factor for each head, or ""."""
    m, columns = shape_of(x)
    parts = g.bb.emit(OPS.reshape(x, (m, columns // a.head_dim, a.head_dim)))
    y = g.bb.emit(OPS.nn.rms_norm(parts, g.ones(a.head_dim), -1, g.config.norm_eps))
    if factors:
        y = g.multiply(y, g.bb.emit(OPS.reshape(g.vector(factors, exact=True), (a.heads, 1))))
    return g.bb.emit(OPS.reshape(y, (m, columns)))


def attended(g: Graph, q, k, v, layer: int, ids=None) -> relax.Var:
    """`Graph.attention`, after padding heads to the number of columns that they have in the cache."""
    a = g.config.layers[layer].attention
    assert a, "a layer with attention"
    return _narrowed(g, g.attention(*_widened(g, q, k, v, layer), layer, ids), a)


def _widened(g: Graph, q, k, v, layer: int) -> tuple[relax.Var, relax.Var, relax.Var]:
    """q, k and v with as many columns per head as the cache has. With ALiBi, the additional columns of a key have its
    position, and those of a query the slope, so that q . k contains slope * position. This differs from ALiBi's -slope
    * distance by a constant for all keys, which the softmax removes."""
    a = g.config.layers[layer].attention
    assert a, "a layer with attention"
    if a.columns == a.head_dim and a.values == a.head_dim:
        return q, k, v

    def of_key(row, head, column, rows):
        position = rows[row, 0]
        of_block = te.if_then_else(column == 0, position // PAGE, position % PAGE).astype("float32")
        return te.if_then_else(column < 2, of_block, 0.0)

    def of_query(row, head, column, slopes):
        bias = slopes[te.min(head, a.heads - 1)] * (1.0 / (a.scale or a.head_dim**-0.5))
        return te.if_then_else(column == 0, bias * PAGE, te.if_then_else(column == 1, bias, 0.0))

    if a.alibi:
        q = _filled(g, q, a.heads, a.head_dim, a.columns, of_query, g.vector(f"blk.{layer}.attn_slopes"))
        k = _filled(g, k, a.kv_heads, a.head_dim, a.columns, of_key, g.rows)
    return q, k, _filled(g, v, a.kv_heads, a.values, a.columns, lambda *_: 0.0)


def _filled(g: Graph, x, heads: int, size: int, columns: int, after: Callable, *args) -> relax.Var:
    """x with `columns` columns per head instead of `size`. after(row, head, column, *args): the additional columns."""

    def fill(x, *args):
        def element(row, at):
            head, column = at // columns, at % columns
            own = te.max(te.min(head * size + te.min(column, size - 1), heads * size - 1), 0)
            return te.if_then_else(column < size, x[row, own], after(row, head, column - size, *args))

        return te.compute((g.m, padded(heads * columns)), element, "filled")

    return g.bb.emit_te(fill, x, *args, primfunc_name_hint="fill_heads")


def _narrowed(g: Graph, y, a: AttentionConfig) -> relax.Var:
    """The first columns of each head of attention's output: as many as a value has."""
    if a.columns == a.values:
        return y
    parts = g.bb.emit(OPS.reshape(y, (g.m, a.heads, a.columns)))
    own = g.bb.emit(OPS.strided_slice(parts, [2], [0], [a.values]))
    return g.bb.emit(OPS.reshape(own, (g.m, a.heads * a.values)))


def activated(g: Graph, gate, up, act: str) -> tuple:
    """The two factors whose product is the input of a block's last matrix."""
    kind, numbers = numbers_of(act)
    if act == "swiglu_oai":  # gpt-oss
        gate = g.bb.emit(OPS.minimum(gate, relax.const(OAI_LIMIT, "float32")))
        up = g.bb.emit(OPS.add(clamped(g, up, OAI_LIMIT), relax.const(1.0, "float32")))
        return g.multiply(gate, g.bb.emit(OPS.sigmoid(g.scaled(gate, OAI_SLOPE)))), up
    if not numbers:
        return g.activation(gate, act), up
    if kind == SITU:
        up = g.softcap(up, numbers[1]) if numbers[1] else up
        return g.multiply(g.softcap(gate, numbers[0]), g.bb.emit(OPS.sigmoid(gate))), up
    limit, cut = numbers[0], kind == CUT
    most = relax.const(limit, "float32")
    gate = gate if cut else g.bb.emit(OPS.minimum(gate, most))
    y = g.activation(gate, "silu")
    return g.bb.emit(OPS.minimum(y, most)) if cut else y, clamped(g, up, limit)


def normed_end(g: Graph, x, first: int, name: str) -> relax.Var:
    """x, where the columns from `first` on, as many as the weight has, are normalized by an RMS norm. name: of the
    weight."""
    count = g.model.tensors[name].shape[0]
    end = g.bb.emit(OPS.nn.rms_norm(g.columns(x, first, count), g.vector(name, exact=True), -1, g.config.norm_eps))
    y = g.joined(g.columns(x, 0, first), end)
    rest = shape_of(x)[1] - first - count
    return g.joined(y, g.columns(x, first + count, rest)) if rest else y


def gated(g: Graph, y, gate, a: AttentionConfig) -> relax.Var:
    """Attention's output y times a function of `gate`, which has the columns of y, or one column for each head."""
    m, columns = shape_of(y)
    if a.own_gate == "sigmoid" and not a.head_gate:
        return g.gate(y, gate, a.head_dim)
    own = a.heads if a.head_gate else columns
    factor = g.bb.emit(GATES[a.own_gate](g.columns(gate, 0, own)))
    parts = g.bb.emit(OPS.reshape(y, (m, a.heads, columns // a.heads)))
    factors = g.bb.emit(OPS.reshape(factor, (m, a.heads, own // a.heads)))
    return g.bb.emit(OPS.reshape(g.bb.emit(OPS.multiply(parts, factors)), (m, columns)))
