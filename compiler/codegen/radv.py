"""Compiles SPIR-V kernels to the code that AMD GPUs run, without such a GPU: Mesa's Vulkan driver RADV compiles for a
GPU that an environment variable names.

In: SPIR-V modules and the profile for which they were made. Out: a `Compiled` for each: registers, spills, LDS, scratch
memory, estimates of the compiler, and the ISA. RADV's compiler (ACO) is the same as on a machine with the GPU, so this
is the code that the GPU would run under this version of Mesa.

The driver runs in a child process (`radv_worker`), because environment variables choose it, and because it may abort.
RADV_FORCE_FAMILY, the variable that names the GPU, is Mesa's: versions 22.3 to 25 have it for every profile here; 26
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

# profile: (LLVM's name of the GPU, RADV's names of it, those of the newest Mesa first: Mesa 22.3 has gfx names for
# RDNA3)
GPUS = {
    "vangogh": ("gfx1033", ("VANGOGH",)),
    "rdna2": ("gfx1030", ("NAVI21",)),
    "rdna3": ("gfx1100", ("NAVI31", "GFX1100")),
    "rdna4": ("gfx1201", ("GFX1201",)),
    "gfx90c": ("gfx906", ("RENOIR",)),
}
# variables of the Vulkan loader that choose the driver; the second is for loaders before 1.3.234
DRIVER_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
DRIVER_FOLDERS = ("/etc", "/usr/local/share", "/usr/share")
START_S, KERNEL_S = 60, 60  # time limits of the child, seconds: to load the driver, and for each kernel
INSTALL = "install Mesa 22.3 to 25 (package mesa-vulkan-drivers of Debian 12 or 13, vulkan-radeon of Arch)"


@dataclass(frozen=True)
class Shader:
    """A SPIR-V module with entry point "main". block: its local size. push: bytes of push constants that it reads."""

    name: str
    code: bytes
    block: tuple[int, int, int]
    push: int


@dataclass(frozen=True)
class Compiled:
    """A compiled shader. kernel: registers and memory, as of a code object; VGPRs and LDS are rounded up to allocation
    units. latency, throughput: ACO's estimates "Latency" and "Inverse Throughput", in clocks of a wave. ACO assumes a
    fixed number of iterations for each loop, so only kernels with the same loops can be compared. assembly: LLVM's
    syntax, from the label `<name>:` on; "" if the driver was built without a disassembler."""

    kernel: hsaco.KernelCode
    latency: int
    throughput: int
    assembly: str


@dataclass(frozen=True)
class Report:
    """device: the names of driver and GPU, and the driver's version. kernels: by the shader's name. refused: the
    driver's reason for each shader that it refused; old drivers lack features such as cooperative matrices."""

    device: str
    kernels: dict[str, Compiled]
    refused: dict[str, str]


def gpu_of(profile: Profile) -> GpuArch | None:
    """The GPU for which RADV compiles a profile's kernels, as a GpuArch of LLVM (for occupancy). None for profiles of
    other vendors."""
    entry = _gpu(profile)
    return ARCHS[entry[0]] if entry else None


def statistics(shaders: list[Shader], profile: Profile) -> Report:
    """Compiles all shaders as the runtime would: with subgroups of profile.wave invocations, and push constants.

    Raises UserError if the profile is not an AMD GPU's, or if there is no RADV that knows the GPU.
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
    while len(answers) < len(request):  # the driver crashed: continue after the shader that crashed it
        answers.append({"error": complaint})
        _, more, complaint = _child(driver, family, request[len(answers) :])
        answers += more
    shown = {shader.name: (shader, answer) for shader, answer in zip(shaders, answers, strict=True)}
    kernels = {
        name: _compiled(shader, profile, answer) for name, (shader, answer) in shown.items() if "error" not in answer
    }
    return Report(device, kernels, {name: answer["error"] for name, (_, answer) in shown.items() if "error" in answer})


def find_driver() -> Path:
    """RADV's manifest file: the one that the environment chooses, else an installed one. Raises UserError if there is
    none."""
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
    """(name of the device that the child found, or ""; the child's answers; the last message on stderr, if the child
    ended early)."""
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
        scratch=found["Scratch size"] // profile.wave,  # RADV reports the bytes of a wave
        code=found["Code size"],
        kernarg=shader.push,
        args=(),
    )
    return Compiled(kernel, found["Latency"], found["Inverse Throughput"], _assembly(shader.name, answer["assembly"]))


def _assembly(name: str, text: str) -> str:
    """The driver's listing without encodings, under the kernel's label, with local labels in LLVM's form."""
    if not text:
        return ""
    lines = (re.sub(r"\bBB(\d+)\b", r".LBB\1", line.partition(";")[0].rstrip()) for line in text.splitlines())
    return f"{name}:\n" + "".join(line + "\n" for line in lines if line)
