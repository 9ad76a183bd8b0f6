"""Exchanges in the graph of a model that is divided by tensor (compiler/models/shards.py).

The product with a matrix of which each GPU has some columns is a term: its sum over GPUs is the whole product.
`Graph.terms` has the variables that are terms. Sums and multiples of terms are terms, too; all other operators need the
whole value (`whole`), which an all-reduce computes. So the terms of a block are added before they are exchanged.
"""

from dataclasses import replace
from typing import Any, Protocol

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.models.model import Model
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.operators import AllGather, AllReduce, exchange

OPS: Any = relax.op  # Any: TVM declares that arguments must be expressions, but accepts numbers too


class Graph(Protocol):
    """The interface of compiler/models/graph.py's `Graph` that this module uses."""

    bb: Any
    model: Model
    state: relax.Var
    terms: set[relax.Var]

    def columns(self, x, first: int, count: int) -> relax.Var: ...


def term(g: Graph, x: relax.Var, name: str) -> relax.Var:
    """Returns x, the product with the matrix `name`; marks it as a term if each GPU has some of the matrix' columns."""
    return terms_of(g, x) if name in g.model.sums else x


def terms_of(g: Graph, x: relax.Var, *made_of: relax.Var) -> relax.Var:
    """Returns x; marks it as a term if all of `made_of` are terms."""
    if all(one in g.terms for one in made_of):
        g.terms.add(x)
    return x


def whole(g: Graph, x, residual=None):
    """For a term x: its sum over all GPUs, plus residual. Otherwise x."""
    if x not in g.terms:
        return x
    m, n = shape_of(x)
    op = AllReduce(n=n, parts=g.model.gpus, m=m, residual=residual is not None)
    if op.words > exchange.MOST_WORDS:  # exchanged by copies, not while kernels run
        x = g.bb.emit(relax.op.astype(g.bb.emit(OPS.clip(x, -HALF_MAX, HALF_MAX)), "float16"))
        op = replace(op, half=True)
    added = [] if residual is None else [residual]
    return g.bb.emit(relax.TupleGetItem(g.bb.emit(ops.call(op, [g.state, x, *added])), 0))


def add(g: Graph, x, y) -> relax.Var:
    """x + y; with an exchange if only one of them is a term."""
    if (x in g.terms) != (y in g.terms):
        return whole(g, x, residual=y) if x in g.terms else whole(g, y, residual=x)
    return terms_of(g, g.bb.emit(relax.op.add(x, y)), x, y)


def gathered(g: Graph, x, name: str, count: int) -> relax.Var:
    """The first `count` columns of x, the product with the matrix `name`; gathered from all GPUs if each has some of
    the matrix' rows."""
    if name not in g.model.joins:
        return x
    m, n = shape_of(x)
    op = AllGather(n=n, parts=g.model.gpus, m=m)
    joined = g.bb.emit(relax.TupleGetItem(g.bb.emit(ops.call(op, [g.state, x])), 0))
    return g.columns(joined, 0, count)
