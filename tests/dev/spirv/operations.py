"""What SPIR-V's instructions without memory compute, for all lanes of a wave at once: the arithmetic of
`emulator.py`.

Values are NumPy arrays: [lanes] of scalars, [elements, lanes] of vectors, [components, lanes] of cooperative matrices;
constants have one lane or none. Integers are signed, as our modules declare no other.
"""

from functools import cache

import numpy as np

from mlc_amd.compiler.codegen.spirv.opcodes import GLSL
from tests.dev.spirv.shared import Fault

FUNCTIONS = {number: name for name, number in GLSL.items()}
QUADS = 4  # lanes that share a row of operand A, or a column of operand B


def unsigned(x):
    return np.asarray(x).view(f"uint{np.asarray(x).itemsize * 8}")


def signed(x):
    return np.asarray(x).view(f"int{np.asarray(x).itemsize * 8}")


def _truncated_quotient(a, b):
    a, b = np.asarray(a), np.asarray(b)
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return np.where((a < 0) ^ (b < 0), -quotient, quotient).astype(a.dtype)


def _shifted(a, b, way):
    return signed(way(unsigned(a), unsigned(b)))


def _field(base, offset, count):
    """(the bits of a field moved to the bottom, ones of its width)."""
    ones = (1 << int(count)) - 1
    return unsigned(base) >> np.uint32(offset) & np.uint32(ones), ones


def _extracted(base, offset, count, sign):
    found, ones = _field(base, offset, count)
    value = signed(found.astype(np.uint32))
    return np.where(value > ones >> 1, value - (ones + 1), value).astype(np.int32) if sign else value


def _inserted(base, insert, offset, count):
    ones = np.uint32(((1 << int(count)) - 1) << int(offset))
    return signed(unsigned(base) & ~ones | unsigned(insert) << np.uint32(offset) & ones)


def _bytes(x):
    return np.ascontiguousarray(x)[..., None].view(np.int8).astype(np.int32)


