"""route(linear(rms_norm(x))) of one token becomes one `norm_route`, which gives the norm's results as well, for targets
that have such a kernel."""

from typing import Any, cast

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler import ops
from mlc_amd.compiler.nodes import fields_of
from mlc_amd.compiler.passes.rewrite import bound_in, each_function
from mlc_amd.schedules.formats import FORMATS


def _chains(func) -> list[tuple[relax.Call, relax.Call, relax.Call]]:
    """(norm, linear, route) whose intermediate results are float32."""
    bound = bound_in(func)
    found = []
    for route in bound.values():
        if ops.name_of(route) != "route" or ops.shape_of(route.args[1])[0] != 1:
            continue
        linear: Any = bound.get(route.args[1])
        if ops.name_of(linear) != "linear" or not _is_plain(linear):
            continue
        norm: Any = bound.get(linear.args[1])
        if isinstance(norm, relax.TupleGetItem):  # the float32 result is the last of both
            norm = (
                bound.get(norm.tuple_value)
                if norm.index == len(fields_of(cast(relax.TupleType, norm.tuple_value.ty))) - 1
                else None
            )
        if ops.name_of(norm) == "rms_norm" and str(norm.attrs["rows"]) == "all" and _gives_float32(norm):
            found.append((norm, linear, route))
    return found


def _is_plain(linear) -> bool:
    """Whether it is one product of float weights."""
    a = linear.attrs
    return len(a["n"]) == 1 and not int(a["residual"]) and FORMATS[a["formats"][0]].kind == "float"


def _gives_float32(norm) -> bool:
    return ops.gives_both(norm) or not str(norm.attrs["layout"])


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
            return fused if ops.gives_both(call) else relax.TupleGetItem(fused, 0)
        if call in self.routes:
            fused = self.fused[self.routes[call]]
            last = len(fields_of(fused.ty))
            return relax.Tuple([relax.TupleGetItem(fused, i) for i in (last - 2, last - 1)])
        return super().visit_call_(call)

    def _fused(self, norm, linear, route):
        args = [*norm.args, *linear.args[2:], *route.args[2:]]
        attrs = {key: norm.attrs[key] for key in ("eps", "layout")} | ({"both": 1} if ops.gives_both(norm) else {})
        attrs |= {"format": linear.attrs["formats"][0], "router_bias": linear.attrs["biases"][0]}
        attrs |= {key: route.attrs[key] for key in (*ops.EXPERTS, *ops.ROUTING)}
        return ops.call("norm_route", [self.visit_expr(arg) for arg in args], **attrs)


def fuse_route(mod, target):
    if not target.fuses_route:
        return mod
    return each_function(mod, lambda func: _Fuser(mod, _chains(func)).visit_expr(func))
