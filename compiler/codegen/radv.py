"""What AMD GPUs run for our SPIR-V, without such a GPU: Mesa's Vulkan driver RADV compiles kernels for a GPU that the
environment names.

In: SPIR-V modules and the profile that they were made for. Out: a `Compiled` for each: registers, spills, LDS, scratch
memory, the compiler's estimates, the ISA. That is the code that the GPU would run under that Mesa version, as RADV's
compiler (ACO) is the same.

The driver runs in a child process (`radv_worker`), because it is chosen by environment variables and aborts where it
cannot go on. RADV_FORCE_FAMILY, which makes a GPU assumed, is Mesa's: 22.3 to 25 have it for every profile here; 26
dropped it.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mlc_amd.compiler.codegen import hsaco, radv_worker
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.arch import ARCHS, GpuArch
from mlc_amd.schedules.gpu.base.profiles import Profile

# profile: (GPU in LLVM's name, RADV's names of such GPUs, newest Mesa's first: 22.3 called those of RDNA3
# by gfx names)
GPUS = {
    "vangogh": ("gfx1033", ("VANGOGH",)),
    "rdna2": ("gfx1030", ("NAVI21",)),
    "rdna3": ("gfx1100", ("NAVI31", "GFX1100")),
    "rdna4": ("gfx1201", ("GFX1201",)),
    "gfx90c": ("gfx906", ("RENOIR",)),
}
# of the Vulkan loader; the second for loaders before 1.3.234
DRIVER_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
DRIVER_FOLDERS = ("/etc", "/usr/local/share", "/usr/share")
START_S, KERNEL_S = 60, 60  # time limits of the child: to load the driver, for each kernel
INSTALL = "install Mesa 22.3 to 25 (package mesa-vulkan-drivers of Debian 12 or 13, vulkan-radeon of Arch)"


@dataclass(frozen=True)
class Shader:
    """A SPIR-V module with entry point "main"; block: its local size; push: bytes of push constants that it reads."""

    name: str
    code: bytes
    block: tuple[int, int, int]
    push: int


@dataclass(frozen=True)
class Compiled:
    """kernel: registers and memory, as of a code object; VGPRs and LDS are in the units that the GPU allots. latency,
    throughput: ACO's estimates "Latency" and "Inverse Throughput" in clocks of a wave, which count a loop's body a
    fixed number of times: they compare kernels of the same loops. assembly: LLVM's syntax from the label `<name>:`, ""
    if the driver was built without a disassembler."""

    kernel: hsaco.KernelCode
    latency: int
    throughput: int
    assembly: str


@dataclass(frozen=True)
class Report:
    """device: what the driver calls itself and the GPU, with its version. kernels: by the shader's name. refused: the
    others', with the driver's reason; an old one does not know all that a module may use, such as cooperative
    matrices."""

    device: str
    kernels: dict[str, Compiled]
    refused: dict[str, str]


def gpu_of(profile: Profile) -> GpuArch | None:
    """The GPU that RADV is to assume for a profile, as an arch of LLVM (for occupancy); None for those of other
    makers."""
    entry = _gpu(profile)
    return ARCHS[entry[0]] if entry else None


def statistics(shaders: list[Shader], profile: Profile) -> Report:
    """Compiles all shaders as the runtime would: subgroups of profile.wave invocations, push constants.

    UserError if the profile is not AMD's, or without a RADV that knows the GPU.
    """
    entry, driver = _gpu(profile), find_driver()
    if entry is None:
        raise UserError(f"RADV compiles for AMD GPUs only, not for profile {profile.name}")
    request = [
        vars(shader) | {"code": base64.b64encode(shader.code).decode(), "wave": profile.wave} for shader in shaders
    ]
    for family in entry[1]:
        device, answers, complaint = _child(driver, family, request)
        if device:
            break
    else:
        raise UserError(
            f"{driver} cannot compile for {' or '.join(entry[1])} without such a GPU ({complaint}); {INSTALL}"
        )
    while len(answers) < len(request):  # it crashed: go on after the shader that made it
        answers.append({"error": complaint})
        _, more, complaint = _child(driver, family, request[len(answers) :])
        answers += more
    shown = {shader.name: (shader, answer) for shader, answer in zip(shaders, answers, strict=True)}
    kernels = {
        name: _compiled(shader, profile, answer) for name, (shader, answer) in shown.items() if "error" not in answer
    }
    return Report(device, kernels, {name: answer["error"] for name, (_, answer) in shown.items() if "error" in answer})


def find_driver() -> Path:
    """RADV's manifest file: the one that the environment chooses, else an installed one. UserError if there is none."""
    named = (name for variable in DRIVER_VARIABLES for name in os.environ.get(variable, "").split(":"))
    chosen = [Path(name) for name in named if "radeon" in name]
    installed = [
        file for folder in DRIVER_FOLDERS for file in sorted(Path(folder, "vulkan/icd.d").glob("radeon_icd*.json"))
    ]
    found = next((file for file in chosen + installed if file.is_file()), None)
    if found is None:
        raise UserError(f"RADV, Mesa's Vulkan driver for AMD GPUs, is not installed; {INSTALL}")
    return found


def _gpu(profile):
    return GPUS.get(profile.name.partition(":")[0])


def _child(driver: Path, family: str, request: list[dict]) -> tuple[str, list[dict], str]:
    """(what device the child found or "", its answers, what it complained of if it ended early)."""
    environment = os.environ | dict.fromkeys(DRIVER_VARIABLES, str(driver))
    environment |= {radv_worker.FAMILY: family, "MESA_SHADER_CACHE_DISABLE": "true"}
    command = [sys.executable, "-m", radv_worker.__name__]
    limit = START_S + KERNEL_S * len(request)
    try:
        done = subprocess.run(
            command, input=json.dumps(request), env=environment, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return "", [], f"it took longer than {limit} s"
    if done.returncode > 0 and done.returncode != radv_worker.UNUSABLE:
        raise RuntimeError(f"radv_worker failed: {done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    complaint = done.stderr.strip().splitlines()[-1:]
    if done.returncode < 0:
        complaint.insert(0, f"it crashed with {signal.Signals(-done.returncode).name}")
    return lines[0]["device"] if lines else "", lines[1:], ": ".join(complaint)


def _compiled(shader: Shader, profile: Profile, answer: dict) -> Compiled:
    found = answer["statistics"]
    kernel = hsaco.KernelCode(
        name=shader.name,
        wave=profile.wave,
        threads=prod(shader.block),
        vgprs=found["VGPRs"],
        agprs=0,
        sgprs=found["SGPRs"],
        vgpr_spills=found["Spilled VGPRs"],
        sgpr_spills=found["Spilled SGPRs"],
        lds=found["LDS size"],
        scratch=found["Scratch size"] // profile.wave,  # RADV reports that of a wave
        code=found["Code size"],
        kernarg=shader.push,
        args=(),
    )
    return Compiled(kernel, found["Latency"], found["Inverse Throughput"], _assembly(shader.name, answer["assembly"]))


def _assembly(name: str, text: str) -> str:
    """The driver's listing without the encodings, with local labels that LLVM's texts have, under the kernel's own
    label."""
    if not text:
        return ""
    lines = (re.sub(r"\bBB(\d+)\b", r".LBB\1", line.partition(";")[0].rstrip()) for line in text.splitlines())
    return f"{name}:\n" + "".join(line + "\n" for line in lines if line)