OPERATIONS = {
    "IAdd": np.add, "FAdd": np.add, "ISub": np.subtract, "FSub": np.subtract, "IMul": np.multiply, "FMul": np.multiply,
    "FDiv": np.divide, "SDiv": _truncated_quotient, "FRem": np.fmod, "FNegate": np.negative,
    "UDiv": lambda a, b: signed(unsigned(a) // np.maximum(unsigned(b), 1)),
    "UMod": lambda a, b: signed(unsigned(a) % np.maximum(unsigned(b), 1)),
    "MatrixTimesScalar": np.multiply,
    "LogicalEqual": np.equal, "LogicalNotEqual": np.not_equal, "LogicalOr": np.logical_or,
    "LogicalAnd": np.logical_and, "LogicalNot": np.logical_not, "Select": np.where,
    "IEqual": np.equal, "INotEqual": np.not_equal, "SGreaterThan": np.greater, "SGreaterThanEqual": np.greater_equal,
    "SLessThan": np.less, "SLessThanEqual": np.less_equal,
    "UGreaterThan": lambda a, b: unsigned(a) > unsigned(b),
    "UGreaterThanEqual": lambda a, b: unsigned(a) >= unsigned(b),
    "ULessThan": lambda a, b: unsigned(a) < unsigned(b), "ULessThanEqual": lambda a, b: unsigned(a) <= unsigned(b),
    "FOrdEqual": np.equal, "FUnordNotEqual": np.not_equal, "FOrdLessThan": np.less, "FOrdGreaterThan": np.greater,
    "FOrdLessThanEqual": np.less_equal, "FOrdGreaterThanEqual": np.greater_equal,
    "ShiftLeftLogical": lambda a, b: _shifted(a, b, np.left_shift),
    "ShiftRightLogical": lambda a, b: _shifted(a, b, np.right_shift), "ShiftRightArithmetic": np.right_shift,
    "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor, "BitwiseAnd": np.bitwise_and, "Not": np.invert,
    "BitFieldInsert": _inserted,
    "BitFieldSExtract": lambda base, offset, count: _extracted(base, offset, count, True),
    "BitFieldUExtract": lambda base, offset, count: _extracted(base, offset, count, False),
    "BitCount": lambda a: np.bitwise_count(unsigned(a)).astype(np.int32),
    "SDot": lambda a, b: (_bytes(a) * _bytes(b)).sum(-1, dtype=np.int32),
}  # fmt: skip

CONVERSIONS = {
    "ConvertFToS": lambda x, to: np.trunc(x).astype(to),
    "ConvertFToU": lambda x, to: signed(np.trunc(x).astype(f"uint{to.itemsize * 8}")),
    "ConvertSToF": lambda x, to: x.astype(to),
    "ConvertUToF": lambda x, to: unsigned(x).astype(to),
    "UConvert": lambda x, to: signed(unsigned(x).astype(f"uint{to.itemsize * 8}")),
    "SConvert": lambda x, to: x.astype(to),
    "FConvert": lambda x, to: x.astype(to),
}


def _exact(a, b, c):
    """float32 of the product and sum in float64: rounded once, but for cases that do not matter."""
    kind = np.asarray(a).dtype
    return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(kind)


def _packed_halves(x):
    return bits_as(np.asarray(x).astype(np.float16), np.dtype(np.int32), 1)


EXTENDED = {
    "RoundEven": np.rint, "Trunc": np.trunc, "FAbs": np.abs, "Floor": np.floor, "Ceil": np.ceil, "Sin": np.sin,
    "Cos": np.cos, "Tanh": np.tanh, "Pow": np.power, "Exp": np.exp, "Log": np.log, "Exp2": np.exp2, "Log2": np.log2,
    "Sqrt": np.sqrt, "InverseSqrt": lambda x: (1 / np.sqrt(x)).astype(np.asarray(x).dtype), "FMin": np.fmin,
    "FMax": np.fmax, "NMin": np.fmin, "NMax": np.fmax, "SMin": np.minimum, "SMax": np.maximum,
    "UMin": lambda a, b: signed(np.minimum(unsigned(a), unsigned(b))),
    "UMax": lambda a, b: signed(np.maximum(unsigned(a), unsigned(b))), "Fma": _exact, "PackHalf2x16": _packed_halves,
    "UnpackHalf2x16": lambda x: bits_as(x, np.dtype(np.float16), 2).astype(np.float32),
}  # fmt: skip

REDUCTIONS = {
    "IAdd": lambda x: x.sum(dtype=x.dtype), "FAdd": lambda x: x.sum(dtype=x.dtype), "SMin": np.min, "FMin": np.min,
    "SMax": np.max, "FMax": np.max, "UMin": lambda x: signed(unsigned(x).min()),
    "UMax": lambda x: signed(unsigned(x).max()),
}  # fmt: skip


def bits_as(x, to: np.dtype, count: int):
    """The bits of a scalar or a vector as `count` elements of another type."""
    x = np.asarray(x)
    rows = np.atleast_1d(x)[None] if x.ndim < 2 else x
    found = np.ascontiguousarray(rows.T).view(to)
    return found[:, 0] if count == 1 else found.T


# ---- cooperative matrices


@cache
def components(shape: tuple[int, int, int], lanes: int, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """(row, column), [components, lanes], of what each lane has of a matrix (rows, columns, use).

    unit: whose distribution it is, on which kernels rely (`DeviceKind.lane_unit`). "wmma11" and "wmma12": of 16 x 16
    matrices as Mesa's driver has it on GPUs of RDNA3 and RDNA4. Else of 16 x 16 operands A, 16 x 8 operands B and
    16 x 8 sums as NVIDIA's driver has it. Of other matrices it must not matter.
    """
    rows, columns, use = shape
    e, lane = np.arange(rows * columns // lanes)[:, None], np.arange(lanes)
    if unit in ("wmma11", "wmma12") and lanes == 32 and shape[:2] == (16, 16):
        half, own = lane // 16, lane % 16
        if unit == "wmma12":
            along = 8 * half + e
        elif use == 2:
            along = 2 * e + half
        else:  # both halves of the wave have all of it
            along = np.arange(16)[:, None] + 0 * lane
        return (own + 0 * along, along) if use == 0 else (along, own + 0 * along)
    row, quad = lane // QUADS, lane % QUADS
    if lanes == 32 and shape == (16, 16, 0):
        return row + e // 4 * 8, quad * 2 + e % 2 + e // 2 % 2 * 8
    if lanes == 32 and shape == (16, 8, 1):
        return quad * 2 + e % 2 + e // 2 * 8 + row * 0, row + e * 0
    if lanes == 32 and shape == (16, 8, 2):
        return row + e // 2 * 8, quad * 2 + e % 2
    place = e * lanes + lane
    return place // columns, place % columns


def whole(value, shape, places) -> np.ndarray:
    """[rows, columns] of a matrix's components."""
    matrix = np.empty(shape[:2], value.dtype)
    matrix[places] = value
    if not np.array_equal(matrix[places], value, equal_nan=True):
        raise Fault("lanes have different values of a matrix's component")
    return matrix


def product(a, b, c, shapes, lanes, unit) -> np.ndarray:
    """The components of A B + C."""
    places = [components(shape, lanes, unit) for shape in shapes]
    left, right = (whole(x, *of).astype(np.float64) for x, *of in zip((a, b), shapes[:2], places[:2], strict=True))
    sums = (left @ right)[places[2]] + c
    return sums.astype(np.asarray(c).dtype)
