"""add(x, linear(h)) becomes a linear with the residual as its last input."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite


def fuse_residual(mod):
    def rule(call, producer):
        if getattr(call.op, "name", "") != "relax.add":
            return None
        for residual, other in (call.args, reversed(call.args)):
            linear = producer(other)
            if ops.name_of(linear) == "linear" and len(linear.attrs["n"]) == 1 and not int(linear.attrs["residual"]):
                return ops.with_attrs(linear, [*linear.args, residual], residual=1)
        return None

    return rewrite(mod, rule)
