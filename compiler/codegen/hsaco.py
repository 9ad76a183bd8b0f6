"""Reads AMD code objects (HSACO), of this project or of other compilers: resources of kernels, occupancy, and
instructions.

In: the bytes of an ELF file for AMD GPUs. Out: a `CodeObject` with a `KernelCode` for each kernel. Nothing is executed
or compiled; `disassemble` calls llvm-objdump if it is installed. Formats: LLVM's AMDGPUUsage, "Code Object" (ELF flags,
note NT_AMDGPU_METADATA in MessagePack, version 3 and later).
"""

import re
import shutil
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass

import msgspec

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import temporary
from mlc_amd.runtime.gpus import KIB, Unit
from mlc_amd.schedules.gpu.base.arch import GpuArch

# EF_AMDGPU_MACH: the low byte of e_flags
MACHINES = {
    0x02F: "gfx906", 0x030: "gfx908", 0x03F: "gfx90a", 0x04C: "gfx942", 0x04F: "gfx950", 0x033: "gfx1010",
    0x034: "gfx1011", 0x035: "gfx1012", 0x036: "gfx1030", 0x037: "gfx1031", 0x038: "gfx1032", 0x039: "gfx1033",
    0x03E: "gfx1034", 0x03D: "gfx1035", 0x045: "gfx1036", 0x041: "gfx1100", 0x046: "gfx1101", 0x047: "gfx1102",
    0x044: "gfx1103", 0x043: "gfx1150", 0x04A: "gfx1151", 0x055: "gfx1152", 0x048: "gfx1200", 0x04E: "gfx1201",
}  # fmt: skip
ELF64 = b"\x7fELF\x02"
EM_AMDGPU, PT_NOTE, SHT_SYMTAB, SHT_DYNSYM, NT_AMDGPU_METADATA = 224, 4, 2, 11, 32


@dataclass(frozen=True)
class Arg:
    """A kernel argument, at bytes [offset, offset + size) of the kernarg segment. kind: "global_buffer", "by_value",
    "hidden_...", ..."""

    name: str
    kind: str
    offset: int
    size: int


@dataclass(frozen=True)
class KernelCode:
    """Resources of a kernel. vgprs, agprs: per lane; on gfx90a and later `vgprs` includes AGPRs. sgprs: per wave. lds,
    scratch (per lane), code, kernarg: bytes. vgpr_spills, sgpr_spills: registers that are spilled. threads: the largest
    workgroup."""

    name: str
    wave: int
    threads: int
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    lds: int
    scratch: int
    code: int
    kernarg: int
    args: tuple[Arg, ...]


@dataclass(frozen=True)
class CodeObject:
    """machine: gfx name, or "0x.." if unknown. kernels: by name."""

    machine: str
    kernels: dict[str, KernelCode]


def parse(data: bytes) -> CodeObject:
    """The kernels of the code objects in `data`, which are all for the same machine. Raises UserError if `data` is not
    a code object, or one without metadata (older than version 3)."""
    machine, kernels = "", {}
    for one in objects(data):
        machine, found = _parse(one)
        kernels |= found
    return CodeObject(machine, kernels)


def objects(data: bytes) -> list[bytes]:
    """The code objects in a file. This project's artifacts concatenate several; each ends with its section table. Bytes
    after the last section table belong to the last code object."""
    found, rest = [], data
    while len(rest) >= 64:
        start, (size, count) = struct.unpack_from("<Q", rest, 40)[0], struct.unpack_from("<HH", rest, 58)
        end = start + size * count
        if end < 64 or rest[end : end + 5] != ELF64:
            break
        found.append(rest[:end])
        rest = rest[end:]
    return [*found, rest]


def _parse(data: bytes) -> tuple[str, dict[str, KernelCode]]:
    if len(data) < 64 or data[:5] != ELF64 or struct.unpack_from("<H", data, 18)[0] != EM_AMDGPU:
        raise UserError(
            "not an AMD code object (64-bit ELF file for AMDGPU); give the .hsaco or .co file itself, not a bundle"
        )
    try:
        (flags,) = struct.unpack_from("<I", data, 48)
        metadata, code = _metadata(data), _symbols(data)
    except (struct.error, IndexError, ValueError, msgspec.MsgspecError) as error:
        raise UserError(f"damaged AMD code object ({error}); make it again") from error
    if metadata is None:
        raise UserError(
            "the AMD code object has no kernel metadata (version 3 and later have); compile it with a newer ROCm"
        )
    kernels = {item[".name"]: _kernel(item, code) for item in metadata.get("amdhsa.kernels", [])}
    return MACHINES.get(flags & 0xFF, hex(flags & 0xFF)), kernels


