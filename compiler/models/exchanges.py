<<<<<<< HEAD
"""Exchanges in the graph of a model that is divided by tensor (compiler/models/shards.py).

The product with a matrix of which each GPU has some columns is a term: its sum over GPUs is the whole product.
`Graph.terms` has the variables that are terms. Sums and multiples of terms are terms, too; all other operators need the
whole value (`whole`), which an all-reduce computes. So the terms of a block are added before they are exchanged.
=======
"""Emits exchanges between the GPUs that share a model by tensor (compiler/models/shards.py).

If each GPU has some columns of a matrix, the product with it is a term of a sum over the GPUs. `Graph.terms` has the
variables that are terms. Sums of terms and products of terms with factors are terms again; all other operators take the
sum, `whole`. So the terms of a block are added up before they are exchanged.
>>>>>>> h-words18
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
<<<<<<< HEAD
    """The interface of compiler/models/graph.py's `Graph` that this module uses."""
=======
    """The part of compiler/models/graph.py's Graph that exchanges use."""
>>>>>>> h-words18

    bb: Any
    model: Model
    state: relax.Var
    terms: set[relax.Var]

    def columns(self, x, first: int, count: int) -> relax.Var: ...


def term(g: Graph, x: relax.Var, name: str) -> relax.Var:
<<<<<<< HEAD
    """Returns x, the product with the matrix `name`; marks it as a term if each GPU has some of the matrix' columns."""
=======
    """Marks x, the product with the matrix `name`, as a term if each GPU has some of the matrix's columns. Returns
    x."""
>>>>>>> h-words18
    return terms_of(g, x) if name in g.model.sums else x


def terms_of(g: Graph, x: relax.Var, *made_of: relax.Var) -> relax.Var:
<<<<<<< HEAD
    """Returns x; marks it as a term if all of `made_of` are terms."""
=======
    """Marks x as a term if all of `made_of` are terms. Returns x."""
>>>>>>> h-words18
    if all(one in g.terms for one in made_of):
        g.terms.add(x)
    return x


def whole(g: Graph, x, residual=None):
<<<<<<< HEAD
    """For a term x: its sum over all GPUs, plus residual. Otherwise x."""
=======
    """For a term x: the sum over all GPUs, plus residual if given. For any other x: x itself."""
>>>>>>> h-words18
    if x not in g.terms:
        return x
    m, n = shape_of(x)
    op = AllReduce(n=n, parts=g.model.gpus, m=m, residual=residual is not None)
<<<<<<< HEAD
    if op.words > exchange.MOST_WORDS:  # exchanged by copies, not while kernels run
=======
    if op.words > exchange.MOST_WORDS:  # too large for the exchange while kernels run: copied, as float16
>>>>>>> h-words18
        x = g.bb.emit(relax.op.astype(g.bb.emit(OPS.clip(x, -HALF_MAX, HALF_MAX)), "float16"))
        op = replace(op, half=True)
    added = [] if residual is None else [residual]
    return g.bb.emit(relax.TupleGetItem(g.bb.emit(ops.call(op, [g.state, x, *added])), 0))


def add(g: Graph, x, y) -> relax.Var:
<<<<<<< HEAD
    """x + y; with an exchange if only one of them is a term."""
=======
    """x + y. If only one of them is a term, it is summed over the GPUs first, by an exchange that adds the other."""
>>>>>>> h-words18
    if (x in g.terms) != (y in g.terms):
        return whole(g, x, residual=y) if x in g.terms else whole(g, y, residual=x)
    return terms_of(g, g.bb.emit(relax.op.add(x, y)), x, y)


def gathered(g: Graph, x, name: str, count: int) -> relax.Var:
<<<<<<< HEAD
    """The first `count` columns of x, the product with the matrix `name`; gathered from all GPUs if each has some of
    the matrix' rows."""
=======
    """The first `count` columns of x, the product with the matrix `name`. If each GPU has some of the matrix's rows,
    the columns of all GPUs are gathered."""
>>>>>>> h-words18
    if name not in g.model.joins:
        return x
    m, n = shape_of(x)
    op = AllGather(n=n, parts=g.model.gpus, m=m)
    joined = g.bb.emit(relax.TupleGetItem(g.bb.emit(ops.call(op, [g.state, x])), 0))
    return g.columns(joined, 0, count)
