"""Finds out why HIP finds no GPU: the driver, permissions, a variable that hides GPUs, or a runtime that does not
support the chip. In: HIP's error, and files of Linux. Out: one line for the user."""

import os
from pathlib import Path

from mlc_amd.runtime.host import TOPOLOGY, join_group, kfd_gpus

KFD, WSL = Path("/dev/kfd"), Path("/dev/dxg")
HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def gpu_memory(pci: str, devices: Path = Path("/sys/bus/pci/devices")) -> dict[str, int]:
    """{"vram": bytes of the GPU's own memory (of an APU's carve-out), "gtt": bytes of system memory that it may use}.
    Empty if unknown. pci: the GPU's address."""
    sizes = {}
    for kind in ("vram", "gtt"):
        file = devices / pci / f"mem_info_{kind}_total"
        if file.exists():
            sizes[kind] = int(file.read_text())
    return sizes


def why_no_gpu(code: str, version: tuple[int, int], kfd: Path = KFD, topology: Path = TOPOLOGY) -> str:
    """One line for the user: what is wrong, and what to do. code: HIP's error; version: of the HIP runtime."""
    gpus, hiding = kfd_gpus(topology), [name for name in HIDING if name in os.environ]
    blocked = [gpu["node"] for gpu in gpus if not os.access(gpu["node"], os.R_OK | os.W_OK)]
    archs = ", ".join(gpu["arch"] for gpu in gpus)
    driver = "load the kernel driver (modprobe amdgpu); in a container, pass --device /dev/kfd --device /dev/dri"
    reasons = (  # (whether it applies, text); the first that applies is returned
        (
            code == "hipErrorInsufficientDriver",
            "the kernel driver is too old for this HIP runtime; install a newer kernel or amdgpu-dkms",
        ),
        (
            WSL.exists() and not kfd.exists(),
            "no GPU for ROCm in WSL; install AMD's WSL driver and librocdxg, or run on Linux itself",
        ),
        (not kfd.exists(), f"no {kfd}: no AMD GPU for ROCm; {driver}"),
        (not os.access(kfd, os.R_OK | os.W_OK), f"no permission on {kfd}; {join_group(kfd)}"),
        (not gpus, f"the kernel driver reports no AMD GPU for compute; check that one is installed, then {driver}"),
        (blocked, f"no permission on {', '.join(blocked)}; {join_group(Path(blocked[0])) if blocked else ''}"),
        (hiding, f"the GPU ({archs}) may be hidden by {' and '.join(hiding)}; unset it"),
    )
    unknown = (
        f"HIP {version[0]}.{version[1]} does not support this GPU ({archs}, {code}); install a newer ROCm, or try "
        f"{OVERRIDE} (README)"
    )
    return next((text for holds, text in reasons if holds), unknown)
