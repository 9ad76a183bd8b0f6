"""Compares a kernel's results with those of operators.py. Out: the difference, and whether it is too large.

Differences of numbers are shares of the largest expected number. Kernels round: weights and activations of matrix
units, probabilities of attention, keys and values to float16; and they add in another order. Int8 activations are
compared as the numbers that they represent, after half a step is subtracted for rounding.
"""

from dataclasses import replace

import numpy as np

from mlc_amd.runtime.measure.candidate import WRITTEN
from mlc_amd.runtime.measure.compare import CODES, INT8, steps_apart
from mlc_amd.runtime.measure.inputs import SIGNATURE
from mlc_amd.schedules.operators import Operator
from mlc_amd.schedules.operators.layouts import kind_of
from mlc_amd.tools.reference import activations
from mlc_amd.tools.reference.case import Result

# Allowed difference as a share of the largest number: about four times the differences observed on CPUs, Mesa's CPU
# driver and an NVIDIA GPU. A wrong index, scale or constant causes much larger differences.
TOLERANCE = 4e-3
CACHE = 1e-3  # the same for float16 keys and values


def difference(
    op: Operator, params: list[dict], found: dict, expected: dict[str, Result], int8: bool = False
) -> tuple[float, str]:
    """(largest difference as a share of the tolerance, description of an error or ""). params: of the kernel, as in the
    manifest. found: its outputs and caches by name, as arrays. int8: whether its plan converts activations to int8."""
    worst, wrong, names = 0.0, "", {param["name"] for param in params}
    for param in params:
        name = param["name"]
        if param["role"] not in WRITTEN or (name[0] == "S" and "A" + name[1:] in names):
            continue
        suffix = name[1:]
        with np.errstate(invalid="ignore", over="ignore"):  # results of a wrong kernel may be any numbers
            if param["dtype"] in CODES and param["role"] == "cache":
                # The codes differ by one step where a number is rounded to the other side.
                share, why = steps_apart(found[name], expected[name].value) if name in expected else 0.0, ""
            elif param["dtype"] == "int8":
                share, why = _int8(found[name], found["S" + suffix], expected[""])
            else:
                wanted = expected_of(param, expected)
                layout = getattr(op, "layout", "") if param["dtype"] == "float16" else ""
                share, why = (0.0, "") if wanted is None else _numbers(param, found[name], wanted, layout, int8)
        if not share <= 1 and not wrong:
            wrong = f"{name}: {why}" if why else f"{name} differs by {share:.3g} times what is allowed"
        worst = max(worst, share if share == share else np.inf)
    return worst, wrong


def expected_of(param: dict, expected: dict[str, Result]) -> Result | None:
    """The expected result for an output, a cache or states; None if the operator does not write it."""
    return expected.get(param["name"]) or (expected.get("") if param["role"] == "output" else None)


def _picked(array: np.ndarray, wanted: Result) -> np.ndarray:
    rows = array if wanted.rows is None else array[wanted.rows]
    return rows[..., : wanted.value.shape[-1]] if wanted.columns is None else rows[..., wanted.columns]


def _numbers(param: dict, array: np.ndarray, wanted: Result, layout: str, int8: bool) -> tuple[float, str]:
    if kind_of(layout) in ("pairs", "lanes") and param["role"] == "output":
        array, wanted = activations.read(layout, {"H": array}, rows=wanted.rows), replace(wanted, rows=None)
    found, expected = _picked(array, wanted), wanted.value
    if np.issubdtype(array.dtype, np.integer):
        apart = int((found != expected).sum())
        return (np.inf, f"{apart} of {expected.size} numbers are wrong") if apart else (0.0, "")
    pattern = np.full(found.itemsize, SIGNATURE, np.uint8).view(found.dtype)
    # more of the pattern is left than chance explains
    if param["role"] == "output" and (found == pattern).mean() > 0.01:
        return np.inf, "it is not written everywhere"
    return _share(found, expected, CACHE if param["role"] == "cache" else INT8 if int8 else TOLERANCE)


def _share(found: np.ndarray, expected: np.ndarray, tolerance: float) -> tuple[float, str]:
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    if not np.isfinite(found).all():
        return np.inf, "it has numbers that are not finite"
    scale = max(np.abs(expected).max(), 1e-30)
    return float(np.abs(found - expected).max() / (tolerance * scale)), ""


def _int8(a: np.ndarray, s: np.ndarray, wanted: Result) -> tuple[float, str]:
    q, d, sums = activations.quantized(a, s)
    expected = wanted.value.astype(np.float64).reshape(len(wanted.value), -1, activations.BLOCK)
    columns = np.arange(expected.shape[1]) if wanted.columns is None else wanted.columns[:: activations.BLOCK] // 32
    q, d, sums = (x[wanted.rows][:, columns] for x in (q, d.astype(np.float64), sums))
    if not (np.isfinite(d).all() and np.isfinite(sums).all()):
        return np.inf, "its scales are not finite"
    scale = max(np.abs(expected).max(), 1e-30)
    steps = np.abs(d - np.abs(expected).max(-1) / 127).max() * 127
    beyond = (np.abs(q * d[..., None] - expected) - 0.5 * d[..., None]).max()
    low, high = q[..., :16].sum(-1), q[..., 16:].sum(-1)
    own = d[..., None] * np.stack([low + high, low, high], -1)
    if np.abs(own - sums).max() > 1e-4 * np.abs(d).max() * activations.BLOCK * 127:
        return np.inf, "its sums are not those of its numbers"
    return float(max(steps, beyond, 0) / (TOLERANCE * scale)), ""
