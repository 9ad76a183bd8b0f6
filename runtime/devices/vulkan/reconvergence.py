"""Reconvergence: lanes of a subgroup that take different branches continue together where these join. Vulkan guarantees
it only for modules that require it, which kernels do wherever lanes exchange values, or multiply matrices, after a
branch."""

import struct
from collections.abc import Collection

# feature: (SPIR-V extension, execution mode), the better one first. Sources: SPV_KHR_maximal_reconvergence and
# SPV_KHR_subgroup_uniform_control_flow, which guarantees it for branches that all lanes of the subgroup reach together.
MODES = {
    "shaderMaximalReconvergence": ("SPV_KHR_maximal_reconvergence", 6023),
    "shaderSubgroupUniformControlFlow": ("SPV_KHR_subgroup_uniform_control_flow", 4421),
}
_HEADER = 5  # words
_EXTENSION, _ENTRY_POINT, _EXECUTION_MODE, _CAPABILITY = 10, 15, 16, 17  # opcodes


def reconverging(code: bytes, features: Collection[str]) -> bytes:
    """The module with that execution mode; unchanged if the device has no such feature, or without an entry point."""
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
