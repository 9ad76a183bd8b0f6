"""linear(rms_norm(x)), or gate_up of it, becomes one operator that computes the norm for itself, for targets whose
kernels do: where all that reads the norm can, so that it is no launch of its own any more."""

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import bound_in, each_function, readers_in

READERS = ("linear", "gate_up")


def is_norm(value) -> bool:
    """Whether a value is an rms_norm of all rows that has one result."""
    return ops.name_of(value) == "rms_norm" and str(value.attrs["rows"]) == "all" and not ops.gives_both(value)


def _norms_of_readers(func, target) -> dict[relax.Call, relax.Call]:
    """Linears and gate_ups that compute their norm, with it."""
    readers = readers_in(func)
    return {
        reader: norm
        for var, norm in bound_in(func).items()
        if is_norm(norm)
        if all(ops.name_of(reader) in READERS and target.fuses_norm(reader) for reader in readers.get(var, ()))
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
        return ops.with_attrs(call, args, eps=norm.attrs["eps"])


def fuse_norm_linear(mod, target):
    return each_function(mod, lambda func: _Fuser(mod, _norms_of_readers(func, target)).visit_expr(func))
