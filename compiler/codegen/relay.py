"""Compiles the relay (relay.ll), which copies words between GPUs, to machine code, with TVM's LLVM and without a
linker.

In: LLVM IR. Out: position-independent code of one function, which begins at offset 0, for any x86-64 CPU. The runtime
maps the file and calls it (runtime/devices/exchange/relay.py).
"""

import struct
from pathlib import Path

import tvm

from mlc_amd.runtime.folders import temporary

SOURCE = Path(__file__).with_name("relay.ll")
SECTIONS_AT, COUNTS_AT = 40, 58  # in an ELF header
RELOCATIONS = (4, 9)  # types of sections with relocations: SHT_RELA, SHT_REL


def relay_code() -> bytes:
    """The machine code of the function. Raises RuntimeError if LLVM produced other sections or relocations."""
    with temporary("relay") as folder:
        path = folder / "relay.o"
        tvm.runtime.load_module(str(SOURCE)).write_to_file(str(path))
        data = path.read_bytes()
    (start,) = struct.unpack_from("<Q", data, SECTIONS_AT)
    size, count, _ = struct.unpack_from("<HHH", data, COUNTS_AT)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    code = [data[at : at + length] for _, _, flags, _, at, length, *_ in sections if flags and length]
    if len(code) != 1 or any(kind in RELOCATIONS for _, kind, *_ in sections):
        raise RuntimeError("LLVM's code of the relay refers to other sections")
    return code[0]
