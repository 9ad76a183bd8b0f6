"""Emits residual streams that are more than x + block(x); config.py has the formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm import relax, te

from mlc_amd.compiler.models import exchanges
from mlc_amd.compiler.models.residuals.config import ATTENTION, CheckpointConfig, GatedConfig, HyperConfig, part_name
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.operators import Sinkhorn

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op


def opened(g: Graph, x) -> relax.Var:
    """The streams before the first layer. x: the rows of the embedding."""
    s = g.config.streams
    return g.joined(x, *[x] * (s.count - 1)) if isinstance(s, HyperConfig | GatedConfig) else x


def around(g: Graph, x, i: int, which: str, block: Callable[[Any], relax.Var]) -> relax.Var:
    """The streams after block `which` of layer i. x: the streams before it. block: a function from the block's input to
    its result."""
    s = g.config.streams
    if isinstance(s, HyperConfig):
        pre, post, mixing = _factors(g, x, s, f"blk.{i}.hc_{which}")
        y = block(_read(g, x, pre, s.count))
        return _spread(g, x, y, post, mixing, s.count)
    if isinstance(s, GatedConfig):
        normed = normed_streams(g, x, f"blk.{i}.hc_{which}_norm.weight", s.count)
        h = _gated(g, normed, s, f"blk.{i}.hc_{which}")
        share = g.scaled(g.linear(normed, f"blk.{i}.hc_{which}_inject.weight"), 1.0 / s.count)
        factors = g.scaled(g.bb.emit(OPS.sigmoid(g.columns(share, 0, s.count))), 2.0)
        return _spread(g, x, block(h), factors, None, s.count)
    assert isinstance(s, CheckpointConfig)
    h = _attended(g, x, f"blk.{i}.{which}_res_score.weight")
    if which == ATTENTION and i % s.layers == 0:
        g.checkpoints.append(x)
        return block(h)
    return g.add(x, block(h))


def answers(g: Graph, x, norm: str) -> relax.Var:
    """The input of the last matrix, for the rows whose logits the function returns. norm: name of the last norm."""
    if isinstance(s := g.config.streams, GatedConfig):
        return _gated(g, g.answers(x, *(part_name(i) for i in range(s.count))), s, "output_hc")
    return g.answers(_closed(g, x), norm)


def _closed(g: Graph, x) -> relax.Var:
    """The input of the last norm."""
    s = g.config.streams
    if isinstance(s, CheckpointConfig):
        return _attended(g, x, "output_res_score.weight")
    return _read(g, x, _factors(g, x, s, "output_hc")[0], s.count) if isinstance(s, HyperConfig) else x


# ---- hyper connections


def _factors(g: Graph, x, s: HyperConfig, name: str) -> tuple[relax.Var, relax.Var | None, relax.Var | None]:
    """Factors of (the streams in the block's input [m, count], the block's result in each stream [m, count], each
    stream in each other stream [m, count, count]); None for those that do not exist."""
    m, n = shape_of(x)[0], s.count
    logits = g.linear(g.rms_norm(x, ""), f"{name}_fn.weight", exact=True)
    scale, base = (g.vector(f"{name}_{which}.weight", exact=True) for which in ("scale", "base"))

    def part(first: int, count: int, number: int) -> relax.Var:
        own = g.bb.emit(OPS.strided_slice(base, [0], [first], [first + count]))
        factor = g.bb.emit(OPS.strided_slice(scale, [0], [number], [number + 1]))
        return g.bb.emit(OPS.add(g.bb.emit(OPS.multiply(g.columns(logits, first, count), factor)), own))

    def gate(number: int, factor: float, eps: float) -> relax.Var:
        y = g.bb.emit(OPS.sigmoid(part(number * n, n, number)))
        return g.bb.emit(OPS.add(g.scaled(y, factor), relax.const(eps, "float32")))

    pre = gate(0, 1.0, s.eps)
    if name == "output_hc":
        return pre, None, None
    post, mixing = gate(1, s.magnitude, s.post_eps), None
    if s.iterations:
        op = Sinkhorn(count=n, iterations=s.iterations, eps=s.eps, m=m)
        mixing = g.bb.emit(OPS.reshape(g.emit(op, [part(2 * n, n * n, 2)]), (m, n, n)))
    return pre, post, mixing


def _read(g: Graph, x, factors, count: int) -> relax.Var:
    """The sum of the streams, each times its factor."""
    m, columns = shape_of(x)
    n = columns // count

    def total(x, factors):
        return te.compute((m, n), lambda r, c: sum(factors[r, i] * x[r, i * n + c] for i in range(count)), "read")

    return g.bb.emit_te(total, x, factors, primfunc_name_hint="read_streams")


def _spread(g: Graph, x, y, factors, mixing, count: int) -> relax.Var:
    """y times its factor for each stream, added to the stream or, with mixing, to the weighted sum of all streams."""
    m, columns = shape_of(x)
    n = columns // count

    def spread(x, y, factors, *mixing):
        def element(r, c):
            i: Any = c // n
            own = sum(mixing[0][r, j, i] * x[r, j * n + c % n] for j in range(count)) if mixing else x[r, c]
            return own + factors[r, i] * y[r, c % n]

        return te.compute((m, columns), element, "spread")

    return g.bb.emit_te(
        spread, x, y, factors, *([] if mixing is None else [mixing]), primfunc_name_hint="spread_streams"
    )


def normed_streams(g: Graph, x, name: str, count: int) -> relax.Var:
    """The RMS norm of each stream; each has its own weights."""
    n = shape_of(x)[1] // count
    parts = [g.rms_norm(g.columns(x, i * n, n), "") for i in range(count)]
    return g.multiply(g.joined(*parts), g.vector(name, exact=True))


def _gated(g: Graph, normed, s: GatedConfig, name: str) -> relax.Var:
    """The mean over the normed streams, each times its gate."""
    m, columns = shape_of(normed)
    n = columns // s.count
    low = g.activation(g.scaled(g.linear(normed, f"{name}_down.weight"), 1.0 / s.count), "silu")
    gates = g.bb.emit(OPS.sigmoid(g.columns(g.linear(low, f"{name}_up.weight"), 0, columns)))

    def mean(x, gates):
        places = [i * n for i in range(s.count)]
        return te.compute((m, n), lambda r, c: sum(x[r, p + c] * gates[r, p + c] for p in places) / s.count, "mean")

    return g.bb.emit_te(mean, normed, gates, primfunc_name_hint="mean_of_streams")


# ---- checkpoints


def _attended(g: Graph, x, name: str) -> relax.Var:
    """The sum of the stored streams and x, weighted by the softmax of their scores."""
    if not g.checkpoints:
        return x
    sources, weight = [*g.checkpoints, x], g.vector(name, exact=True)
    scores = [g.bb.emit(OPS.sum(g.multiply(g.rms_norm(one, ""), weight), -1, keepdims=True)) for one in sources]
    factors = g.bb.emit(OPS.nn.softmax(g.joined(scores[0], *scores[1:]), -1))

    def total(factors, *sources: Any):
        def element(r, c):
            return sum(factors[r, j] * one[r, c] for j, one in enumerate(sources))

        return te.compute(shape_of(x), element, "attended")

    return g.bb.emit_te(total, factors, *sources, primfunc_name_hint="attend_streams")


def result(g: Graph, terms: Sequence) -> relax.Var:
    """The sum of a block's terms, over all GPUs."""
    y = terms[0]
    for term in terms[1:]:
        y = g.add(y, term)
    return exchanges.whole(g, y)
