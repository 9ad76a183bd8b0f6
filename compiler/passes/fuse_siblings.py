"""Calls of the same input become one: linears, and norms that differ in the layout of their result. The fused call
stands where the first of them stood: all else that they take is the same or a parameter."""

from dataclasses import replace
from typing import cast

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.nodes import fields_of
from mlc_amd.compiler.passes.rewrite import bound_in, rewrite_functions
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import Linear, Norm


class _Linears:
    """Plain linears of one input (q, k and v), all with integer or all with float weights."""

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
    """Pairs of a norm with a layout and one with the float32 result, of the same arguments and attributes, as experts
    and their router need them; they become one norm with both results."""

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
    """One launch for the linears of an input, one pass over it."""
    return rewrite_functions(mod, _Linears)


def fuse_norms(mod):
    return rewrite_functions(mod, _Norms)
