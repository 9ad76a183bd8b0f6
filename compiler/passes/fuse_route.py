"""route(linear(rms_norm(x))) of one token becomes one `norm_route`, which gives the norm's results as well, for targets
that have such a kernel."""

from dataclasses import fields
from typing import Any, cast

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler import ops
from mlc_amd.compiler.nodes import fields_of
from mlc_amd.compiler.passes.rewrite import bound_in, each_function
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import Linear, NormRoute, RmsNorm, Route
from mlc_amd.schedules.operators.experts import Routing


def _chains(func) -> list[tuple[relax.Call, relax.Call, relax.Call]]:
    """(norm, linear, route) whose intermediate results are float32."""
    bound = bound_in(func)
    found = []
    for route in bound.values():
        op = ops.operator_of(route)
        if not isinstance(op, Route) or op.m != 1:
            continue
        linear: Any = bound.get(route.args[1])
        if not _is_plain(ops.operator_of(linear)):
            continue
        norm: Any = bound.get(linear.args[1])
        if isinstance(norm, relax.TupleGetItem):  # the float32 result is the last of both
            norm = (
                bound.get(norm.tuple_value)
                if norm.index == len(fields_of(cast(relax.TupleType, norm.tuple_value.ty))) - 1
                else None
            )
        op = ops.operator_of(norm)
        if isinstance(op, RmsNorm) and op.rows == "all" and (op.both or not op.layout):
            found.append((norm, linear, route))
    return found


def _is_plain(op) -> bool:
    """Whether it is one product of float weights."""
    return isinstance(op, Linear) and op.plain and FORMATS[op.formats[0]].kind == "float"


@mutator
class _Fuser(PyExprMutator):
    """The fused call stands where the norm stood: everything else that it takes is a parameter."""

    def __init__(self, mod, chains):
        super().__init__(mod)
        self.norms = {norm: (norm, linear, route) for norm, linear, route in chains}
        self.routes = {route: norm for norm, _, route in chains}
        self.fused = {}

    def visit_call_(self, call):
        if call in self.norms:
            fused = self.fused[call] = self.builder_.emit(self._fused(*self.norms[call]))
            return fused if cast(RmsNorm, ops.operator_of(call)).both else relax.TupleGetItem(fused, 0)
        if call in self.routes:
            fused = self.fused[self.routes[call]]
            last = len(fields_of(fused.ty))
            return relax.Tuple([relax.TupleGetItem(fused, i) for i in (last - 2, last - 1)])
        return super().visit_call_(call)

    def _fused(self, norm, linear, route):
        args = [*norm.args, *linear.args[2:], *route.args[2:]]
        n, w, r = cast(RmsNorm, ops.operator_of(norm)), cast(Linear, ops.operator_of(linear)), ops.operator_of(route)
        routing: Any = {of.name: getattr(r, of.name) for of in fields(Routing) if of.name != "m"}
        own = {"eps": n.eps, "layout": n.layout, "both": n.both, "fmt": w.formats[0], "router_bias": w.biases[0]}
        return ops.call(NormRoute(k=n.k, **own, **routing), [self.visit_expr(arg) for arg in args])


def fuse_route(mod, target):
    if not target.fuses_route:
        return mod
    return each_function(mod, lambda func: _Fuser(mod, _chains(func)).visit_expr(func))
