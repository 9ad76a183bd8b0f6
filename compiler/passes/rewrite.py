"""How a fusion pass rewrites: one rule, tried on every call of every Relax function, in order. What a rewrite leaves
unused stays until dead code is eliminated, which passes that see whole functions need before them.

`rewrite` is for rules that look at a call and at what it reads; `rewrite_functions` for those that must see a whole
function (`bound_in`, `readers_in`) before they rewrite it.
"""

from collections.abc import Callable
from typing import Any

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
        made = self.rule(call, self)
        return super().visit_call_(call) if made is None else made


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


def rewrite_functions(mod: tvm.IRModule, rule_of: Callable[[relax.Function], Callable]) -> tvm.IRModule:
    """Applies rule_of(function)(call, rewriter) -> Expr | None to all calls of each Relax function. The call's
    arguments are as they were: `rewriter.visit_expr` rewrites them, `rewriter.builder_` emits further values."""
    made = mod.clone()
    for gv, func in functions(mod).items():
        if isinstance(func, relax.Function):
            made[gv] = _Rewriter(mod, rule_of(func)).visit_expr(func)
    return made


def rewrite(mod: tvm.IRModule, rule: Callable) -> tvm.IRModule:
    """Applies rule(call, producer) -> Expr | None to all calls. The call's arguments are already rewritten; `producer`
    gives the expression that a variable is bound to."""

    def apply(call, rewriter):
        call = rewriter.visit_expr_post_order(call)
        made = rule(call, lambda value: rewriter.lookup_binding(value) if isinstance(value, relax.Var) else None)
        return call if made is None else made

    return rewrite_functions(mod, lambda func: apply)
