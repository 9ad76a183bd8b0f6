"""The code objects of an artifact's or a candidate's file, loaded into HIP.

In: the file's bytes, the launches that it has the code of (dist/README.md; without `code` the file is one object), and
the chip it was compiled for. Out: HIP's function of each symbol.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from mlc_amd.runtime.devices.hip.api import Hip
from mlc_amd.runtime.gpus import same_isa

# Chips with the same instruction set. HIP loads a code object only if its ELF header names the exact chip.
SAME_ISA = same_isa()
E_FLAGS = 0x30  # offset in a 64-bit ELF header; the low byte is EF_AMDGPU_MACH

Step = Mapping[str, Any]


def places(steps: Iterable[Step], size: int) -> dict[tuple[int, int], list[str]]:
    """By (offset, bytes) of a code object in a file of `size` bytes, the symbols that are launched of it."""
    found: dict[tuple[int, int], set[str]] = {}
    for step in steps:
        begin, length = step.get("code", (0, size))
        found.setdefault((begin, length), set()).add(step["symbol"])
    return {place: sorted(symbols) for place, symbols in sorted(found.items())}


def load(
    hip: Hip, held: ExitStack, file: bytes, steps: Iterable[Step], chips: tuple[str, str]
) -> tuple[list[bytes], dict[str, Any]]:
    """Loads the code objects until `held` closes. chips: that they were compiled for, and that runs them. Returns
    (bytes that HIP may read until then, function by symbol). HipError."""
    objects, functions = [], {}
    for (begin, length), symbols in places(steps, len(file)).items():
        code = file[begin : begin + length]
        objects.append(code if chips[0] == chips[1] else relabel(code, *chips))
        module = hip.own(held, "hipModuleUnload", hip("hipModuleLoadData", objects[-1]))
        functions |= {symbol: hip("hipModuleGetFunction", module, symbol.encode()) for symbol in symbols}
    return objects, functions


def relabel(code: bytes, old: str, new: str) -> bytes:
    """A code object for `old`, made one for `new` of the same group: the chip in the ELF header and the metadata."""
    group = next(group for group in SAME_ISA if old in group)
    changed = bytearray(code.replace(f"-{old}".encode(), f"-{new}".encode()))
    changed[E_FLAGS] = group[new]
    return bytes(changed)
