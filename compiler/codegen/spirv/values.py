"""Values in registers: registers for TIR types, packing into 32-bit words, conversions.

A TIR vector is a Python list of scalar ids; SPIR-V vectors are only used in loads and stores. Integers of 8 and 16 bits
are kept in 32-bit registers, sign-extended or zero-extended, so that devices need small types in memory only. float16
is kept in float32 if the device has no float16 arithmetic.
"""

from collections.abc import Callable
from typing import Any

import tvm

from mlc_amd.compiler.codegen.spirv.asm import Asm
from mlc_amd.compiler.codegen.spirv.types import Type, Unsupported, kind, storage
from mlc_amd.schedules.gpu.base.profiles import Profile

DROPPED_BITS = 13  # bits of float32's mantissa that float16 does not have
SMALLEST_HALF, SMALLEST_NORMAL_HALF = 2.0**-24, 2.0**-14


class Base:
    """The state of an `Emitter`, whose docstring describes the arguments.

    Each part of the emitter is a class that inherits from the parts whose methods it uses: Values, Expressions, Memory,
    Intrinsics and Subgroup, in this order; Matrix inherits from Memory. TIR nodes have type Any here, because TVM
    creates their classes at run time.
    """

    table: bool  # whether arguments come from a table in memory
    by_subgroup: bool  # whether thread numbers are those of lanes and subgroups
    lane_indices: Callable[[Any], list[int]]  # ids of a Ramp's lanes (memory.py)
    thread: Callable[[str], int]  # threadIdx of an axis (emitter.py)

    def __init__(self, func: tvm.tirx.PrimFunc, profile: Profile, block: tuple[int, int, int], coherent=()):
        self.func: Any = func
        self.profile, self.block, self.asm = profile, block, Asm()
        self.analyzer = tvm.sym.Analyzer()
        self.environment: dict[Any, Any] = {}  # TIR variable -> id or ids
        self.definitions: dict[Any, Any] = {}  # bound integer variable -> its expression
        self.varying: set[Any] = set()  # variables that differ between the lanes of a subgroup
        self.arrays: dict[Any, Any] = {}  # shared or local buffer -> Array
        self.fragments: dict[Any, dict[int, tuple[int, int]]] = {}  # buffer -> {index: (variable, matrix type)}
        self.roots: dict[Any, Any] = {}  # view of a parameter -> the parameter
        self.parameters: dict[Any, int] = {}  # parameter -> its address
        self.used: set[Any] = set()  # parameters
        self.written: set[Any] = set()
        self.targets: set[Any] = set()  # "loads" that only stand for an address that is written
        self.coherent = {self.func.params[i] for i in coherent}
        self.indexing: set[Any] = set()  # variables that index local arrays: their loops should be unrolled
        self.bound: dict[Any, Any] = {}  # variable -> the expression that it is bound to
        self.lengths: set[Any] = set()  # variables that are the length of a fragment
        self.pairs: dict[tuple[int, ...], int] = {}  # ids of the parts of a word or a vector -> id of the whole
        self.exchange: int | None = None  # without subgroups: the shared array through which lanes exchange words
        self.lds = 0  # bytes
        self._methods: dict[tuple[str, type], Callable[[Any], Any]] = {}  # cache of `dispatch`
        self.exchanges = self.vulkan_model = False

    def dispatch(self, prefix: str, node) -> Any:
        """Calls the method for a node's class, `prefix` + class name. Raises Unsupported if there is none."""
        key = prefix, type(node)
        if (method := self._methods.get(key)) is None:
            method = getattr(self, prefix + kind(node), None)
            if method is None:
                raise Unsupported(kind(node))
            self._methods[key] = method
        return method(node)


