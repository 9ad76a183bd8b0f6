"""add(x, linear(h)) becomes a linear (or another of ADDING) with the residual as its last input."""

from dataclasses import replace

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.operators import Combine, ExpertDown, Linear

ADDING = (Linear, ExpertDown, Combine)


def fuse_residual(mod):
    def rule(call, producer):
        if getattr(call.op, "name", "") != "relax.add":
            return None
        for residual, other in (call.args, reversed(call.args)):
            linear = producer(other)
            op = ops.operator_of(linear)
            if not isinstance(op, ADDING) or op.residual or (isinstance(op, Linear) and len(op.segments) > 1):
                continue
            return ops.call(replace(op, residual=True), [*linear.args, residual])
        return None

    return rewrite(mod, rule)
