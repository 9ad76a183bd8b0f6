"""`mlc-amd inspect` for the SPIR-V modules of vulkan artifacts.

In: an opened artifact. Out: descriptions as plain data for JSON; tables and assembly as text. For AMD GPUs, Mesa's
driver RADV compiles the modules (compiler/codegen/radv.py), without such a GPU, and reports registers, occupancy and
the ISA. Without RADV, and for other GPUs, only the modules themselves are described, and `missing` says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path

from mlc_amd.compiler.codegen import hsaco, radv, spirv_reader
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.profiles import ADDRESS, Profile
from mlc_amd.tools.inspection.inspect_kernels import CELLS, COUNTS_LEGEND, chosen, counted, counts, row, table


class SpirvCode:
    """The modules of one profile, and RADV's results for them. machine: the profile's name. shaders: radv.Shader by
    symbol. missing: why RADV's results are missing or incomplete; "" otherwise."""

    def __init__(self, path: Path, profile: Profile, launches: Mapping[str, Mapping]):
        """path: the file of modules. launches: the manifest's launches of the profile. Raises UserError if a module is
        damaged."""
        self.path, self.profile, self.machine = path, profile, profile.name
        data, steps = path.read_bytes(), [step for kernel in launches.values() for step in kernel["steps"]]
        self.shaders = {step["symbol"]: _shader(step, data) for step in steps}
        try:
            self.facts = {name: spirv_reader.read(shader.code) for name, shader in self.shaders.items()}
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        self.report, self.missing = None, ""
        try:
            self.report = radv.statistics(list(self.shaders.values()), profile)
        except UserError as error:
            self.missing = str(error)
            return
        if self.report.refused:
            name, reason = next(iter(self.report.refused.items()))
            refused = len(self.report.refused)
            self.missing = f"{self.report.device} refuses {refused} of {len(self.shaders)} kernels ({name}: {reason})"

    def describe(self) -> dict:
        """{"file", "machine", "compiler": RADV's name and version or None, "kernels": [{"name", "workgroup": threads,
        "spirv": bytes and spirv_reader.ModuleFacts; and if RADV compiled the kernel: the fields of hsaco.KernelCode,
        "occupancy", "latency", "throughput" and "instructions"}]}."""
        found = {"file": str(self.path), "machine": self.machine, "compiler": self.report and self.report.device}
        return found | {"kernels": [self._kernel(name) for name in self.shaders]}

    def _kernel(self, name: str) -> dict:
        shader, facts = self.shaders[name], self.facts[name]
        told = {"name": name, "workgroup": prod(shader.block), "spirv": {"bytes": len(shader.code)} | asdict(facts)}
        gpu = radv.gpu_of(self.profile)
        if self.report is None or gpu is None or name in self.report.refused:
            return told
        compiled = self.report.kernels[name]
        waves, limit = hsaco.occupancy(compiled.kernel, gpu)
        told |= asdict(compiled.kernel) | {"occupancy": {"waves": waves, "limit": limit}}
        told |= {"latency": compiled.latency, "throughput": compiled.throughput}
        return told | {"instructions": counted(compiled.assembly, name) if compiled.assembly else None}

    def assembly(self, pattern: str) -> dict[str, str]:
        """The ISA of the kernels whose names match a shell pattern; their SPIR-V if RADV is missing. Raises UserError
        if no name matches, or if SPIRV-Tools is needed and missing."""
        wanted = chosen(self.shaders, pattern, self.path)
        texts = {name: kernel.assembly for name, kernel in self.report.kernels.items()} if self.report else {}
        return {
            name: texts.get(name) or f"; {name}\n{spirv_reader.disassemble(self.shaders[name].code)}" for name in wanted
        }


def of_artifact(artifact: Artifact) -> list[SpirvCode]:
    """The modules of an artifact for target vulkan. Raises UserError if one is damaged."""
    manifest = artifact.manifest
    files = {name: artifact.path / file for name, file in manifest["libraries"].items()}
    return [SpirvCode(file, profiles.resolve(name), manifest["launches"][name]) for name, file in files.items()]


def _shader(step: dict, data: bytes) -> radv.Shader:
    start, size = step["code"]
    arguments = 1 if step["table"] else len(step["args"])
    return radv.Shader(step["symbol"], data[start : start + size], tuple(step["block"]), arguments * ADDRESS)


# ---- text


# column -> its cell, for a kernel of `describe`
SPIRV = {
    "bytes": lambda kernel: kernel["spirv"]["bytes"],
    "instructions": lambda kernel: kernel["spirv"]["instructions"],
    "LDS": lambda kernel: kernel["spirv"]["lds"],
    "threads": lambda kernel: kernel["workgroup"],
    "dot": lambda kernel: kernel["spirv"]["dot"],
    "matrix": lambda kernel: kernel["spirv"]["matrix"],
    "capabilities": lambda kernel: " ".join(kernel["spirv"]["capabilities"]),
}
COMPILED = [title for title in CELLS if title not in ("SGPRs", "AGPRs")]
LEGEND = {
    True: f"""LDS, scratch (of a lane) and code in bytes. threads: of a workgroup.
waves: held by a SIMD at once, and what limits them.
latency, throughput (inverse: lower is better): the compiler's estimates in clocks, with a fixed guess of
how often loops run.
{COUNTS_LEGEND}""",
    False: """SPIR-V is no instruction set: its code for a GPU, with registers and waits, is the driver's.
bytes and instructions: of the SPIR-V module. LDS in bytes. threads: of a workgroup. dot, matrix: packed and matrix
products.""",
}


def tables(codes: list[dict]) -> str:
    """The result of `SpirvCode.describe` as text: tables for each profile. Names are in the last column."""
    parts = []
    for code in codes:
        compiled = code["compiler"] is not None
        by = f", compiled by {code['compiler']}" if compiled else ", not compiled"
        shown = table(COMPILED, code["kernels"], row) if compiled else table([*SPIRV], code["kernels"], _spirv)
        parts.append(f"code for {code['machine']}{by}\n{shown}")
        if compiled:
            parts.append(counts(code))
    return "\n".join([*parts, *(LEGEND[kind] for kind in sorted({code["compiler"] is not None for code in codes}))])


def _spirv(kernel: dict, header: Sequence[str]) -> list:
    return [SPIRV[title](kernel) for title in header]
