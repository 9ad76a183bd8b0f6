"""Merges calls that read the same input (linears, norms), and the calls that choose experts. The merged call is placed
where the first of the calls was: its other arguments are the same in all calls, or parameters."""

from dataclasses import fields, replace
from typing import Any, cast

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.nodes import fields_of
from mlc_amd.compiler.passes.rewrite import bound_in, rewrite_functions
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import Linear, Norm, NormRoute, RmsNorm, Route
from mlc_amd.schedules.operators.experts import Routing


class _Linears:
    """Merges plain linears of one input (such as q, k and v) into one linear of several segments. All of them have
    integer weights, or all have float weights."""

    def __init__(self, func):
        groups = {}
        for call in bound_in(func).values():
            if isinstance(op := ops.operator_of(call), Linear) and op.plain:
                key = call.args[1], FORMATS[op.formats[0]].kind, op.exact
                groups.setdefault(key, []).append(call)
        self.place = {call: (group, i) for group in groups.values() if len(group) > 1 for i, call in enumerate(group)}
        self.fused = {}

    def __call__(self, call, rewriter):
        if call not in self.place:
            return None
        group, i = self.place[call]
        if i == 0:
            state, x = (rewriter.visit_expr(arg) for arg in call.args[:2])
            first, *others = (cast(Linear, ops.operator_of(c)) for c in group)
            segments = first.segments + tuple(segment for op in others for segment in op.segments)
            biases = first.biases + tuple(bias for op in others for bias in op.biases)
            weights = [weight for c in group for weight in c.args[2:]]  # each with its bias
            merged = replace(first, segments=segments, biases=biases)
            self.fused[group[0]] = rewriter.builder_.emit(ops.call(merged, [state, x, *weights]))
        return relax.TupleGetItem(self.fused[group[0]], i)


class _Norms:
    """Merges two norms with the same arguments and attributes, one with a quantized result and one with a float32
    result, into one norm with both results. Experts and their router need these two."""

    def __init__(self, func):
        groups = {}
        for call in bound_in(func).values():
            if isinstance(op := ops.operator_of(call), Norm) and not op.both:
                group = groups.setdefault((replace(op, layout=""), tuple(call.args)), {})
                group.setdefault(op.layout, call)
        pairs = [
            (call, group[""]) for group in groups.values() if len(group) == 2 and "" in group
            for layout, call in group.items() if layout
        ]  # fmt: skip
        self.pair = {call: pair for pair in pairs for call in pair}
        self.fused = {}

    def __call__(self, call, rewriter):
        if call not in self.pair:
            return None
        pair = self.pair[call]
        if pair not in self.fused:
            args = [rewriter.visit_expr(arg) for arg in pair[0].args]
            op = replace(cast(Norm, ops.operator_of(pair[0])), both=True)
            self.fused[pair] = rewriter.builder_.emit(ops.call(op, args))
        both = self.fused[pair]
        *parts, plain = (relax.TupleGetItem(both, i) for i in range(len(fields_of(both.ty))))
        if call.same_as(pair[1]):
            return plain
        return relax.Tuple(list[relax.Expr](parts)) if len(parts) > 1 else parts[0]


def fuse_siblings(mod):
    """Linears of one input become one launch, which reads the input once."""
    return rewrite_functions(mod, _Linears)


def fuse_sibling_norms(mod):
    """Two norms of one input, one with a quantized and one with a float32 result, become one."""
    return rewrite_functions(mod, _Norms)


def _chains(func) -> list[tuple[relax.Call, relax.Call, relax.Call]]:
    """The chains (norm, linear with float weights, route) of one row with float32 intermediate results."""
    bound = bound_in(func)
    found = []
    for route in bound.values():
        op = ops.operator_of(route)
        if not isinstance(op, Route) or op.m != 1:
            continue
        linear: Any = bound.get(route.args[1])
        of = ops.operator_of(linear)
        if not (isinstance(of, Linear) and of.plain and FORMATS[of.formats[0]].kind == "float"):
            continue
        norm: Any = bound.get(linear.args[1])
        if isinstance(norm, relax.TupleGetItem):  # a norm with both results: the float32 one is the last
            norm = (
                bound.get(norm.tuple_value)
                if norm.index == len(fields_of(cast(relax.TupleType, norm.tuple_value.ty))) - 1
                else None
            )
        op = ops.operator_of(norm)
        if isinstance(op, RmsNorm) and op.rows == "all" and (op.both or not op.layout):
            found.append((norm, linear, route))
    return found


class _Route:
    """Merges the chains of `_chains`. The merged call is placed where the norm was: its other arguments are
    parameters."""

    def __init__(self, func):
        self.chains = {chain[0]: chain for chain in _chains(func)}
        self.routes = {route: norm for norm, _, route in self.chains.values()}
        self.fused = {}

    def __call__(self, call, rewriter):
        if call in self.chains:
            args, op = _norm_route(*self.chains[call])
            fused = self.fused[call] = rewriter.builder_.emit(ops.call(op, map(rewriter.visit_expr, args)))
            return fused if cast(RmsNorm, ops.operator_of(call)).both else relax.TupleGetItem(fused, 0)
        if call in self.routes:
            fused = self.fused[self.routes[call]]
            last = len(fields_of(fused.ty))
            return relax.Tuple([relax.TupleGetItem(fused, i) for i in (last - 2, last - 1)])
        return None


def _norm_route(norm, linear, route) -> tuple[list, NormRoute]:
    """(arguments, operator) of the merged call."""
    n, w, r = cast(RmsNorm, ops.operator_of(norm)), cast(Linear, ops.operator_of(linear)), ops.operator_of(route)
    routing: Any = {of.name: getattr(r, of.name) for of in fields(Routing) if of.name != "m"}
    own = {"eps": n.eps, "layout": n.layout, "both": n.both, "fmt": w.formats[0], "router_bias": w.biases[0]}
    return [*norm.args, *linear.args[2:], *route.args[2:]], NormRoute(k=n.k, **own, **routing)


def fuse_route(mod, target):
    """route(linear(rms_norm(x))) of one token becomes one `norm_route`, which also returns the results of the norm, for
    targets that have a kernel for it."""
    return rewrite_functions(mod, _Route) if target.fuses_route else mod
