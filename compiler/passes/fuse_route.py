"""route(linear(rms_norm(x))) of one token becomes one `norm_route`, which gives the norm's results as well, for targets
that have such a kernel."""

from dataclasses import fields
from typing import Any, cast

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.nodes import fields_of
from mlc_amd.compiler.passes.rewrite import bound_in, rewrite_functions
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


class _Fuser:
    """The fused call stands where the norm stood: everything else that it takes is a parameter."""

    def __init__(self, func):
        self.chains = {chain[0]: chain for chain in _chains(func)}
        self.routes = {route: norm for norm, _, route in self.chains.values()}
        self.fused = {}

    def __call__(self, call, rewriter):
        if call in self.chains:
            args, op = _fused(*self.chains[call])
            fused = self.fused[call] = rewriter.builder_.emit(ops.call(op, map(rewriter.visit_expr, args)))
            return fused if cast(RmsNorm, ops.operator_of(call)).both else relax.TupleGetItem(fused, 0)
        if call in self.routes:
            fused = self.fused[self.routes[call]]
            last = len(fields_of(fused.ty))
            return relax.Tuple([relax.TupleGetItem(fused, i) for i in (last - 2, last - 1)])
        return None


def _fused(norm, linear, route) -> tuple[list, NormRoute]:
    """(inputs, operator)."""
    n, w, r = cast(RmsNorm, ops.operator_of(norm)), cast(Linear, ops.operator_of(linear)), ops.operator_of(route)
    routing: Any = {of.name: getattr(r, of.name) for of in fields(Routing) if of.name != "m"}
    own = {"eps": n.eps, "layout": n.layout, "both": n.both, "fmt": w.formats[0], "router_bias": w.biases[0]}
    return [*norm.args, *linear.args[2:], *route.args[2:]], NormRoute(k=n.k, **own, **routing)


def fuse_route(mod, target):
    return rewrite_functions(mod, _Fuser) if target.fuses_route else mod
