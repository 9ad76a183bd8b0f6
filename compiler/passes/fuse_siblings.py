"""Linears of the same input (q, k and v) become one `linear` with several weights: one launch, one pass over the
input."""

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler import ops
from mlc_amd.schedules.formats import FORMATS


def _sibling_groups(func) -> list[list]:
    """Groups of two or more calls, in order: plain linears of one input, all with integer or all with float weights."""
    groups = {}
    for block in func.body.blocks:
        for call in (binding.value for binding in block.bindings):
            if ops.name_of(call) == "linear" and not int(call.attrs["residual"]) and len(call.attrs["n"]) == 1:
                key = call.args[1], FORMATS[call.attrs["formats"][0]].kind, int(call.attrs["exact"])
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
            weights, biases = [c.args[2] for c in group], [b for c in group for b in c.args[3:]]
            merged = {key: [c.attrs[key][0] for c in group] for key in ("formats", "n", "biases")}
            self.fused[group[0]] = self.builder_.emit(ops.with_attrs(call, [state, x, *weights, *biases], **merged))
        return relax.TupleGetItem(self.fused[group[0]], i)


def fuse_siblings(mod):
    for gv, func in mod.functions.items():
        if isinstance(func, relax.Function):
            fuser = _Fuser(mod, _sibling_groups(func))
            mod[gv] = fuser.visit_expr(func)
    return relax.transform.DeadCodeElimination()(mod)
