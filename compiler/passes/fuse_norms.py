"""Fuses norms into the linears and exchanges before and after them: `fuse_norm_linear` and `defer_norms`."""

from dataclasses import replace
from typing import Any, NamedTuple, cast

from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.nodes import parts_of
from mlc_amd.compiler.passes.rewrite import bound_in, readers_in, rewrite_functions
from mlc_amd.schedules.operators import AllReduce, GateUp, Linear, NormPlace, Operator, RmsNorm
from mlc_amd.schedules.operators.layouts import kind_of


def _reads_norms(value) -> bool:
    """Whether a value is a call whose kernel can compute or complete the norm of its input."""
    return isinstance(ops.operator_of(value), (Linear, GateUp))


def _is_norm(value) -> bool:
    """Whether a value is an rms_norm of all rows with one result."""
    op = ops.operator_of(value)
    return isinstance(op, RmsNorm) and op.rows == "all" and not op.both


def _norms_of_readers(func, target) -> dict[relax.Call, relax.Call]:
    """{reader: norm} for the linears and gate_ups that compute the norm of their input themselves."""
    bound, readers = bound_in(func), readers_in(func)
    return {
        reader: norm
        for var, norm in bound.items()
        if _is_norm(norm) and _place(_maker(bound, norm.args[1]), readers.get(var, ()), target) == "computed"
        for reader in readers.get(var, ())
    }


def _maker(bound, var) -> Any:
    """The call that computes a variable. If the variable is the sum of an exchange: this exchange."""
    value = bound.get(var)
    if isinstance(value, relax.TupleGetItem) and value.index == 0:
        call = bound.get(value.tuple_value)
        return call if isinstance(ops.operator_of(call), AllReduce) else value
    return value


def _place(before, readers, target) -> NormPlace:
    """Where a norm is computed. before: the call that computes the norm's input. readers: what reads the norm."""
    if not all(map(_reads_norms, readers)):
        return "launch"
    op: Any = ops.operator_of(before)
    single = isinstance(op, AllReduce) or (isinstance(op, Linear) and len(op.segments) == 1)
    return target.norm_place(op if single else None, [ops.operator_of(reader) for reader in readers])


def fuse_norm_linear(mod, target):
    """linear(rms_norm(x)), or gate_up(rms_norm(x)), becomes one operator that computes the norm itself, for targets
    with such kernels. Only done if all readers of the norm can compute it, so that the norm's own launch disappears."""

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


class _Deferred(NamedTuple):
    """A norm that is deferred. norm: its call. layout: the layout in which it is prepared. scaled_by: for the layout
    "lanes", the call that returns the scales of the norm before; None for other layouts."""

    norm: Any
    layout: str
    scaled_by: Any


class _Plan(NamedTuple):
    """prepared: {linear or exchange: the norm that it prepares}. completed: {reader: the norm that it completes}.
    scaling: the norms that keep their launch and also return their scales."""

    prepared: dict[relax.Call, _Deferred]
    completed: dict[relax.Call, _Deferred]
    scaling: set[relax.Call]


def _plan(func, target) -> _Plan:
    bound, readers = bound_in(func), readers_in(func)
    variable: dict[Any, Any] = {value: var for var, value in bound.items()}
    prepared, completed = {}, {}
    last: dict[tuple, Any] = {}  # (rows, columns) of a norm's input: the last call that can return scales for it

    def completes(norm, before) -> list:
        """The readers of `norm`, whose input the call `before` computes, if all of them complete it; else []."""
        var = variable[norm]
        found = readers.get(var, [])
        able = _place(before, found, target) == "deferred" and all(reader.args[1].same_as(var) for reader in found)
        return found if able and len(set(found)) == len(found) else []

    for var in bound:
        value = _maker(bound, var)
        if value in completed:
            last[_rows(completed[value].norm)] = value
        elif _is_norm(value) and not any(value.same_as(deferred.norm) for deferred in prepared.values()):
            last[_rows(value)] = value
        else:
            for norm in filter(_is_norm, readers.get(var, ())):
                if not norm.args[1].same_as(var) or not (completing := completes(norm, value)):
                    continue
                layout = cast(Linear, ops.operator_of(completing[0])).layout_read
                scaled_by = last.get(_rows(norm)) if kind_of(layout) == "lanes" else None
                if kind_of(layout) != "lanes" or scaled_by is not None:
                    prepared[value] = deferred = _Deferred(norm, layout, scaled_by)
                    completed |= dict.fromkeys(completing, deferred)
                    break
    scaling = {deferred.scaled_by for deferred in prepared.values() if _is_norm(deferred.scaled_by)}
    return _Plan(prepared, completed, scaling)


def _op(call, **changes: Any) -> Operator:
    op: Any = ops.operator_of(call)
    return replace(op, **changes)


def _joined(parts: list) -> relax.Expr:
    return relax.Tuple(list[relax.Expr](parts)) if len(parts) > 1 else parts[0]


def _rows(norm) -> tuple:
    return tuple(ops.shape_of(norm.args[1]))


class _Deferrer:
    def __init__(self, plan: _Plan):
        self.plan = plan
        self.scales = {}  # call: the scales that it returns
        self.made = {}  # norm: what the linear or exchange before it prepared, x * g and sums of squares

    def __call__(self, call, rewriter):
        plan, visit = self.plan, rewriter.visit_expr

        def emit(op: Operator, args) -> list:
            """Emits a call. Returns the parts of its result."""
            var = rewriter.builder_.emit(ops.call(op, args))
            return [rewriter.builder_.emit(relax.TupleGetItem(var, i)) for i in range(len(parts_of(var.ty)))]

        if call in plan.prepared:
            norm, layout, scaled_by = plan.prepared[call]
            args = map(visit, [*call.args, norm.args[2]])
            made = emit(_op(call, norm_out=layout), [*args, *self._scales(scaled_by)])
            own = len(cast(Operator, ops.operator_of(call)).results())
            self.made[norm] = made[own:]
            return _joined(made[:own])
        if call in plan.completed:
            norm, _, scaled_by = plan.completed[call]
            *x, squares = self.made[norm]
            state, _, *rest = call.args
            given = [*(x if len(x) == 1 else [relax.Tuple(x)]), squares, *self._scales(scaled_by)]
            op, args = _op(call, norm_in=cast(RmsNorm, ops.operator_of(norm)).eps), [visit(state), *given]
            args += map(visit, rest)
            if scaled_by is None:
                return ops.call(op, args)
            *parts, self.scales[call] = emit(op, args)
            return _joined(parts)
        if call in plan.scaling:
            y, self.scales[call] = emit(_op(call, scale_out=True), map(visit, call.args))
            return y
        return None

    def _scales(self, scaled_by) -> list:
        return [] if scaled_by is None else [self.scales[scaled_by]]


def defer_norms(mod, target):
    """Removes the launch of an rms_norm between linears of few tokens, for targets with such kernels: the linear that
    computes the norm's input, or the exchange that adds it up, prepares the norm, and its readers complete it
    (schedules/gpu/linear/deferred_norm.py).

    A norm that is prepared in the layout "lanes" is scaled like the norm before it on the same residual stream. So the
    first norm of a function keeps its launch and returns its scales; every call that completes a norm returns the
    scales for the next norm.
    """
    return rewrite_functions(mod, lambda func: _Deferrer(_plan(func, target)))
