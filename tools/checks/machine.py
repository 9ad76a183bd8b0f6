"""Facts about this machine: CPU, memory, GPUs with their clocks and firmware, compilers, packages. `doctor` judges
them."""

import importlib.util
import os
import platform
import shutil
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from mlc_amd.runtime.devices.hip import api as hip
from mlc_amd.runtime.devices.hip import diagnosis
from mlc_amd.runtime.devices.hip.gpu import list_gpus as hip_gpus
from mlc_amd.runtime.devices.vulkan import api, drivers, gpu
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags, kfd_gpus

# Instruction sets that the cpu kernels can use: name in LLVM's and llama.cpp's words -> flag in /proc/cpuinfo.
_ISA_FLAGS = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX-VNNI": "avx_vnni",
    "AVX512BW": "avx512bw",
    "AVX512-VNNI": "avx512_vnni",
    "AVX512-BF16": "avx512_bf16",
    "AMX-INT8": "amx_int8",
}
CARDS, AMD = Path("/sys/class/drm"), "0x1002"
# amdgpu's clocks of shaders and memory (the kernel's documentation: gpu/amdgpu/thermal).
CLOCKS = {"sclk": "pp_dpm_sclk", "mclk": "pp_dpm_mclk"}
_VENDORS = {"0x1002": "AMD", "0x10de": "NVIDIA", "0x8086": "Intel", "0x1af4": "virtio"}
# What Vulkan kernels use if a device has it, in the form of a profile's needs.
_ALL = {
    "features": ["shaderFloat16", "shaderIntegerDotProduct", "subgroupSizeControl", "vulkanMemoryModel"],
    "fragments": [[16, 16, 16]],
    "shared_memory": 0,
    "threads": 0,
    "push_constants": 0,
}


def packages() -> list[dict[str, object]]:
    """The requirements of this package: name, wanted versions, installed version (None: not installed), whether it
    fits. Empty if this is no installed package but a copy that only runs compiled models."""
    try:
        wanted = metadata.requires("mlc-amd") or ()
    except metadata.PackageNotFoundError:
        return []
    from packaging.requirements import Requirement  # such a copy may lack this package

    found = []
    for line in wanted:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        ok = version is not None and requirement.specifier.contains(version, prereleases=True)
        found.append({"name": requirement.name, "wanted": str(requirement.specifier), "found": version, "ok": ok})
    return found


def cpu() -> dict[str, object]:
    """Name, usable cores, instruction sets, memory in bytes (total, available)."""
    flags = cpu_flags()
    memory = _fields("/proc/meminfo")
    return {
        "name": _fields("/proc/cpuinfo").get("model name", "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [name for name, flag in _ISA_FLAGS.items() if flag in flags],
        "memory": _kilobytes(memory.get("MemTotal")),
        "available": _kilobytes(memory.get("MemAvailable")),
    }


def _fields(path: str) -> dict[str, str]:
    """The "key : value" lines of a /proc file, the first line of each key. Empty if the file does not exist."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for key, _, value in (line.partition(":") for line in lines):
        found.setdefault(key.strip(), value.strip())
    return found


def _kilobytes(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0


def tvm() -> dict[str, object]:
    """Imports TVM. Returns its version, LLVM's version, its code generators for CPU and GPU, and the seconds; `error`
    instead if this fails; nothing if TVM or the compiler is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("tvm", "mlc_amd.compiler")):
        return {}
    start = time.perf_counter()
    try:
        import tvm
        from tvm.target import codegen

        names = set(codegen.llvm_get_targets())
        found: dict[str, object] = {
            "version": tvm.__version__,
            "llvm": codegen.llvm_version_major(),
            "amdgpu": "amdgcn" in names,
            "x86": "x86_64" in names,
        }
    except Exception as error:  # a broken native library may raise anything; the purpose here is to report it
        return {"error": f"{type(error).__name__}: {error}"}
    return found | {"seconds": round(time.perf_counter() - start, 2)}


def linkers() -> dict[str, str | None]:
    """Programs that can link kernels, with their paths; None: not installed."""
    found = {name: shutil.which(name) for name in ("cc", "gcc", "clang", "ld.lld")}
    spec = importlib.util.find_spec("ziglang")
    return found | {"ziglang": str(Path(spec.origin).parent) if spec and spec.origin else None}


def gpus() -> list[dict[str, object]]:
    """The graphics cards that the kernel reports: vendor, PCI id, driver, render node, and whether this user may open
    the node."""
    found = []
    for card in _cards(CARDS):
        vendor = card / "device" / "vendor"
        if not vendor.exists():
            continue
        vendor_id, device_id = vendor.read_text().strip(), (card / "device" / "device").read_text().strip()
        driver = card / "device" / "driver"
        nodes = [Path("/dev/dri") / node.name for node in sorted((card / "device" / "drm").glob("renderD*"))]
        found.append({
            "card": card.name,
            "vendor": _VENDORS.get(vendor_id, vendor_id),
            "id": device_id,
            "driver": os.readlink(driver).rsplit("/", 1)[-1] if driver.is_symlink() else None,
            "node": str(nodes[0]) if nodes else None,
            "usable": bool(nodes) and os.access(nodes[0], os.R_OK | os.W_OK),
        })  # fmt: skip
    return found


