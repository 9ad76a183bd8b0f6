"""linear(rms_norm(x)), or gate_up of it, becomes one operator that computes the norm for itself, for targets whose
kernels do: where all that reads the norm can, so that it is no launch of its own any more."""

from dataclasses import replace
from typing import cast

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import bound_in, readers_in, rewrite_functions
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


def fuse_norm_linear(mod, target):
    def rule_of(func):
        norms = _norms_of_readers(func, target)

        def rule(call, rewriter):
            if call not in norms:
                return None
            norm, (state, _, *rest) = norms[call], call.args
            args = [rewriter.visit_expr(arg) for arg in (state, *norm.args[1:], *rest)]
            op, normed = cast(Linear, ops.operator_of(call)), cast(RmsNorm, ops.operator_of(norm))
            return ops.call(replace(op, eps=normed.eps), args)

        return rule

    return rewrite_functions(mod, rule_of)
