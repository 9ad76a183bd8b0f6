"""Compares two kernels for the same work: their outputs on the same inputs must agree, within the error that another
order of operations causes.

Float32 and float16 outputs are compared relative to the largest output, the scale. Int8 activations may differ by one
step in a few places, and their scales and sums must match their own steps. Only defined values are compared: rows of
live tokens, or used slots, and the columns of the weight without padding.
"""

import numpy as np

from mlc_amd.runtime.measure.candidate import Candidate, Param
from mlc_amd.runtime.measure.inputs import BLOCK, SIGNATURE, routed_slots

# Tolerances as shares of the scale. Attention keeps probabilities in float16 or combines splits in another order;
# matrix units add in another order.
TOLERANCES = {"float32": 2e-4, "float16": 2e-3}
ATTENTION = 4e-3
INT8 = 3e-2  # for plans that convert activations to int8: three times the largest observed difference
# Share of int8 outputs that may differ by one step. Attention's outputs are rounded more often.
STEPS_APART, ATTENTION_APART = 0.02, 0.2
CODES = ("int8", "uint8")  # dtypes of int8 blocks and of quantized caches; uint8: two codes of 4 bits
CHANCE = 0.02  # share of outputs that may equal the fill pattern by chance


def differences(candidate: Candidate, state, expected: dict, found: dict) -> tuple[float, list[str]]:
    """Compares two runs' outputs, arrays by name. Returns (largest difference as share of the tolerance, errors)."""
    loose = "attention" in candidate.facts["workload"]["op"]
    live, worst, wrong = _live(candidate, state), 0.0, []
    outputs = {p.name: p for p in candidate.params if p.role in ("output", "cache")}
    for name, param in outputs.items():
        if param.dtype in CODES or (name.startswith("S") and f"A{name[1:]}" in outputs):
            continue
        if param.role == "output" and _unwritten(_used(param, found[name], live)):
            return np.inf, [f"{name} is not written everywhere"]
        allowed = max(INT8 if candidate.int8 else 0.0, _tolerance(param, loose))
        share = _floats(_used(param, expected[name], live), _used(param, found[name], live), allowed)
        worst = max(worst, share)
        if not share <= 1:
            wrong.append(f"{name} differs by {share:.3g} times what is allowed")
    for name in (name for name, param in outputs.items() if param.dtype in CODES):
        if outputs[name].role == "cache":
            steps = steps_apart(found[name], expected[name])  # one step apart where rounding differs
            worst, wrong = max(worst, steps), wrong + ([f"{name}: {steps:g} steps apart"] if steps > 1 else [])
            continue
        scales = f"S{name[1:]}"
        left, right = (_rows(run[name], run[scales], live) for run in (expected, found))
        apart, tolerance = (ATTENTION_APART, ATTENTION) if loose else (STEPS_APART, TOLERANCES["float32"])
        share, why = _int8(left, right, apart, tolerance)
        worst = max(worst, share)
        wrong += [f"{name}: {why}"] if why else []
    return worst, wrong


def steps_apart(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of the codes of two caches."""
    mask, shifts = (15, (0, 4)) if found.dtype == np.uint8 else (-1, (0,))
    apart = (np.abs(((found >> i) & mask).astype(np.int16) - ((expected >> i) & mask)) for i in shifts)
    return float(max(x.max() for x in apart))


def _live(candidate: Candidate, state) -> int:
    """The number of rows of the outputs that a call in this state writes."""
    _, live, single, _ = state
    answers = str(candidate.facts["workload"]["args"].get("rows", "all")).startswith("answers")
    return single + (single < live) if answers else live


def _tolerance(param: Param, loose: bool) -> float:
    return ATTENTION if loose and param.role == "output" else TOLERANCES.get(param.dtype, 0.0)


def _used(param: Param, array: np.ndarray, live: int) -> np.ndarray:
    """The defined part of an output. Of caches everything, as nothing may be written except for live tokens."""
    if param.role == "cache":
        return array
    if array.dtype == np.float16 and array.ndim == 3:  # the layout "lanes" of gpu/base/quantize.py: groups of blocks
        tiles, groups, size = array.shape
        array = array.reshape(tiles, groups, 4, 8, -1).transpose(0, 3, 1, 2, 4).reshape(tiles * 8, groups, size // 8)
    rows = array[: routed_slots(param.facts["experts"], live) if "experts" in param.facts else min(live, len(array))]
    return rows[..., : param.facts["columns"]] if "columns" in param.facts else rows


def _unwritten(array: np.ndarray) -> bool:
    """Whether too much of the output still has the fill pattern. Padding in the last group of columns may have it."""
    array = array[:, : max(1, array.shape[1] - 1)] if array.ndim == 3 else array
    return (array == np.full(array.itemsize, SIGNATURE, np.uint8).view(array.dtype)).mean() > CHANCE


def _floats(expected: np.ndarray, found: np.ndarray, tolerance: float) -> float:
    e, f = expected.astype(np.float64), found.astype(np.float64)
    if not np.isfinite(f).all() or not np.isfinite(e).all():
        return np.inf
    scale = np.abs(e).max()
    difference = np.abs(e - f).max()
    return difference / (tolerance * scale) if difference else 0.0


def _rows(a: np.ndarray, s: np.ndarray, live: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q [rows, KB, 32], d [rows, KB], sums [rows, KB, 3]) of the live rows, for either layout."""
    if a.ndim == 4:
        tiles, blocks, p, _ = a.shape
        a = a.transpose(0, 2, 1, 3).reshape(tiles * p, blocks, BLOCK)
        s = s.transpose(0, 3, 1, 2).reshape(tiles * p, blocks, 8)[..., [0, 1, 3, 4]]
    rows = min(live, len(a))
    return a[:rows].astype(np.int32), s[:rows, :, 0], s[:rows, :, 1:4]


def _int8(expected, found, apart: float, tolerance: float) -> tuple[float, str]:
    """Compares int8 activations. Returns (share of the tolerance, error message or "")."""
    (q0, d0, _), (q1, d1, sums) = expected, found
    scale = np.abs(d0).max()
    if not np.isfinite(d1).all() or not scale > 0:
        return np.inf, "its scales are not finite or all zero"
    scales = float(np.abs(d0 - d1).max() / (tolerance * scale))
    if scales > 1:
        return scales, f"scales differ by {scales:.3g} times what is allowed"
    steps = np.abs(q0 - q1)
    # a block of tiny numbers may be rounded in any way
    steps = np.where(np.abs(d0)[..., None] > 1e-3 * scale, steps, 0)
    if steps.max() > 1:
        return np.inf, f"{steps.max()} steps apart"
    share = float((steps > 0).mean() / apart)
    if share > 1:
        return share, f"{(steps > 0).mean():.1%} of it are a step apart"
    low, high = q1[..., :16].sum(-1), q1[..., 16:].sum(-1)
    own = d1[..., None] * np.stack([low + high, low, high], -1)
    if np.abs(own - sums).max() > 1e-4 * np.abs(d1).max() * BLOCK * 127:
        return np.inf, "its sums are not those of its steps"
    return max(share, scales), ""
