"""Adds an execution mode for reconvergence to a SPIR-V module.

Reconvergence: lanes of a subgroup that took different branches continue together where the branches join. Vulkan
guarantees this only for modules with such an execution mode. Kernels depend on it wherever lanes exchange values, or
multiply matrices, after a branch."""

import struct
from collections.abc import Collection

# {feature: (SPIR-V extension, execution mode)}, the better mode first. The second one guarantees reconvergence only
# after branches that all lanes of the subgroup have reached together. Sources: the specifications of the two
# extensions.
MODES = {
    "shaderMaximalReconvergence": ("SPV_KHR_maximal_reconvergence", 6023),
    "shaderSubgroupUniformControlFlow": ("SPV_KHR_subgroup_uniform_control_flow", 4421),
}
_HEADER = 5  # words
_EXTENSION, _ENTRY_POINT, _EXECUTION_MODE, _CAPABILITY = 10, 15, 16, 17  # opcodes


def reconverging(code: bytes, features: Collection[str]) -> bytes:
    """The SPIR-V module with the best execution mode that the device's features allow. It is unchanged if they allow
    none, and without an entry point."""
    found = next((mode for feature, mode in MODES.items() if feature in features), None)
    if found is None:
        return code
    name, mode = found
    words = list(struct.unpack_from(f"<{len(code) // 4}I", code))
    at, declared, extensions, entry = _HEADER, 0, _HEADER, 0
    while at + 2 < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if opcode in (_CAPABILITY, _EXTENSION):
            extensions = at + length
        elif opcode == _ENTRY_POINT:
            entry, declared = words[at + 2], at + length
        elif declared:
            break
        at += max(length, 1)
    if not declared:
        return code
    text = name.encode() + b"\0"
    text = struct.unpack(f"<{-(-len(text) // 4)}I", text.ljust(-(-len(text) // 4) * 4, b"\0"))
    words[declared:declared] = [3 << 16 | _EXECUTION_MODE, entry, mode]
    words[extensions:extensions] = [(len(text) + 1) << 16 | _EXTENSION, *text]
    return struct.pack(f"<{len(words)}I", *words)