def _cards(root: Path) -> list[Path]:
    """The folders of cards, without those of their connectors such as card0-DP-1."""
    return [card for card in sorted(root.glob("card[0-9]*")) if "-" not in card.name]


def amd_cards(root: Path = CARDS) -> list[dict]:
    """What amdgpu reports about each AMD card: {"card", "id", "pci", "vbios", "clocks": {name: {"levels": [MHz], "now":
    MHz or None}}, "level": of power management, "firmware": {name: version}}. Missing values are left out."""
    found = []
    for card in _cards(root):
        device = card / "device"
        if _text(device / "vendor") != AMD:
            continue
        clocks = {name: _clock(_text(device / file)) for name, file in CLOCKS.items()}
        files = sorted((device / "fw_version").glob("*_fw_version"))
        firmware = {file.name.removesuffix("_fw_version"): _text(file) for file in files}
        found.append({
            "card": card.name,
            "id": _text(device / "device"),
            "pci": device.resolve().name,
            "vbios": _text(device / "vbios_version"),
            "level": _text(device / "power_dpm_force_performance_level"),
            "clocks": {name: clock for name, clock in clocks.items() if clock["levels"]},
            "firmware": {name: version for name, version in firmware.items() if version},
        })  # fmt: skip
    return found


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip() or None
    except OSError:  # it does not exist, or this user may not read it
        return None


def _clock(text: str | None) -> dict:
    """The levels in lines such as "1: 2124Mhz *". The asterisk marks the current level."""
    levels, now = [], None
    for line in (text or "").splitlines():
        _, _, rest = line.partition(":")
        digits = rest.strip().lower().partition("mhz")[0]
        if not digits.isdecimal():
            continue
        levels.append(int(digits))
        now = levels[-1] if rest.rstrip().endswith("*") else now
    return {"levels": levels, "now": now}


def kfd() -> dict[str, bool]:
    """AMD's compute device, which ROCm needs: whether it exists, and whether this user may open it."""
    return {"present": Path("/dev/kfd").exists(), "usable": os.access("/dev/kfd", os.R_OK | os.W_OK)}


def rocm() -> dict[str, object]:
    """AMD's HIP runtime: the version of the bindings, that of the runtime, its GPUs, the chips that the kernel reports,
    HSA_OVERRIDE_GFX_VERSION. `problem` says why kernels cannot run (None: they can)."""
    installed = next((d.version for d in metadata.distributions(name="rocm-bindings-hip")), None)
    found: dict[str, object] = {"bindings": installed, "runtime": None, "gpus": [], "chips": kfd_gpus()}
    found |= {"problem": None, "override": os.environ.get(diagnosis.OVERRIDE)}
    try:
        bindings = hip.open_bindings()
    except UserError as error:
        return found | {"problem": str(error)}
    version = hip.runtime_version(bindings)
    found["runtime"] = ".".join(map(str, version))
    try:
        found["gpus"] = [asdict(gpu) for gpu in hip_gpus(hip.Hip(bindings))]
    except hip.HipError as error:
        found["problem"] = diagnosis.why_no_gpu(error.code, version)
    return found


def rocm_linker() -> dict[str, str | None]:
    """The path of the linker for AMD code objects that the compiler would use; or `problem` if there is none."""
    from mlc_amd.compiler.codegen.rocm import find_linker  # imports TVM

    try:
        return {"command": " ".join(find_linker()), "problem": None}
    except UserError as error:
        return {"command": None, "problem": str(error)}


def distribution() -> list[str]:
    """The names of this Linux distribution and of the distributions that it is derived from, the nearest first, from
    os-release: ["ubuntu", "debian"]. Empty if unknown."""
    try:
        found = platform.freedesktop_os_release()
    except OSError:
        return []
    return [found["ID"], *found.get("ID_LIKE", "").split()]


def vulkan() -> dict[str, object]:
    """Vulkan: whether its loader is installed, the installed drivers (their manifests), the devices with the profile to
    compile for. `lacks` of a device: what some profile uses, but the device does not have. `problem` says why there is
    no device (None: there is one). `failed`: the drivers that fail to start, as drivers.Failure, with the whole message
    as `text`; only listed if Vulkan shows no GPU, as they do not matter otherwise."""
    installed = [str(manifest) for manifest in drivers.manifests()]
    found = {"loader": False, "drivers": installed, "devices": [], "failed": [], "problem": None}
    try:
        api.open_loader()
        found["loader"] = True
        found["devices"] = [_vulkan_device(one) for one in gpu.list_gpus()]
    except (UserError, api.VulkanError) as error:  # a driver without its hardware may fail in any way
        found["problem"] = str(error)
    if all(device["type"] == "cpu" for device in found["devices"]):
        found["failed"] = [asdict(one) | {"text": str(one)} for one in drivers.failures()]
    return found


def _vulkan_device(one: gpu.VulkanGpu) -> dict[str, object]:
    return {
        "index": one.index,
        "name": one.name,
        "type": one.type,
        "vendor": f"0x{one.vendor:04x}",
        "driver": one.driver,
        "api": api.version_text(one.api),
        "memory": sum(heap.size for heap in one.heaps if heap.device_local),
        "host_memory": 0 if one.unified else sum(heap.size for heap in one.heaps if not heap.device_local),
        "profile": gpu.profile_of(one),
        "lacks": gpu.missing(one, _ALL | {"subgroup_size": one.subgroup[0]}),
    }
