"""Random weights for an artifact without weights: the distribution of each plane of a matrix.

In: a format and the number of the matrix's columns. Out: {plane: draw}, which `mlc_amd.runtime.artifact.random_weights`
reads from the manifest. The decoded weights have mean 0 and standard deviation 1/sqrt(columns), so that activations
keep their magnitude from layer to layer.
"""

from bisect import bisect
from collections.abc import Sequence
from math import sqrt
from statistics import fmean

from mlc_amd.schedules.formats import PLANE_BITS, Format, lookup

# (lowest, count) of the values of sub-scales S and sub-minimums Z that `blocks` decodes
_SUB_SCALES = {
    "q3_k": (-32, 64), "q4_k": (0, 64), "q5_k": (0, 64), "q6_k": (-128, 256), "iq4_xs": (-32, 64),
    "iq1_s": (0, 16), "iq1_m": (0, 16), "iq2_xxs": (0, 32), "iq2_xs": (0, 32), "iq2_s": (0, 32), "iq3_xxs": (0, 32),
    "iq3_s": (0, 32),
}  # fmt: skip
_NIBBLES = (0, 16)  # q2_k: S holds a sub-scale and a sub-minimum
# The value of each byte of a minifloat format, ascending; see `mlc_amd.schedules.decode`
_MINIFLOATS = {
    "e8m0": [2.0 ** (byte - 128) for byte in range(256)],
    "e5m3": [0.0] * 8 + [(8 + byte % 8) * 2.0 ** (byte // 8 - 18) for byte in range(8, 256)],
}


def draws(fmt: str | Format, columns: int) -> dict[str, list]:
    """{plane: draw} of a matrix with that many columns."""
    fmt = lookup(fmt)
    deviation = 1 / sqrt(columns)
    if fmt.kind == "float":
        return {"W": ["normal", deviation]}
    values = _values(fmt)
    drawn = {plane: ["bits"] for plane in fmt.codes}
    if fmt.minifloat:
        return drawn | {"S": ["either", *either(_MINIFLOATS[fmt.minifloat], deviation / sqrt(_mean_square(values)))]}
    scales = range(1, 2)
    if "S" in fmt.scales:
        low, count = _NIBBLES if fmt.nibble_scales else _SUB_SCALES[fmt.name]
        scales = range(low, low + count)
    square = _mean_square(values) * _mean_square(scales)
    minimum = 0.0  # factor of the minimums, chosen so that the mean of the weights is 0
    if fmt.minimum == "M":
        minimum = -fmean(values)
        square -= minimum**2
    elif fmt.minimum == "DM":  # sub-minimums are drawn like sub-scales
        minimum = fmean(values)
        square += minimum**2 * (_mean_square(scales) - 2 * fmean(scales) ** 2)
    factor = deviation / sqrt(square) / fmt.unit
    sub = ["bits"] if fmt.nibble_scales else ["integers", scales[0], len(scales)]
    return drawn | {
        plane: {"S": sub, "Z": sub}.get(plane, ["signs", factor * (1.0 if plane == "D" else minimum)])
        for plane in fmt.scales
    }


def either(numbers: Sequence[float], deviation: float) -> tuple[int, float]:
    """(index, share) so that two neighbouring numbers have the root mean square `deviation`: numbers[index + 1] with a
    probability of `share`, else numbers[index]. numbers: ascending."""
    low = min(bisect(numbers, deviation), len(numbers) - 1) - 1
    below, above = numbers[low] ** 2, numbers[low + 1] ** 2
    return low, (deviation**2 - below) / (above - below)


def _values(fmt: Format) -> list[int]:
    """The values of the codes, which are equally probable."""
    if fmt.table:
        return list(fmt.table)
    bits = sum(PLANE_BITS[plane] for plane in fmt.codes)
    return list(range(-128, 128)) if fmt.signed else [code - fmt.zero for code in range(1 << bits)]


def _mean_square(values) -> float:
    return fmean(v * v for v in values)
