"""Facts of this machine that several packages need."""

import logging
import os
from pathlib import Path

from mlc_amd.runtime.errors import UserError

CGROUP = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
# Bytes of a GPU's own memory that plans leave to the driver, the desktop and other programs; llama.cpp leaves as much.
RESERVE = 1 << 30
# Plans use 1 / SHARED_PART of an APU's shared memory, because Linux lets the GPU use half of it (ttm.pages_limit raises
# this), and 1 / HOST_PART of the host's available memory for a cache of automatic size.
SHARED_PART = HOST_PART = 2

log = logging.getLogger("mlc_amd")


def available_threads() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def selected_threads(device: str | None) -> int:
    """The number of threads from `--device` for a CPU; None: all cores. Raises UserError for no positive number."""
    if device is None:
        return available_threads()
    if not str(device).isdecimal() or int(device) == 0:
        raise UserError(f"--device {device}: for target cpu it is the number of threads")
    return int(device)


def last_level_cache() -> int:
    """Bytes of the largest cache of cpu0 that Linux reports; 32 MiB if it reports none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes, default=32 << 20)


def available_memory() -> int:
    """Bytes to allocate without swapping: Linux's estimate, limited by the control group; 0 if neither is known."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError):
        log.debug("/proc/meminfo does not report the available memory")
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            found.append(max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        log.debug("there is no control group with a memory limit")
    return min(found, default=0)


def cpu_flags() -> frozenset[str]:
    """The names of this CPU's instruction sets in /proc/cpuinfo; empty if it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.split(":", 1)[1].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, ()))


def kfd_gpus(topology: Path = TOPOLOGY) -> list[dict]:
    """The GPUs that the kernel's compute driver (KFD) reports: `arch` (of the chip itself, ignoring overrides), `node`
    (render node), `pci` (address). Read from topology/nodes/*/properties: gfx_target_version is major*10000 + minor*100
    + stepping, location_id is bus<<8 | device<<3 | function."""
    found = []
    for file in sorted(topology.glob("*/properties"), key=lambda f: int(f.parent.name)):
        try:
            facts = dict(line.split(None, 1) for line in file.read_text().splitlines() if " " in line)
        except OSError:  # a node that this container may not access
            continue
        version, place = int(facts.get("gfx_target_version", 0)), int(facts.get("location_id", 0))
        if version:
            found.append({
                "arch": f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
                "node": f"/dev/dri/renderD{facts.get('drm_render_minor', '0').strip()}",
                "pci": f"{int(facts.get('domain', 0)):04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}",
            })  # fmt: skip
    return found


def join_group(file: Path) -> str:
    """The advice how to get permission for a device file."""
    import grp  # not on Windows

    try:
        group = grp.getgrgid(file.stat().st_gid).gr_name
    except (KeyError, OSError):  # a group of the host that the container does not know
        return "in a container, pass --group-add with the group number of the host's render group"
    group = "render" if group == "root" else group
    return f"join its group: sudo usermod -aG {group} $USER, then log in again"
