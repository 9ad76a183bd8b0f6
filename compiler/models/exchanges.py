"""Exchanges in the graph of a model that several GPUs share (compiler/models/shards.py).

A product with a matrix of which each GPU has some columns is a term of a sum. `Graph.terms` has the variables that are
terms: what adds terms to one another, or multiplies them, makes terms; all else takes the sum, `whole`. So a block's
terms are added up before they cross between GPUs.
"""

from dataclasses import replace
from typing import Any, Protocol

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.models.model import Model
from mlc_amd.compiler.ops import shape_of
from mlc_amd.schedules.formats import HALF_MAX
from mlc_amd.schedules.operators import AllGather, AllReduce, exchange

OPS: Any = relax.op  # TVM declares their arguments as expressions only


class Graph(Protocol):
    """What exchanges need of compiler/models/graph.py's."""

    bb: Any
    model: Model
    state: relax.Var
    terms: set[relax.Var]

    def columns(self, x, first: int, count: int) -> relax.Var: ...


def term(g: Graph, x: relax.Var, name: str) -> relax.Var:
    """x, the product with that matrix: a term, where each GPU has some of its columns."""
    return terms_of(g, x) if name in g.model.sums else x


def terms_of(g: Graph, x: relax.Var, *made_of: relax.Var) -> relax.Var:
    """x, a term; made_of: only if these are terms."""
    if all(one in g.terms for one in made_of):
        g.terms.add(x)
    return x


def whole(g: Graph, x, residual=None):
    """The sum over all GPUs of a term, plus residual; any other x as it is."""
    if x not in g.terms:
        return x
    m, n = shape_of(x)
    op = AllReduce(n=n, parts=g.model.gpus, m=m, residual=residual is not None)
    if op.words > exchange.MOST_WORDS:  # copied, not sent while kernels run
        x = g.bb.emit(relax.op.astype(g.bb.emit(OPS.clip(x, -HALF_MAX, HALF_MAX)), "float16"))
        op = replace(op, half=True)
    added = [] if residual is None else [residual]
    return g.bb.emit(relax.TupleGetItem(g.bb.emit(ops.call(op, [g.state, x, *added])), 0))


def add(g: Graph, x, y) -> relax.Var:
    """x + y, with the exchange if one of them is a term."""
    if (x in g.terms) != (y in g.terms):
        return whole(g, x, residual=y) if x in g.terms else whole(g, y, residual=x)
    return terms_of(g, g.bb.emit(relax.op.add(x, y)), x, y)


def gathered(g: Graph, x, name: str, count: int) -> relax.Var:
    """The first columns of the product with that matrix, of which each GPU may have some rows."""
    if name not in g.model.joins:
        return x
    m, n = shape_of(x)
    op = AllGather(n=n, parts=g.model.gpus, m=m)
    joined = g.bb.emit(relax.TupleGetItem(g.bb.emit(ops.call(op, [g.state, x])), 0))
    return g.columns(joined, 0, count)
