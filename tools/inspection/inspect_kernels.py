"""`mlc-amd inspect` for GPU code: the code objects of rocm artifacts, and any HSACO file.

In: an opened artifact, or a file. Out: descriptions as plain data for JSON; tables and assembly as text. Instruction
counts and assembly come from the text that `mlc-amd compile` stores next to its code objects (`kernels-<arch>.s.gz`,
LLVM's assembly), else from llvm-objdump. Without both they are None, and `missing` says why.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.manifest import MANIFEST
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.arch import ARCHS
from mlc_amd.tools.terminal import display

SUFFIXES = (".hsaco", ".co")
MAGICS = (b"\x7fELF", b"__CLANG_OFFLOAD_BUNDLE__")
_LONGEST = 64 << 20  # limit of the assembly in bytes; models have some millions
KERNEL_END = re.compile(r"(?<=.)_kernel(_\d+)?$")  # end of a symbol, including those of a call's further launches
FUNCTION_ENDS = ("\t.section", ".Lfunc_end")  # in LLVM's text, what follows a function describes it for the assembler


def is_code_object(path: Path) -> bool:
    """Whether a file is to be read as GPU code, by its name or its first bytes; `describe` then reports errors in it.
    Raises UserError for what is not a regular file, such as a pipe."""
    with json_files.open_file(path) as file:
        return path.suffix.lower() in SUFFIXES or file.read(32).startswith(MAGICS)


class GpuCode:
    """One code object and its assembly. machine: gfx name. kernels: hsaco.KernelCode by name. occupancies: by name, see
    `describe`. functions: assembly lines by label; None if there is no way to get them. missing: why, and what to
    install; "" otherwise."""

    def __init__(self, path: Path, launched: dict[str, int] | None = None):
        """launched: threads of a workgroup by kernel, if known. Raises UserError if the file is no code object, or is
        damaged."""
        self.path, self.launched = path, launched or {}
        data = path.read_bytes()
        try:
            code = hsaco.parse(data)
            self.machine, self.kernels, self.missing = code.machine, code.kernels, ""
            self.occupancies = {name: self._occupancy(kernel) for name, kernel in code.kernels.items()}
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        except (KeyError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(f"{path}: damaged AMD code object ({why}); make it again") from error
        try:
            self.functions = split(_kept(path) or hsaco.disassemble(data))
        except UserError as error:
            again = ", or compile the model again: its assembly is kept then" if launched else ""
            self.functions, self.missing = None, f"{error}{again}"

    def describe(self) -> dict:
        """{"file", "machine", "kernels": [fields of hsaco.KernelCode, "workgroup", "occupancy", "instructions"]}."""
        kernels = []
        for name, kernel in self.kernels.items():
            found = asdict(kernel) | {"workgroup": self.launched.get(name), "occupancy": self.occupancies[name]}
            lines = (self.functions or {}).get(name)
            kernels.append(found | {"instructions": lines and counted("\n".join(lines), name)})
        return {"file": str(self.path), "machine": self.machine, "kernels": kernels}

    def _occupancy(self, kernel: hsaco.KernelCode) -> dict | None:
        """How many waves a SIMD holds, and what limits them; None for an unknown GPU."""
        if self.machine not in ARCHS:
            return None
        waves, limit = hsaco.occupancy(kernel, ARCHS[self.machine], self.launched.get(kernel.name))
        return {"waves": waves, "limit": limit}

    def assembly(self, pattern: str) -> dict[str, str]:
        """The assembly of the kernels whose names match a shell pattern (see `chosen`). Raises UserError if there are
        none."""
        wanted = chosen(self.kernels, pattern, self.path)
        if self.functions is None:
            raise UserError(f"{self.path}: no assembly to show: {self.missing}")
        if absent := [name for name in wanted if name not in self.functions]:
            shown = "llvm-objdump -d shows what is there"
            raise UserError(f"{self.path}: the disassembly has no function {absent[0]}; {shown}")
        return {name: "\n".join(self.functions[name]) + "\n" for name in wanted}


def counted(assembly: str, name: str) -> dict:
    """Static counts of a kernel's instructions. Memory operations are counted by "space access bytes", such as "global
    load 16"."""
    counts = hsaco.instructions(assembly, name)
    memory = {f"{space} {access} {size}": n for (space, access, size), n in sorted(counts.memory.items())}
    return asdict(counts) | {"memory": memory} | {key: dict(vars(counts)[key]) for key in ("by_mnemonic", "classes")}


def chosen(names: Iterable[str], pattern: str, path: Path) -> list[str]:
    """The kernels whose names match a shell pattern; "_kernel" at the end may be left out. Raises UserError if there
    are none."""
    wanted = [name for name in names if any(fnmatchcase(one, pattern) for one in (name, KERNEL_END.sub(r"\1", name)))]
    if not wanted:
        raise UserError(f"{path}: no kernel is called {pattern!r}; --kernels lists them, --asm '*' means all")
    return wanted


def of_artifact(artifact: Artifact) -> list[GpuCode]:
    """The code objects of an artifact for target rocm. Raises UserError if one is damaged."""
    manifest, codes = artifact.manifest, []
    for arch, file in manifest["libraries"].items():
        steps = [step for kernel in manifest["launches"][arch].values() for step in kernel["steps"]]
        codes.append(GpuCode(artifact.path / file, {step["symbol"]: prod(step["block"]) for step in steps}))
    return codes


