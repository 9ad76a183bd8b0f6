"""The operators of a mixture of experts: the router, the order of rows by expert, the experts' layers and the sum of
their results.

In: a `Case`. Out: `Result`s. Rows of the operators in OF_SLOTS are slots as in schedules/operators/experts.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mlc_amd.schedules import operators as declared
from mlc_amd.schedules.operators import Operator
from mlc_amd.tools.reference import experts
from mlc_amd.tools.reference.case import Case, Result, rms

OF_SLOTS = (declared.Gather, declared.ExpertGateUp, declared.ExpertLinear)


def _chosen(c: Case, logits: np.ndarray) -> dict[str, Result]:
    a, count = c.op, c.op.experts
    options = {name: getattr(a, name) for name in ("gating", "normalize", "scale", "groups", "groups_used")}
    for name, key in (("bias", "B"), ("factors", "F")):
        options[name] = c.arrays[key][:count] if getattr(a, name) else None
    ids, factors = experts.route(logits, a.used, **options)
    return {"Ids": Result(ids, c.rows), "Weights": Result(factors, c.rows)}


def _route(c: Case) -> dict[str, Result]:
    return _chosen(c, c.arrays["L"][c.rows][:, : c.op.experts])


def _norm_route(c: Case) -> dict[str, Result]:
    a = c.op
    y = rms(c.arrays["X"][c.rows], a.eps) * c.arrays["G"][: a.k]
    logits = y @ c.matrix("W_", a.fmt, np.arange(a.experts)).T
    logits = logits + c.arrays["WB"][: a.experts] if a.router_bias else logits
    return {"": Result(y, c.rows)} | _chosen(c, logits)


def _expert_order(c: Case) -> dict[str, Result]:
    rows, a = np.arange(c.live), c.op
    tiles = len(c.arrays["Pairs"]) // a.tile
    slots, pairs, *groups = experts.order(c.arrays["Ids"][rows], a.experts, a.tile, tiles)
    return {"Slots": Result(slots, rows), "Pairs": Result(pairs), "Groups": Result(np.concatenate(groups))}


def used_slots(arrays: dict[str, np.ndarray], op: Any, live: int) -> np.ndarray:
    """The slots that have one of the live rows, from the parameters of an operator in OF_SLOTS."""
    if op.tile == 1:
        return np.arange(op.used * min(live, op.m))
    if "Pairs" in arrays:
        return np.flatnonzero(arrays["Pairs"] >= 0)
    tiles = arrays["Groups"].size - 2 * op.experts - 1
    first, numbers = arrays["Groups"][tiles : tiles + op.experts], arrays["Groups"][-op.experts :]
    tile = op.tile
    return np.concatenate([np.arange(n) + at * tile for at, n in zip(first, numbers, strict=True)])


def _of_slots(c: Case) -> np.ndarray:
    """The expert of each wanted slot."""
    groups = c.arrays["Groups"].reshape(-1)
    return groups[c.rows // c.op.tile]


def _gather(c: Case) -> dict[str, Result]:
    pairs = c.rows if c.op.tile == 1 else c.arrays["Pairs"][c.rows]
    x = c.arrays["X"][pairs // c.op.used].astype(np.float64)
    return {"": Result(x * c.arrays["Weights"].reshape(-1)[pairs, None] if c.op.weighted else x, c.rows)}


def _products(c: Case, x: np.ndarray, chosen: np.ndarray, prefix: str, fmt: str, bias: str, columns: np.ndarray):
    """Multiplies each row of x with these columns of its expert's matrix. Adds the expert's bias, if there is one
    (bias: its parameter)."""
    found = np.empty((len(x), len(columns)))
    for expert in np.unique(chosen):
        rows, places = chosen == expert, expert * c.op.n + columns
        found[rows] = x[rows] @ c.matrix(prefix, fmt, places).T + (c.arrays[bias][places] if bias else 0)
    return found


def _expert_gate_up(c: Case) -> dict[str, Result]:
    a, columns = c.op, c.pick(c.op.n)
    x, chosen = c.read(c.rows // a.used if a.shared else c.rows), _of_slots(c)
    both = (("G_", a.gate, "GB"), ("U_", a.up, "UB"))
    gate, up = (_products(c, x, chosen, p, fmt, b if a.biases else "", columns) for p, fmt, b in both)
    return {"": Result(experts.activate(a.act, gate, up), c.rows, columns)}


def _expert_linear(c: Case) -> dict[str, Result]:
    a, columns = c.op, c.pick(c.op.n)
    y = _products(c, c.read(c.rows), _of_slots(c), "W_", a.fmt, "WB" if a.bias else "", columns)
    return {"Y": Result(y, c.rows, columns)}


def _expert_down(c: Case) -> dict[str, Result]:
    a, columns = c.op, c.pick(c.op.n)
    slots = (c.rows[:, None] * a.used + np.arange(a.used)).reshape(-1)
    chosen, bias = c.arrays["Groups"].reshape(-1)[slots], "WB" if a.bias else ""
    y = _products(c, c.read(slots), chosen, "W_", a.fmt, bias, columns)
    y = y * c.arrays["Weights"].reshape(-1)[slots, None] if a.weighted else y
    y = y.reshape(len(c.rows), a.used, -1).sum(1)
    return {"Y": Result(y + c.arrays["R"][c.rows][:, columns] if a.residual else y, c.rows, columns)}


def _combine(c: Case) -> dict[str, Result]:
    a = c.op
    x = c.arrays["X"][c.arrays["Slots"][c.rows]][..., : a.n].astype(np.float64)
    y = (x * c.arrays["Weights"][c.rows][..., None] if a.weighted else x).sum(1)
    return {"": Result(y + c.arrays["R"][c.rows][:, : a.n] if a.residual else y, c.rows)}


OPERATORS: dict[type[Operator], Callable[[Case], dict[str, Result]]] = {
    declared.Route: _route, declared.NormRoute: _norm_route, declared.ExpertOrder: _expert_order,
    declared.Gather: _gather, declared.ExpertGateUp: _expert_gate_up, declared.ExpertLinear: _expert_linear,
    declared.ExpertDown: _expert_down, declared.Combine: _combine,
}  # fmt: skip
