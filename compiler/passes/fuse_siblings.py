"""Linears of the same input (q, k and v) become one `linear` with several weights: one launch, one pass over the
input."""

from dataclasses import replace
from typing import cast

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler import ops
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import Linear


def _sibling_groups(func) -> list[list]:
    """Groups of two or more calls, in order: plain linears of one input, all with integer or all with float weights."""
    groups = {}
    for block in func.body.blocks:
        for call in (binding.value for binding in block.bindings):
            if isinstance(op := ops.operator_of(call), Linear) and op.plain:
                key = call.args[1], FORMATS[op.formats[0]].kind, op.exact
                groups.setdefault(key, []).append(call)
    return [group for group in groups.values() if len(group) > 1]


@mutator
class _Fuser(PyExprMutator):
    """The fused call stands where the first sibling stood: weights and biases are parameters, so they are known
    there."""

    def __init__(self, mod, groups):
        super().__init__(mod)
        self.place = {call: (group, i) for group in groups for i, call in enumerate(group)}
        self.fused = {}

    def visit_call_(self, call):
        if call not in self.place:
            return super().visit_call_(call)
        group, i = self.place[call]
        if i == 0:
            state, x = (self.visit_expr(arg) for arg in call.args[:2])
            first, *others = (cast(Linear, ops.operator_of(c)) for c in group)
            segments = first.segments + tuple(segment for op in others for segment in op.segments)
            biases = first.biases + tuple(bias for op in others for bias in op.biases)
            weights = [weight for c in group for weight in c.args[2:]]  # each with its bias
            merged = replace(first, segments=segments, biases=biases)
            self.fused[group[0]] = self.builder_.emit(ops.call(merged, [state, x, *weights]))
        return relax.TupleGetItem(self.fused[group[0]], i)


def fuse_siblings(mod):
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function):
            fuser = _Fuser(mod, _sibling_groups(func))
            mod[gv] = fuser.visit_expr(func)
    return relax.transform.DeadCodeElimination()(mod)
