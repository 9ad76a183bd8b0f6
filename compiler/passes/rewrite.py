"""How a fusion pass rewrites: one rule, tried on every call of every Relax function, in order.

A rule gets the call (its arguments already rewritten) and `producer`, which gives the expression that a variable is
bound to, and returns the new expression or None. What a rewrite leaves unused goes away with dead code elimination.
`each_function`, `bound_in` and `readers_in` are for passes that must see a whole function before they rewrite it.
"""

from collections.abc import Callable
from typing import Any, cast

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mlc_amd.compiler.nodes import functions


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod, rule):
        super().__init__(mod)
        self.rule = rule

    def visit_call_(self, call):
        call = self.visit_expr_post_order(call)
        replacement = self.rule(call, self._producer)
        return call if replacement is None else replacement

    def _producer(self, value):
        return self.lookup_binding(value) if isinstance(value, relax.Var) else None


def bound_in(func: relax.Function) -> dict[Any, Any]:
    """Variable to what it is bound to, in a Relax function."""
    blocks: Any = func.body
    return {binding.var: binding.value for block in blocks.blocks for binding in block.bindings}


def readers_in(func: relax.Function) -> dict[Any, list]:
    """Variable to the values that read it, what the function returns among them; once for each time."""
    readers: dict[Any, list] = {}

    def note(value):
        relax.analysis.post_order_visit(
            value, lambda x: readers.setdefault(x, []).append(value) if isinstance(x, relax.Var) else None
        )

    body: Any = func.body
    for value in (*bound_in(func).values(), body.body):
        note(value)
    return readers


def each_function(mod: tvm.IRModule, rewritten: Callable[[relax.Function], Any]) -> tvm.IRModule:
    """Replaces every Relax function, and removes what is no longer used."""
    for gv, func in functions(mod).items():
        if isinstance(func, relax.Function):
            mod[gv] = rewritten(func)
    return relax.transform.DeadCodeElimination()(mod)


def rewrite(mod: tvm.IRModule, rule) -> tvm.IRModule:
    """Applies `rule(call, producer) -> Expr | None` to all calls and removes what is no longer used."""
    rewriter = _Rewriter(mod, rule)
    for gv, func in functions(mod).items():
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(gv, cast(relax.Function, rewriter.visit_expr(func)))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())
