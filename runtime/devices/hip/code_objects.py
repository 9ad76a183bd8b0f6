"""Loads code objects into HIP.

In: the bytes of a file (an artifact's, or that of a candidate of tuning), the launches whose code it has
(dist/README.md; without `code` the file is a single code object), and the chip that it was compiled for. Out: HIP's
functions by symbol.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from mlc_amd.runtime.devices.hip.api import Hip
from mlc_amd.runtime.gpus import same_isa

# Groups of chips with the same instruction set. HIP loads a code object only if its ELF header names the exact chip.
SAME_ISA = same_isa()
E_FLAGS = 0x30  # offset of e_flags in a 64-bit ELF header; its low byte is EF_AMDGPU_MACH

Step = Mapping[str, Any]


def places(steps: Iterable[Step], size: int) -> dict[tuple[int, int], list[str]]:
    """{(offset, bytes) of a code object: its symbols that are launched}, for a file of `size` bytes."""
    found: dict[tuple[int, int], set[str]] = {}
    for step in steps:
        begin, length = step.get("code", (0, size))
        found.setdefault((begin, length), set()).add(step["symbol"])
    return {place: sorted(symbols) for place, symbols in sorted(found.items())}


def load(
    hip: Hip, held: ExitStack, file: bytes, steps: Iterable[Step], chips: tuple[str, str]
) -> tuple[list[bytes], dict[str, Any]]:
    """Loads the code objects of a file; they are unloaded when `held` closes. chips: (chip that they were compiled for,
    chip that runs them). Returns (bytes that must stay alive until then, {symbol: function}). Raises HipError."""
    objects, functions = [], {}
    for (begin, length), symbols in places(steps, len(file)).items():
        code = file[begin : begin + length]
        objects.append(code if chips[0] == chips[1] else relabel(code, *chips))
        module = hip.own(held, "hipModuleUnload", hip("hipModuleLoadData", objects[-1]))
        functions |= {symbol: hip("hipModuleGetFunction", module, symbol.encode()) for symbol in symbols}
    return objects, functions


def relabel(code: bytes, old: str, new: str) -> bytes:
    """Changes a code object for chip `old`, in ELF header and metadata, to one for chip `new` of the same group."""
    group = next(group for group in SAME_ISA if old in group)
    changed = bytearray(code.replace(f"-{old}".encode(), f"-{new}".encode()))
    changed[E_FLAGS] = group[new]
    return bytes(changed)
