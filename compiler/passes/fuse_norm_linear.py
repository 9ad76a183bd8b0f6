"""linear(rms_norm(x)), or gate_up of it, becomes one operator that computes the norm for itself, for targets whose
kernels do: where all that reads the norm can, so that it is no launch of its own any more."""

from dataclasses import replace
from typing import cast

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import bound_in, each_function, readers_in
from mlc_amd.schedules.operators import GateUp, Linear, RmsNorm


def reads_norms(value) -> bool:
    """Whether a value is a call whose kernel may compute or complete the norm of its input."""
    return isinstance(ops.operator_of(value), (Linear, GateUp))


def is_norm(value) -> bool:
    """Whether a value is an rms_norm of all rows that has one result."""
    op = ops.operator_of(value)
    return isinstance(op, RmsNorm) and op.rows == "all" and not op.both


def _norms_of_readers(func, target) -> dict[relax.Call, relax.Call]:
    """Linears and gate_ups that compute their norm, with it."""
    readers = readers_in(func)
    return {
        reader: norm
        for var, norm in bound_in(func).items()
        if is_norm(norm)
        if all(reads_norms(reader) and target.fuses_norm(ops.operator_of(reader)) for reader in readers.get(var, ()))
        for reader in readers.get(var, ())
    }


@mutator
class _Fuser(PyExprMutator):
    def __init__(self, mod, norms):
        super().__init__(mod)
        self.norms = norms

    def visit_call_(self, call):
        if call not in self.norms:
            return super().visit_call_(call)
        norm, (state, _, *rest) = self.norms[call], call.args
        args = [self.visit_expr(arg) for arg in (state, *norm.args[1:], *rest)]
        op, normed = cast(Linear, ops.operator_of(call)), cast(RmsNorm, ops.operator_of(norm))
        return ops.call(replace(op, eps=normed.eps), args)


def fuse_norm_linear(mod, target):
    return each_function(mod, lambda func: _Fuser(mod, _norms_of_readers(func, target)).visit_expr(func))
