"""Two norms of the same x that differ in the layout of their result, as experts and their router need it, become one
with both results."""

from dataclasses import replace
from typing import cast

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler import ops
from mlc_amd.compiler.nodes import fields_of
from mlc_amd.compiler.passes.rewrite import each_function
from mlc_amd.schedules.operators import Norm


def _pairs(func) -> list[tuple[relax.Call, relax.Call]]:
    """(norm with a layout, norm with the float32 result) of the same arguments and attributes."""
    found = {}
    for block in func.body.blocks:
        for call in (binding.value for binding in block.bindings):
            if isinstance(op := ops.operator_of(call), Norm) and not op.both:
                group = found.setdefault((replace(op, layout=""), tuple(call.args)), {})
                group.setdefault(op.layout, call)
    return [
        (call, group[""]) for group in found.values() if len(group) == 2 and "" in group
        for layout, call in group.items() if layout
    ]  # fmt: skip


@mutator
class _Fuser(PyExprMutator):
    """The fused call stands where the first of the two stood: both have the same arguments."""

    def __init__(self, mod, pairs):
        super().__init__(mod)
        self.pair = {call: pair for pair in pairs for call in pair}
        self.fused = {}

    def visit_call_(self, call):
        if call not in self.pair:
            return super().visit_call_(call)
        pair = self.pair[call]
        if pair not in self.fused:
            args = [self.visit_expr(arg) for arg in pair[0].args]
            self.fused[pair] = self.builder_.emit(
                ops.call(replace(cast(Norm, ops.operator_of(pair[0])), both=True), args)
            )
        both = self.fused[pair]
        *parts, plain = (relax.TupleGetItem(both, i) for i in range(len(fields_of(both.ty))))
        if call.same_as(pair[1]):
            return plain
        return relax.Tuple(list[relax.Expr](parts)) if len(parts) > 1 else parts[0]


def fuse_norms(mod):
    return each_function(mod, lambda func: _Fuser(mod, _pairs(func)).visit_expr(func))
