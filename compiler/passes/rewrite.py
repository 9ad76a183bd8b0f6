"""How fusion passes rewrite: a rule is tried on every call of every Relax function, in order. Values that become unused
stay until dead code elimination; passes that look at whole functions need it to run before them.

`rewrite` is for rules that look at a call and at the values that it reads. `rewrite_functions` is for rules that look
at a whole function first (`bound_in`, `readers_in`).
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
    """{variable: the value that it is bound to} of a Relax function."""
    blocks: Any = func.body
    return {binding.var: binding.value for block in blocks.blocks for binding in block.bindings}


def readers_in(func: relax.Function) -> dict[Any, list]:
    """{variable: the values that read it} of a Relax function. The returned value is a reader too. A value that reads a
    variable twice is listed twice."""
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
    """Applies rule_of(function)(call, rewriter) -> Expr | None to all calls of each Relax function; None leaves the
    call as it is. The arguments of the call are not rewritten yet: `rewriter.visit_expr` rewrites them.
    `rewriter.builder_` emits further values."""
    made = mod.clone()
    for gv, func in functions(mod).items():
        if isinstance(func, relax.Function):
            made[gv] = _Rewriter(mod, rule_of(func)).visit_expr(func)
    return made


def rewrite(mod: tvm.IRModule, rule: Callable) -> tvm.IRModule:
    """Applies rule(call, producer) -> Expr | None to all calls; None leaves the call as it is. The arguments of the
    call are already rewritten. producer(value): the expression to which a variable is bound."""

    def apply(call, rewriter):
        call = rewriter.visit_expr_post_order(call)
        made = rule(call, lambda value: rewriter.lookup_binding(value) if isinstance(value, relax.Var) else None)
        return call if made is None else made

    return rewrite_functions(mod, lambda func: apply)
