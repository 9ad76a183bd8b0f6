"""Reads SPIR-V modules, of this project or other compute shaders: the features that they need, and their text.

In: the bytes of a module. Out: `ModuleFacts`. Nothing is compiled; `disassemble` and `validate` call SPIRV-Tools, if
installed. Format: Khronos's SPIR-V specification, 2.3 "Physical Layout of a SPIR-V Module and Instruction".
"""

import shutil
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import Unit

MAGIC = 0x07230203
ENVIRONMENT = "vulkan1.3"  # `validate` applies the rules of this environment
WORKGROUP, LOCAL_SIZE = 4, 17  # storage class, execution mode
# opcodes
EXTENSION, EXECUTION_MODE, CAPABILITY, CONSTANT, POINTER, VARIABLE = 10, 16, 17, 43, 32, 59
BOOL, INT, FLOAT, VECTOR, ARRAY, STRUCT = 20, 21, 22, 23, 28, 30
# DOTS: SDot, UDot, SUDot, and the variants that add with saturation. MATRIX: CooperativeMatrixMulAddKHR
DOTS, MATRIX = range(4450, 4456), 4459
CAPABILITIES = {
    1: "Shader", 9: "Float16", 10: "Float64", 11: "Int64", 12: "Int64Atomics", 22: "Int16", 39: "Int8",
    61: "GroupNonUniform", 62: "GroupNonUniformVote", 63: "GroupNonUniformArithmetic", 64: "GroupNonUniformBallot",
    65: "GroupNonUniformShuffle", 66: "GroupNonUniformShuffleRelative", 67: "GroupNonUniformClustered",
    68: "GroupNonUniformQuad", 4433: "StorageBuffer16BitAccess", 4434: "UniformAndStorageBuffer16BitAccess",
    4448: "StorageBuffer8BitAccess", 4449: "UniformAndStorageBuffer8BitAccess", 4464: "DenormPreserve",
    4466: "SignedZeroInfNanPreserve", 4467: "RoundingModeRTE", 5345: "VulkanMemoryModel",
    5346: "VulkanMemoryModelDeviceScope", 5347: "PhysicalStorageBufferAddresses", 6016: "DotProductInputAll",
    6017: "DotProductInput4x8Bit", 6018: "DotProductInput4x8BitPacked", 6019: "DotProduct",
    6022: "CooperativeMatrixKHR",
}  # fmt: skip


@dataclass(frozen=True)
class ModuleFacts:
    """block: local size (x, y, z). lds: bytes of workgroup memory. instructions: number of SPIR-V instructions,
    including declarations. dot: packed dot products. matrix: cooperative matrix products. capabilities: names; numbers
    if unknown."""

    block: tuple[int, int, int]
    lds: int
    instructions: int
    dot: int
    matrix: int
    capabilities: tuple[str, ...]
    extensions: tuple[str, ...]

    @property
    def units(self) -> list[Unit]:
        """The units that multiply, for this project's kernels, whose matrices are float16. A driver's compiler turns
        all other products into float32 operations."""
        return ["fma", *(["dot4"] if self.dot else []), *(["matrix16"] if self.matrix else [])]


def read(code: bytes) -> ModuleFacts:
    """The facts of a module. Raises UserError if `code` is not a SPIR-V module, or a damaged one."""
    try:
        return _facts(instructions(code))
    except (struct.error, IndexError, KeyError) as error:
        raise UserError(f"damaged SPIR-V module ({type(error).__name__}: {error}); compile it again") from error


def instructions(code: bytes) -> list[tuple[int, tuple[int, ...]]]:
    """(opcode, operands) of every instruction. Raises UserError as `read` does."""
    if len(code) < 20 or len(code) % 4 or struct.unpack_from("<I", code)[0] != MAGIC:
        raise UserError("not a SPIR-V module")
    words = struct.unpack(f"<{len(code) // 4}I", code)
    at, found = 5, []
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if not length or at + length > len(words):
            raise UserError("damaged SPIR-V module (an instruction passes its end); compile it again")
        found.append((opcode, words[at + 1 : at + length]))
        at += length
    return found


def _facts(instructions) -> ModuleFacts:
    capabilities, extensions, block, lds = [], [], (1, 1, 1), 0
    # type id: bytes; constant id: value; pointer type id: (storage class, type)
    sizes, constants, pointers = {}, {}, {}
    for opcode, operands in instructions:
        if opcode == CAPABILITY:
            capabilities.append(CAPABILITIES.get(operands[0], str(operands[0])))
        elif opcode == EXTENSION:
            extensions.append(struct.pack(f"<{len(operands)}I", *operands).split(b"\0")[0].decode(errors="replace"))
        elif opcode == EXECUTION_MODE and operands[1] == LOCAL_SIZE:
            block = tuple(operands[2:5])
        elif opcode == CONSTANT:
            constants[operands[1]] = operands[2]
        elif opcode in SIZES:
            sizes[operands[0]] = SIZES[opcode](operands, sizes, constants)
        elif opcode == POINTER:
            pointers[operands[0]] = operands[1:3]
        elif opcode == VARIABLE and operands[2] == WORKGROUP:
            lds += sizes[pointers[operands[0]][1]]
    counts = Counter(opcode for opcode, _ in instructions)
    dots = sum(counts[opcode] for opcode in DOTS)
    return ModuleFacts(block, lds, len(instructions), dots, counts[MATRIX], tuple(capabilities), tuple(extensions))


# opcode of a type -> f(operands, sizes of earlier types, integer constants), the type's size in bytes. Types without a
# size, such as runtime arrays and cooperative matrices, cannot be in workgroup memory.
SIZES = {
    BOOL: lambda operands, sizes, constants: 4,
    INT: lambda operands, sizes, constants: operands[1] // 8,
    FLOAT: lambda operands, sizes, constants: operands[1] // 8,
    VECTOR: lambda operands, sizes, constants: sizes[operands[1]] * operands[2],
    ARRAY: lambda operands, sizes, constants: sizes.get(operands[1], 0) * constants[operands[2]],
    STRUCT: lambda operands, sizes, constants: sum(sizes.get(member, 0) for member in operands[1:]),
}


def disassemble(code: bytes) -> str:
    """The output of spirv-dis. Raises UserError without spirv-dis, or if it cannot read the module."""
    return _tool("spirv-dis", ["--no-color", "-"], code)


def validate(code: bytes) -> None:
    """Raises UserError with spirv-val's message if the module is invalid, or if there is no spirv-val."""
    _tool("spirv-val", ["--target-env", ENVIRONMENT, "-"], code)


def _tool(name: str, options: list[str], code: bytes) -> str:
    path = shutil.which(name)
    if path is None:
        raise UserError(f"no {name} found to read SPIR-V; install SPIRV-Tools (package spirv-tools)")
    result = subprocess.run([path, *options], input=code, capture_output=True)
    if result.returncode:
        lines = result.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {result.returncode}"]
        raise UserError(f"{name}: {lines[0]}")
    return result.stdout.decode(errors="replace")
