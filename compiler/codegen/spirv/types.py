"""TIR types as the generator uses them, and small functions on TIR nodes."""

import re
from functools import cache
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import tirx

# storage scope: SPIR-V's "use" of a cooperative matrix
FRAGMENTS = {"wmma.matrix_a": 0, "wmma.matrix_b": 1, "wmma.accumulator": 2}
LEAVES = (tvm.ir.Var, tvm.ir.TensorLoad, tvm.ir.Call)


class Unsupported(ValueError):
    """A TIR node or type for which this generator has no SPIR-V."""


class Type(NamedTuple):
    """code: "bool", "int", "uint", "float" or "void"."""

    code: str
    bits: int
    lanes: int

    @property
    def small(self) -> bool:
        """An integer narrower than the register that holds it."""
        return self.code in ("int", "uint") and self.bits < 32


def parse(ty) -> Type:
    """The Type of a TIR type or dtype."""
    return _parse(str(ty))


@cache
def _parse(text):
    found = re.fullmatch(r"(bool|int|uint|float|void)(\d*)(?:x(\d+))?", text)
    if not found:
        raise Unsupported(f"type {text}")
    return Type(found[1], int(found[2] or 8), int(found[3] or 1))


def storage(ty: Type) -> str:
    """The type of one element in memory. Raises Unsupported for types that cannot be stored."""
    if (ty.code == "float" and ty.bits not in (16, 32)) or ty.code == "void":
        raise Unsupported(f"{ty.code}{ty.bits} in memory")
    return "i8" if ty.code == "bool" else f"{'f' if ty.code == 'float' else 'i'}{ty.bits}"


def size(unit) -> int:
    """The bytes of a type of the assembler (asm.py)."""
    return unit[2] * size(unit[1]) if isinstance(unit, tuple) else int(unit[1:]) // 8


def kind(node) -> str:
    """The class name of a TIR node."""
    return type(node).__name__


def scope(buffer) -> str:
    """The storage scope of a buffer."""
    return str(buffer.scope())


def contains(e, test) -> bool:
    """Whether an expression contains a variable, a load or a call n with test(n)."""
    if isinstance(e, tirx.IntImm | tvm.ir.Var):  # the most frequent cases; a walk would take fifty times as long
        return isinstance(e, tvm.ir.Var) and test(e)
    stop = tvm_ffi.VisitInterrupt()
    return tvm_ffi.structural_walk(e, (LEAVES, lambda n: stop if test(n) else None), order="pre") is not None


def has_load(node) -> bool:
    """Whether an expression reads memory. A local buffer with constant indices is a register, not memory."""

    def in_memory(n) -> bool:
        return scope(n.source) != "local" or not all(isinstance(index, tirx.IntImm) for index in n.indices)

    return contains(node, lambda n: kind(n) == "TensorLoad" and in_memory(n))
