"""Decodes weights to float16, for matrix units and every format. In: planes (layout "rows": `planes.py`). Out: runs of
eight float16 in the order of columns of `quantize.py`.

The unit of work is `span` neighbouring blocks of 32 columns of a row. Loading and decoding are separate functions, so
that the loads of one step can be in flight while the step before is multiplied:

    fetch       emits the global loads of a unit, from `load.views`
    runs        decodes a loaded unit to runs of eight float16 weights
    decoder     the same for formats with codes, one run at a time

Arithmetic is packed float16. A code in the low bits of 0x6400 reads as 1024 + code; subtracting 1024 and the code that
means 0 is exact. A nibble may also stay in bits 4 to 7 of 0x5400, which reads as 64 + code. The magnitudes of FP4 are
decoded like this, too, and get their signs afterwards. The scale of a group of columns is computed in float32 and
rounded once, and so is its minimum; value * scale + minimum is rounded once more. The total error is below 1 % of a
quantization step.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import FP4_VALUES, PLANE_BITS, Format
from mlc_amd.schedules.gpu.base.device import fma, intrin
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import RUN, RUN_COLUMNS, RUNS
from mlc_amd.schedules.gpu.base.registers import at, chosen, elements, lane_of, opaque, vector
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.tir import Expr

Fetched = load.Unit | list[Expr]  # a loaded unit of codes, or loaded float columns
Words = Mapping[str, Sequence[Expr]]  # {code plane: its words}

EXPONENT = 0x64006400  # of 1024.0 as float16, in both halves of a word
EXPONENT_VALUE = 1024
HIGH_EXPONENT = 0x54005400  # of 64.0, whose bits 4 to 7 count ones
HIGH_EXPONENT_VALUE = 64
EXPONENTS = EXPONENT, HIGH_EXPONENT
SIGNS = 0x80008000  # the sign bits of two float16
PAIRS = 0x05020500, 0x05030501  # byte selectors: bytes 0 and 2 (1 and 3) of a word, below bytes of EXPONENT


def fetch(fmt: Format, planes: Planes, row: Expr, unit: Expr, span: int) -> Fetched:
    """Loads unit number `unit` of a row into registers."""
    if fmt.kind != "float":
        return load.fetch(fmt, planes, row, unit, span)
    width, count = 4 if fmt.name == "f32" else RUN, span * BLOCK
    return [T.Bind(planes["W"][row, at(unit * count + first, width)]) for first in range(0, count, width)]


def runs(arch: Device, fmt: Format, fetched: Fetched, span: int) -> list[Expr]:
    """The runs 0 to 3 of each block of a loaded unit, as float16x8 registers."""
    if isinstance(fetched, list):
        columns = _columns(fmt, fetched)
        return [_run(columns[b * BLOCK : (b + 1) * BLOCK], j) for b in range(span) for j in range(RUNS)]
    decoders = [decoder(arch, fmt, fetched, b) for b in range(span)]
    return [run(j) for run in decoders for j in range(RUNS)]


def _columns(fmt: Format, fetched: Sequence[Expr]) -> list[Expr]:
    return [half for x in fetched for half in _halves(fmt, x)]


def _run(columns: Sequence[Expr], j: int) -> Expr:
    return T.Bind(vector([columns[c] for c in RUN_COLUMNS[j]]))


def _halves(fmt: Format, x: Expr) -> list[Expr]:
    """The elements of a loaded vector of a float format as float16."""
    parts = elements(x)
    if fmt.name == "bf16":
        parts = [load.real(fmt, part) for part in parts]
    return parts if fmt.name == "f16" else [T.cast(part, "float16") for part in parts]


def hidden(zero: Expr) -> tuple[Expr, ...]:
    """EXPONENTS in registers, as values that the compiler does not know. zero: an int32 that is 0, which it does not
    know either."""
    return tuple(T.Bind(opaque(T.cast(zero, "uint32") + T.uint32(bits))) for bits in EXPONENTS)


def decoder(
    arch: Device, fmt: Format, fetched: Fetched, block: int = 0, exponents: Sequence[Expr] = EXPONENTS
) -> Callable[[Expr], Expr]:
    """Returns run(j), which decodes run number j of a block of a loaded unit to float16x8. j: an int; for formats with
    codes it may be a register. exponents: those of `hidden`, or constants."""
    if isinstance(fetched, list):
        columns = _columns(fmt, fetched)
        return lambda j: _run(columns, j)
    exponents = [T.uint32(bits) if isinstance(bits, int) else bits for bits in exponents]
    scales = load.scales(fmt, fetched, block)
    words, permutes = load.block_words(fetched, block), arch.api == "rocm"
    factors, minimums = scales.factors(), None
    if fmt.table == FP4_VALUES and permutes:
        pairs = _per_pair(factors)
        return lambda j: T.Bind(T.reinterpret("float16x8", vector(_fp4(words["Q4"][j]))) * pairs)
    codes, zero, signs = _unsigned(arch, fmt, words)
    if fmt.minimum:
        # counted from the middle of the codes, so that rounding the scale moves the outermost weights least
        zero = 1 << (sum(PLANE_BITS[plane] for plane in codes) - 1)
        pairs = zip(factors, scales.lows(), strict=True)
        minimums = _per_pair([factor * T.float32(zero) + low for factor, low in pairs])
    factors = _per_pair(factors)

    nibbles = list(codes) == ["Q4"]
    whole = load.bytes_of(codes) if permutes and not nibbles else None
    offsets = [HIGH_EXPONENT_VALUE if nibbles and t % 2 else EXPONENT_VALUE for t in range(RUN // 2)]
    zeros = vector([T.float16(offsets[i // 2] + zero) for i in range(RUN)])

    def run(j: Expr) -> Expr:
        if nibbles:
            bits = _nibbles(codes["Q4"], j, exponents)
        elif whole:
            bits = [_permuted(exponents[0], whole[j + RUNS * half], pair) for pair in PAIRS for half in range(2)]
        else:
            bits = [_fields(codes, j, t, exponents[0]) for t in range(RUN // 2)]
        value = T.reinterpret("float16x8", vector(bits)) - zeros
        if signs:
            value = _signed(value, chosen(signs, j))
        return fma(value, factors, minimums) if fmt.minimum else T.Bind(value * factors)

    return run


def _unsigned(arch: Device, fmt: Format, codes: Words) -> tuple[Words, int, Sequence[Expr] | None]:
    """({plane: words of unsigned codes}, the code that means 0, words of nibbles whose highest bits are signs or
    None)."""
    if fmt.table == FP4_VALUES:
        return {"Q4": [load.fp4_magnitudes(word) for word in codes["Q4"]]}, 0, codes["Q4"]
    if fmt.table:
        return {"Q8": load.values(arch, fmt, None, lambda: load.bytes_of(codes), 0x80)}, 128, None
    if fmt.signed:
        return {"Q8": [T.Bind(word ^ T.uint32(load.SIGN)) for word in codes["Q8"]]}, 128, None
    return codes, fmt.zero, None


def _signed(value: Expr, nibbles: Expr) -> Expr:
    """A run whose values are negated if the highest bit of their nibbles is set. nibbles: in the order of
    `_nibbles`."""
    words = T.Bind(T.reinterpret("uint32x4", value))
    signs = [T.shift_left(nibbles, T.uint32(12 - 4 * t)) & T.uint32(SIGNS) for t in range(RUN // 2)]
    return T.reinterpret("float16x8", T.Bind(vector([lane_of(words, t) ^ sign for t, sign in enumerate(signs)])))


def _per_pair(values: Sequence[Expr]) -> Expr:
    """Float32 values of groups of columns as a float16x8 for a run, whose pairs alternate between the halves of a
    block."""
    values = [T.Bind(T.cast(value, "float16")) for value in values]
    return vector([values[i // 2 % len(values)] for i in range(RUN)])


def _place(plane: str, j: Expr, t: int) -> tuple[Sequence[int], Expr]:
    """(words, first bit) of a plane's bits for pair t of run j. The second element of the pair is 16 bits higher.
    words: the numbers of the words among which j selects; or the number of a single word."""
    half, byte = t % 2, 8 * (t // 2)  # half of the block; columns 0 and 2 are in even bytes, 1 and 3 in odd ones
    return {
        "Q8": (range(RUNS * half, RUNS * (half + 1)), byte),
        "Q4": (range(RUNS), byte + 4 * half),
        "Q2": ((half,), byte + 2 * j),
        "Q1": ((0,), byte + 4 * half + j),
    }[plane]


def _fields(codes: Words, j: Expr, t: int, exponent: Expr) -> Expr:
    """A word with two float16: 1024 + the codes of pair t of run j."""
    found, filled = exponent, 0
    for plane, words in codes.items():
        bits = PLANE_BITS[plane]
        places, first = _place(plane, j, t)
        found = load.field(chosen([words[i] for i in places], j), first, bits, filled, 0x00010001) | found
        filled += bits
    return T.Bind(found)


def _permuted(exponent: Expr, word: Expr, pair: int) -> Expr:
    """The two bytes of a pair of a word, each below the upper byte of an exponent: one instruction on AMD GPUs."""
    return intrin("uint32", "llvm.amdgcn.perm", exponent, word, T.uint32(pair))


def _fp4(word: Expr) -> list[Expr]:
    """The pairs of FP4_VALUES for a word of codes of a run. As float16 these values have a zero lower byte, so byte
    permutes select among eight upper bytes."""
    halves = np.array(FP4_VALUES[:8], np.float16).view(np.uint16) >> 8
    low, high = (T.uint32(int.from_bytes(bytes(int(x) for x in part), "little")) for part in (halves[:4], halves[4:]))
    pairs = []
    for codes in (word, T.Bind(T.shift_right(word, T.uint32(4)))):
        magnitudes = intrin("uint32", "llvm.amdgcn.perm", high, low, codes & T.uint32(0x07070707))
        signed = T.Bind(T.shift_left(codes & T.uint32(0x08080808), T.uint32(4)) | magnitudes)
        pairs.append([T.Bind(x & T.uint32(0xFF00FF00)) for x in (T.shift_left(signed, T.uint32(8)), signed)])
    return [pair[odd] for odd in (0, 1) for pair in pairs]


def _nibbles(words: Sequence[Expr], j: Expr, exponents: Sequence[Expr]) -> list[Expr]:
    """The four pairs of a run of nibbles, like `_fields`; but pairs 1 and 3 are 64 + code, which needs one shift
    instead of three."""
    low = chosen(words, j)
    high = T.Bind(T.shift_right(low, T.uint32(8)))
    return [
        T.Bind(word & T.uint32(mask) | exponent)
        for word in (low, high)
        for mask, exponent in zip((0x000F000F, 0x00F000F0), exponents, strict=True)
    ]