def _kernel(item, code) -> KernelCode:
    args = tuple(Arg(a.get(".name", ""), a[".value_kind"], a[".offset"], a[".size"]) for a in item.get(".args", []))
    return KernelCode(
        name=item[".name"],
        wave=item[".wavefront_size"],
        threads=item[".max_flat_workgroup_size"],
        vgprs=item[".vgpr_count"],
        agprs=item.get(".agpr_count", 0),
        sgprs=item[".sgpr_count"],
        vgpr_spills=item.get(".vgpr_spill_count", 0),
        sgpr_spills=item.get(".sgpr_spill_count", 0),
        lds=item[".group_segment_fixed_size"],
        scratch=item[".private_segment_fixed_size"],
        code=code.get(item[".symbol"].removesuffix(".kd"), 0),
        kernarg=item[".kernarg_segment_size"],
        args=args,
    )


# ---- ELF


def _metadata(data) -> dict | None:
    """The MessagePack document of the AMDGPU note. None if there is no such note."""
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for i in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, start + i * size)
        end = offset + length
        while kind == PT_NOTE and offset < end:
            name_size, size_, note = struct.unpack_from("<III", data, offset)
            body = offset + 12 + _align4(name_size)
            if note == NT_AMDGPU_METADATA and data[offset + 12 : offset + 18] == b"AMDGPU":
                found = msgspec.msgpack.decode(data[body : body + size_])
                if not isinstance(found, dict):
                    raise ValueError("its metadata is not a map")
                return found
            offset = body + _align4(size_)
    return None


def _symbols(data) -> dict[str, int]:
    """{symbol: bytes}."""
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    sizes = {}
    for _, kind, _, _, offset, length, link, *_ in sections:
        for at in range(offset, offset + length, 24) if kind in (SHT_SYMTAB, SHT_DYNSYM) else ():
            name, _, _, _, _, bytes_ = struct.unpack_from("<IBBHQQ", data, at)
            begin = sections[link][4] + name
            sizes[data[begin : data.index(b"\0", begin)].decode()] = bytes_
    return sizes


def _align4(n):
    return (n + 3) // 4 * 4


# ---- occupancy


SGPRS, SGPR_UNIT = 800, 16  # SGPRs of a SIMD before RDNA, and the unit of their allocation
SIMDS, LDS_UNIT = 4, 512  # SIMDs that share LDS (a CU; on RDNA a WGP), and the unit of LDS allocation, bytes