def _kept(path: Path) -> str | None:
    """The assembly that is stored next to the code object of an artifact. It is only used in artifacts, as elsewhere
    nothing guarantees that the two belong together. Raises UserError if it is damaged."""
    file = path.with_suffix(".s.gz")
    if not file.is_file() or not (path.parent / MANIFEST).is_file():
        return None
    try:
        with gzip.open(file) as stream:
            text = stream.read(_LONGEST + 1).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{file} is damaged ({error}); remove it or compile the model again") from error
    if len(text) > _LONGEST:
        raise UserError(f"{file} has more than {_LONGEST} bytes of assembly; remove it or compile the model again")
    return text


def split(assembly: str) -> dict[str, list[str]]:
    """Splits LLVM's assembly text, or llvm-objdump's output, into functions: label to lines, beginning with the
    label's. Local labels remain inside."""
    functions, lines = {}, []
    for line in assembly.splitlines():
        if line.startswith(FUNCTION_ENDS):
            lines = []
        elif (label := hsaco.LABEL.match(line)) and not hsaco.LOCAL_LABEL.match(label[1]):
            lines = functions[label[1]] = [line]
        elif lines:
            lines.append(line)
    return functions


# ---- text


# column -> its cell, for a kernel described here or in inspect_vulkan.py
CELLS = {
    "VGPRs": lambda kernel: kernel["vgprs"],
    "SGPRs": lambda kernel: kernel["sgprs"],
    "AGPRs": lambda kernel: kernel["agprs"],
    "LDS": lambda kernel: kernel["lds"],
    "scratch": lambda kernel: kernel["scratch"],
    "spills": lambda kernel: kernel["vgpr_spills"] + kernel["sgpr_spills"],
    "threads": lambda kernel: kernel["workgroup"] or kernel["threads"],
    "waves": lambda kernel: (kernel["occupancy"] or NOTHING)["waves"],
    "limit": lambda kernel: (kernel["occupancy"] or NOTHING)["limit"],
    "code": lambda kernel: kernel["code"],
    "latency": lambda kernel: kernel["latency"],
    "throughput": lambda kernel: kernel["throughput"],
}
NOTHING = {"waves": "-", "limit": "-"}
MEMORY = ("global", "flat", "buffer")
# the same for the counts of its instructions
COUNTED = {
    "VALU": lambda counts: counts["classes"].get("vector", 0),
    "dot": lambda counts: counts["dot"],
    "matrix": lambda counts: counts["matrix"],
    "SALU": lambda counts: counts["classes"].get("scalar", 0),
    "LDS": lambda counts: counts["classes"].get("lds", 0),
    "memory": lambda counts: counts["classes"].get("memory", 0),
    "waits": lambda counts: counts["classes"].get("waits", 0),
    "loads": lambda counts: loads(counts, MEMORY),
    "LDS loads": lambda counts: loads(counts, ("ds",)),
}
REGISTERS = [title for title in CELLS if title not in ("latency", "throughput")]
LEFT = ("limit", "loads", "LDS loads", "capabilities")
LEGEND = """LDS, scratch (of a lane) and code in bytes. threads: of a workgroup (for a lone file, the maximum).
waves: held by a SIMD at once, and what limits them."""
COUNTS_LEGEND = """static counts: of the code, whatever its loops repeat. VALU: vector instructions, with dot products,
without matrix: WMMA and MFMA. SALU: scalar instructions and loads. memory: global and scratch.
waits: also barriers and delays. loads: instructions x bytes a lane reads."""


def tables(codes: list[dict]) -> str:
    """The result of `GpuCode.describe` as text: two tables for each code object. Names are in the last column, as they
    may be very long, and without "_kernel"."""
    parts = []
    for code in codes:
        parts.append(f"code of {code['machine']}\n{table(REGISTERS, code['kernels'], row)}")
        parts.append(counts(code))
    return "\n".join([*parts, LEGEND, COUNTS_LEGEND])


def counts(code: dict) -> str:
    """The table of instructions by class, for a code object or for the code of a driver's compiler."""
    return f"static instruction counts, {code['machine']}\n{table([*COUNTED], code['kernels'], counted_row)}"


def table(header: Sequence[str], kernels: list[dict], row: Callable[[dict, Sequence[str]], list]) -> str:
    """A table with a row for each kernel, which ends with its name."""
    right = [i for i, title in enumerate(header) if title not in LEFT]
    rows = [(*row(kernel, header), KERNEL_END.sub(r"\1", kernel["name"])) for kernel in kernels]
    return display.table((*header, "kernel"), rows, right)


def row(kernel: dict, header: Sequence[str]) -> list:
    return [CELLS[title](kernel) if "vgprs" in kernel else "-" for title in header]


def counted_row(kernel: dict, header: Sequence[str]) -> list:
    found = kernel.get("instructions")
    return [COUNTED[title](found) if found else "-" for title in header]


def loads(counts: dict, spaces: tuple[str, ...]) -> str:
    """Loads from these spaces by bytes per lane, the widest first: "4x16 1x2". "0" if there are none."""
    widths: dict[int, int] = {}
    for key, n in counts["memory"].items():
        space, access, size = key.split()
        if space in spaces and access == "load":
            widths[int(size)] = widths.get(int(size), 0) + n
    return " ".join(f"{n}x{size}" for size, n in sorted(widths.items(), reverse=True)) or "0"
