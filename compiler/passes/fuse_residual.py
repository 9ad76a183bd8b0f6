"""add(x, linear(h)) becomes a linear (or another of ADDING) with the residual as its last input."""

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite

ADDING = ("linear", "expert_down", "combine")


def fuse_residual(mod):
    def rule(call, producer):
        if getattr(call.op, "name", "") != "relax.add":
            return None
        for residual, other in (call.args, reversed(call.args)):
            linear = producer(other)
            name = ops.name_of(linear)
            if name not in ADDING or int(linear.attrs["residual"]):
                continue
            if name != "linear" or len(linear.attrs["n"]) == 1:
                return ops.with_attrs(linear, [*linear.args, residual], residual=1)
        return None

    return rewrite(mod, rule)