def occupancy(kernel: KernelCode, arch: GpuArch, threads: int | None = None) -> tuple[int, str]:
    """(waves that a SIMD holds at the same time, the limiting resource: "vgprs", "sgprs", "lds" or "waves"). threads:
    size of the workgroups, by default the largest that the kernel allows. 0 waves: a workgroup does not fit."""
    total, most, rdna = arch.registers - arch.code.accumulators, arch.code.most_waves, arch.wave == 32
    unit = total // arch.code.allotments
    if rdna and kernel.wave == 64:
        total, unit = total // 2, unit // 2
    waves = -(-(threads or kernel.threads) // kernel.wave)
    limits = {"waves": most, "vgprs": total // (-(-max(kernel.vgprs, 1) // unit) * unit)}
    if not rdna:
        limits["sgprs"] = SGPRS // (-(-max(kernel.sgprs, 1) // SGPR_UNIT) * SGPR_UNIT)
    if kernel.lds:
        lds = 128 * KIB if rdna else arch.lds
        groups = lds // (-(-kernel.lds // LDS_UNIT) * LDS_UNIT)
        limits["lds"] = -(-groups * waves // SIMDS)
    limit = min(limits, key=lambda name: limits[name])
    return min(limits[limit], most), limit


# ---- instructions


WIDTHS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "byte": 1, "short": 2}
MEMORY = re.compile(
    r"(global|flat|buffer|scratch|ds)_(load|read|store|write)"  # for LDS: read, write; load, store from gfx11 on
    r"(2|_2addr)?(?:st64|_stride64)?(?:_(?:d16|hi|lds|format))*_[bfius]?(dwordx?\d?|byte|short|\d+)"
)
# Class of instructions: the beginnings of their mnemonics. The first class that fits counts. "waits" includes hints
# that only delay a wave.
CLASSES = {
    "matrix": ("v_wmma", "v_mfma", "v_swmmac", "v_smfmac"),
    "vector": ("v_",),
    "waits": ("s_wait", "s_barrier", "s_delay_alu", "s_nop", "s_sleep"),
    "scalar": ("s_",),
    "lds": ("ds_",),
    "memory": ("global_", "flat_", "buffer_", "scratch_", "image_", "exp"),
}
DOT = re.compile(r"v_(?:dual_)?dot")
MULTIPLIES: dict[Unit, re.Pattern] = {  # units of runtime/gpus.py: mnemonics; the unit "fma" has all others
    "packed16": re.compile(r"v_(?:dual_)?dot2|v_pk_fma_f16"),
    "dot4": re.compile(r"v_dot4"),
    "matrix16": re.compile(r"v_(?:wmma|mfma|swmmac|smfmac)_b?f\d+_\w+f16"),
    "matrix8": re.compile(r"v_(?:wmma|mfma|swmmac|smfmac)_i32"),
}
PADDING = {"s_nop", "s_code_end"}  # these follow the last instruction, for the prefetcher
LABEL = re.compile(r"^(?:[0-9a-f]+ )?<?([A-Za-z_.$][\w.$]*)>?:")
LOCAL_LABEL = re.compile(r"\.L|L\d")  # labels within a kernel: LLVM's, objdump's
SECOND = re.compile(r"::\s*(v_\w+)")  # the second operation of an instruction with dual issue (v_dual_*)
MNEMONIC = re.compile(r"^\s+([sv]_\w+|ds_\w+|global_\w+|flat_\w+|buffer_\w+|scratch_\w+|image_\w+|exp\b)")


@dataclass(frozen=True)
class Instructions:
    """Static instruction counts of a kernel: total, by mnemonic, by class (CLASSES). dot: dot products, including those
    in dual issue. matrix: matrix instructions. memory: by (space, "load" or "store", bytes per lane), where space is
    "global", "flat", "buffer", "scratch" or "ds" (LDS). units: the units that multiply."""

    total: int
    by_mnemonic: Counter
    classes: Counter
    dot: int
    matrix: int
    memory: Counter
    units: list[Unit]


def lines_of(assembly: str, kernel: str) -> list[str]:
    """The lines from the kernel's label to that of the next function. Raises ValueError without such a label."""
    found: list[str] | None = None
    for line in assembly.splitlines():
        label = LABEL.match(line)
        if label and not LOCAL_LABEL.match(label[1]):
            if found is not None:
                break
            found = [] if label[1] == kernel else None
        elif found is not None:
            if line.startswith(".Lfunc_end"):
                break
            found.append(line)
    if found is None:
        raise ValueError(f"the assembly has no kernel {kernel}")
    return found


def memory_access(mnemonic: str) -> tuple[str, str, int] | None:
    """(space, "load" or "store", bytes per lane), see `Instructions`. None if it accesses no memory."""
    if not (match := MEMORY.match(mnemonic)):
        return None
    space, access, twice, width = match.groups()
    size = WIDTHS.get(width) or int(width) // 8
    return space, "load" if access in ("load", "read") else "store", size * (2 if twice else 1)


def instructions(assembly: str, kernel: str) -> Instructions:
    """Counts a kernel's instructions in LLVM's assembly text or llvm-objdump's output. Raises ValueError if the kernel
    is missing."""
    counts, padding, memory, seconds, classes = Counter(), [], Counter(), Counter(), Counter()
    for line in lines_of(assembly, kernel):
        if mnemonic := MNEMONIC.match(line):
            padding.append(mnemonic[1])
            seconds.update(SECOND.findall(line))
            if mnemonic[1] not in PADDING:
                counts.update(padding)
                padding = []
    for name, n in counts.items():
        if access := memory_access(name):
            memory[access] += n
        classes[next(kind for kind, begins in CLASSES.items() if name.startswith(begins))] += n
    operations = counts + seconds
    dot = sum(n for name, n in operations.items() if DOT.match(name))
    units: list[Unit] = [unit for unit, pattern in MULTIPLIES.items() if any(map(pattern.match, operations))]
    return Instructions(counts.total(), counts, classes, dot, classes["matrix"], memory, ["fma", *units])


OBJDUMPS = ("/opt/rocm/llvm/bin/llvm-objdump", *(f"llvm-objdump-{v}" for v in range(22, 17, -1)), "llvm-objdump")


def disassemble(data: bytes) -> str:
    """llvm-objdump's listing. Raises UserError without an llvm-objdump that knows the machine."""
    tool = next((path for name in OBJDUMPS if (path := shutil.which(name))), None)
    if tool is None:
        raise UserError("no llvm-objdump found to disassemble GPU code; install LLVM 18 or newer, or ROCm")
    listings, machine = [], parse(data).machine
    with temporary("disassemble") as folder:
        path = folder / "kernels.hsaco"
        for one in objects(data):
            path.write_bytes(one)
            result = subprocess.run([tool, "-d", f"--mcpu={machine}", str(path)], capture_output=True, text=True)
            if result.returncode or "is not a recognized processor" in result.stderr:
                raise UserError(f"{tool} cannot disassemble code for {machine}; install a newer LLVM, or ROCm")
            listings.append(result.stdout)
    return "".join(listings)
