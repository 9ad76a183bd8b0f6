"""A SPIR-V module of our generator as `emulator.py` runs it: types, constants, variables, blocks of the one
function.

In: a module's bytes. Out: `Program`. Format: Khronos's SPIR-V specification; what it may have is what
compiler/codegen/spirv/opcodes.py lists.
"""

import math
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mlc_amd.compiler.codegen.spirv.opcodes import BUILTINS, CAPABILITIES, DECORATIONS, OP, UNTYPED
from mlc_amd.compiler.codegen.spirv_reader import LOCAL_SIZE, instructions

NAMES = {number: name for name, number in OP.items()}
NO_RESULT = {
    "Store", "ControlBarrier", "MemoryBarrier", "LoopMerge", "SelectionMerge", "Branch", "BranchConditional", "Return",
    "CooperativeMatrixStoreKHR",
}  # fmt: skip
BUILTIN_NAMES = {number: name for name, number in BUILTINS.items()}


@dataclass(frozen=True)
class Type:
    """kind: "void", "bool", "int", "float", "vector", "array", "struct", "pointer", "matrix" or "function".

    dtype: of a scalar in NumPy; integers have no sign in our modules, so they are signed here. of: the types of
    elements, members or what is pointed to. count: elements. stride: bytes between elements of an array in memory.
    offsets: of members. storage: of a pointer. shape: (rows, columns, use) of a matrix.
    """

    kind: str
    dtype: Any = None
    of: tuple["Type", ...] = ()
    count: int = 0
    stride: int = 0
    offsets: tuple[int, ...] = ()
    storage: int = 0
    shape: tuple[int, int, int] = (0, 0, 0)

    @property
    def scalar(self) -> Any:
        """NumPy's type of a scalar, or of a vector's elements."""
        return self.dtype or self.of[0].scalar

    @property
    def lanes(self) -> int:
        """Elements of a vector; 1 for a scalar."""
        return self.count if self.kind == "vector" else 1


VOID = Type("void")


class Instruction(NamedTuple):
    """of: the result's type, result: its id; VOID and 0 without one."""

    name: str
    of: Type
    result: int
    args: tuple[int, ...]


RETURN = Instruction("Return", VOID, 0, ())


class Variable(NamedTuple):
    """builtin: the name of an input, else ""."""

    of: Type
    storage: int
    builtin: str


@dataclass
class Block:
    body: list[Instruction] = field(default_factory=list)
    merge: Instruction | None = None  # LoopMerge or SelectionMerge
    end: Instruction = RETURN  # or Branch, BranchConditional


@dataclass
class Program:
    """constants: id -> value. blocks: label -> Block. size: of a workgroup, (x, y, z). vulkan_model: whether it has
    Vulkan's memory model, in which each access says whether barriers order it."""

    bound: int
    size: tuple[int, ...] = ()
    vulkan_model: bool = False
    first: int = 0
    types: dict[int, Type] = field(default_factory=dict)
    constants: dict[int, Any] = field(default_factory=dict)
    variables: dict[int, Variable] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        return math.prod(self.size)


def parse(code: bytes) -> Program:
    """ValueError for an instruction that our generator does not write."""
    program = Program(struct.unpack_from("<I", code, 12)[0])
    strides: dict[int, int] = {}
    offsets: dict[tuple[int, int], int] = {}
    builtins: dict[int, str] = {}
    block = Block()
    for number, words in instructions(code):
        if number not in NAMES:
            raise ValueError(f"instruction {number} is not one of our generator's")
        name = NAMES[number]
        if name == "Decorate" and words[1] == DECORATIONS["ArrayStride"]:
            strides[words[0]] = words[2]
        elif name == "Decorate" and words[1] == DECORATIONS["BuiltIn"]:
            builtins[words[0]] = BUILTIN_NAMES[words[2]]
        elif name == "MemberDecorate" and words[2] == DECORATIONS["Offset"]:
            offsets[words[0], words[1]] = words[3]
        elif name == "ExecutionMode" and words[1] == LOCAL_SIZE:
            program.size = words[2:5]
        elif name == "Capability":
            program.vulkan_model |= words[0] == CAPABILITIES["VulkanMemoryModel"]
        elif name in UNTYPED:
            program.types[words[0]] = _type(name, words, program, strides, offsets)
        elif name.startswith("Constant"):
            program.constants[words[1]] = _constant(name, program.types[words[0]], words[2:], program.constants)
        elif name == "Variable":
            program.variables[words[1]] = Variable(program.types[words[0]].of[0], words[2], builtins.get(words[1], ""))
        elif name == "Label":
            block = program.blocks[words[0]] = Block()
            program.first = program.first or words[0]
        elif name in ("LoopMerge", "SelectionMerge"):
            block.merge = Instruction(name, VOID, 0, words)
        elif name in ("Branch", "BranchConditional", "Return"):
            block.end = Instruction(name, VOID, 0, words)
        elif name in NO_RESULT:
            block.body.append(Instruction(name, VOID, 0, words))
        elif program.first and name != "FunctionEnd":
            block.body.append(Instruction(name, program.types[words[0]], words[1], words[2:]))
    return program


def _type(name, words, program, strides, offsets) -> Type:
    made, of = words[0], [program.types.get(word, VOID) for word in words[1:]]
    if name == "TypeInt":
        return Type("int", np.dtype(f"int{words[1]}"))
    if name == "TypeFloat":
        return Type("float", np.dtype(f"float{words[1]}"))
    if name == "TypeBool":
        return Type("bool", np.dtype(bool))
    if name == "TypeVector":
        return Type("vector", of=(of[0],), count=words[2])
    if name in ("TypeArray", "TypeRuntimeArray"):
        count = int(program.constants[words[2]]) if name == "TypeArray" else 0
        return Type("array", of=(of[0],), count=count, stride=strides.get(made, 0))
    if name == "TypeStruct":
        return Type("struct", of=tuple(of), offsets=tuple(offsets.get((made, i), 0) for i in range(len(of))))
    if name == "TypePointer":
        return Type("pointer", of=(program.types[words[2]],), storage=words[1])
    if name == "TypeCooperativeMatrixKHR":
        rows, columns, use = (int(program.constants[word]) for word in words[3:6])
        return Type("matrix", of=(of[0],), shape=(rows, columns, use))
    return VOID if name == "TypeVoid" else Type("function")


def _constant(name, of: Type, words, constants):
    if name in ("ConstantTrue", "ConstantFalse"):
        return np.bool_(name == "ConstantTrue")
    if name == "ConstantComposite":
        values = [constants[word] for word in words]
        return values[0] if of.kind == "matrix" else np.stack(values)[:, None]
    size = of.scalar.itemsize
    raw = struct.pack(f"<{len(words)}I", *words)[:size]
    return np.frombuffer(raw, of.scalar)[0]