class Values(Base):
    """Part of the emitter: values in registers."""

    def register(self, ty: Type) -> str:
        """The assembler's type of the register that holds one lane."""
        if ty.code == "bool":
            return "bool"
        if ty.code in ("int", "uint"):
            return "i64" if ty.bits == 64 else "i32"
        if ty.code == "float" and ty.bits in (16, 32):
            return "f32" if ty.bits == 16 and not self.profile.float16 else f"f{ty.bits}"
        raise Unsupported(f"{ty.code}{ty.bits}")

    def int_const(self, value) -> int:
        """An int32 constant."""
        return self.asm.const("i32", value)

    # ---- words

    def unpack(self, words, ty):
        """Converts 32-bit words to scalars of type `ty`."""
        asm, register, out = self.asm, self.register(ty), []
        for word in words:
            if ty.bits == 32:
                out.append(word if register == "i32" else asm.op("Bitcast", register, word))
            elif ty.code == "float":
                if register == "f16":
                    pair = asm.op("Bitcast", ("vec", "f16", 2), word)
                else:
                    pair = asm.glsl_op("UnpackHalf2x16", ("vec", "f32", 2), word)
                out += self.split_pair(register, pair)
            else:
                part = [self.field(word, ty, first) for first in range(0, 32, ty.bits)]
                self.pairs[tuple(part)] = word
                out += part
        return out

    def field(self, word, ty, first):
        """Bits first .. first + ty.bits - 1 of a word, as an integer of type `ty`."""
        op = "BitFieldSExtract" if ty.code == "int" else "BitFieldUExtract"
        return self.asm.op(op, "i32", word, self.int_const(first), self.int_const(ty.bits))

    def pack(self, lanes, ty):
        """Converts scalars of type `ty` to 32-bit words. The last word is padded with zeros."""
        asm, register, per = self.asm, self.register(ty), 32 // ty.bits
        if ty.bits > 32 or ty.code == "bool":
            raise Unsupported(f"{ty.code}{ty.bits} in a vector that is stored or reinterpreted")
        if ty.bits == 32:
            return [lane if register == "i32" else asm.op("Bitcast", "i32", lane) for lane in lanes]
        lanes = list(lanes) + [asm.const(register, 0)] * (-len(lanes) % per)
        groups = [lanes[first : first + per] for first in range(0, len(lanes), per)]
        return [
            self._half_word(register, *group) if ty.code == "float" else self._small_word(group, ty) for group in groups
        ]

    def _half_word(self, register, low, high):
        pair = self.pair(register, low, high)
        return (
            self.asm.op("Bitcast", "i32", pair) if register == "f16" else self.asm.glsl_op("PackHalf2x16", "i32", pair)
        )

    def _small_word(self, group, ty):
        if (word := self.pairs.get(tuple(group))) is not None:
            return word
        word = self.asm.op("BitwiseAnd", "i32", group[0], self.int_const((1 << ty.bits) - 1))
        for j, lane in enumerate(group[1:], 1):
            word = self.asm.op(
                "BitFieldInsert", "i32", word, lane, self.int_const(j * ty.bits), self.int_const(ty.bits)
            )
        return word

    def split_pair(self, register, pair):
        """The two halves of a vector of two. `pair` of these halves returns the vector again."""
        halves = [self.asm.op("CompositeExtract", register, pair, j) for j in (0, 1)]
        self.pairs[tuple(halves)] = pair
        return halves

    def pair(self, register, low, high):
        """A vector of two. For the two halves of an existing vector: that vector."""
        return self.pairs.get((low, high)) or self.asm.op("CompositeConstruct", ("vec", register, 2), low, high)

    # ---- conversions

    def wrap(self, value, ty):
        """Truncates an int32 result to the small integer type `ty`. Other types: unchanged."""
        return self.field(value, ty, 0) if ty.small else value

    def cast(self, value, source, target):
        """Converts a scalar. Floats are truncated towards zero; values out of range are undefined, as in TIR."""
        asm, have, want = self.asm, self.register(source), self.register(target)
        if source[:2] == target[:2]:  # equal except for the number of lanes
            return value
        if have == "bool":
            return asm.op("Select", want, value, asm.const(want, 1), asm.const(want, 0))
        if want == "bool":
            return asm.op("FUnordNotEqual" if have[0] == "f" else "INotEqual", "bool", value, asm.const(have, 0))
        if have[0] == "f":
            return self._cast_float(value, have, want, target)
        if want[0] == "f":
            value = asm.op("ConvertUToF" if source.code == "uint" else "ConvertSToF", want, value)
            return self._round_to_half(value, want, target)
        if have != want:
            value = asm.op("SConvert" if source.code == "int" else "UConvert", want, value)
        fits = source.bits < target.bits and source.code == "uint"
        return value if fits else self.wrap(value, target)

    def _cast_float(self, value, have, want, target):
        asm = self.asm
        if want[0] != "f":
            # ConvertFToS for all small integers, signed or not: their values fit a signed 32-bit register
            op = "ConvertFToU" if target.code == "uint" and not target.small else "ConvertFToS"
            return self.wrap(asm.op(op, want, value), target)
        return asm.op("FConvert", want, value) if have != want else self._round_to_half(value, want, target)

    def _round_to_half(self, value, register, target):
        """Rounds a value of type float16 that is kept in float32, wherever TIR rounds. Other values: unchanged."""
        return self._half_in_float(value) if target.bits == 16 and register == "f32" else value

    def _half_in_float(self, value):
        """A float32 rounded to the nearest float16, ties to even. OpQuantizeToF16 is not used, because it may flush
        float16's subnormal numbers to zero."""
        asm, const = self.asm, self.int_const
        bits = asm.op("Bitcast", "i32", value)
        odd = asm.op("BitFieldUExtract", "i32", bits, const(DROPPED_BITS), const(1))
        up = asm.op("IAdd", "i32", asm.op("IAdd", "i32", bits, const((1 << DROPPED_BITS - 1) - 1)), odd)
        usual = asm.op("Bitcast", "f32", asm.op("BitwiseAnd", "i32", up, const(-1 << DROPPED_BITS)))
        steps = asm.glsl_op("RoundEven", "f32", asm.op("FMul", "f32", value, asm.const("f32", 1 / SMALLEST_HALF)))
        subnormal = asm.op("FMul", "f32", steps, asm.const("f32", SMALLEST_HALF))
        size, normal = asm.glsl_op("FAbs", "f32", value), asm.const("f32", SMALLEST_NORMAL_HALF)
        small = asm.op("FOrdLessThan", "bool", size, normal)
        return asm.op("Select", "f32", small, subnormal, usual)

    def from_storage(self, value, ty):
        """A value from memory, converted to its register type."""
        register = self.register(ty)
        if register == "bool":
            return self.asm.op("INotEqual", "bool", self.asm.op("UConvert", "i32", value), self.int_const(0))
        if storage(ty) == register:
            return value
        return self.asm.op({"float": "FConvert", "int": "SConvert", "uint": "UConvert"}[ty.code], register, value)

    def to_storage(self, value, ty, unit):
        """A register's value, converted to the type `unit` in memory."""
        register = self.register(ty)
        if register == "bool":
            value, register = self.asm.op("Select", "i32", value, self.int_const(1), self.int_const(0)), "i32"
        if unit == register:
            return value
        return self.asm.op("FConvert" if ty.code == "float" else "UConvert", self.asm.storage_type(unit), value)
