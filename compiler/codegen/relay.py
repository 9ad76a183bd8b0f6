"""The machine code of the relay (relay.ll), which moves words between GPUs: compiled by TVM's LLVM, needs no linker.

It is position-independent code of one function at offset 0, for x86-64 with what all of these have. The runtime maps
the file and calls it (runtime/devices/exchange/relay.py).
"""

import struct
from pathlib import Path

import tvm

from mlc_amd.runtime.folders import temporary

SOURCE = Path(__file__).with_name("relay.ll")
SECTIONS_AT, COUNTS_AT = 40, 58  # in an ELF header
RELOCATIONS = (4, 9)  # types of sections


def relay_code() -> bytes:
    """The function's code. RuntimeError if LLVM made more than code of it."""
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
