"""The memory that a model needs, and the GPUs for which this is suitable: for `mlc-amd inspect` and `mlc-amd compile`.

In: `Needs`, of an artifact or of a model that is not compiled, and the target and arch in the user's words. Out: data
for JSON output (`plan`), and lines of text (`lines`).
"""

from dataclasses import asdict

from mlc_amd.runtime.artifact.memory import Needs, Room
from mlc_amd.runtime.devices.hip.diagnosis import gpu_memory
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.gpus import CHIPS, MEMORY, Chip
from mlc_amd.runtime.host import RESERVE, SHARED_PART, kfd_gpus
from mlc_amd.tools.checks import machine
from mlc_amd.tools.target import HERE
from mlc_amd.tools.terminal import display


def plan(needs: Needs, kind: str, arch: str, layers: int = 0) -> dict:
    """Bytes by part, and for each device that the arch stands for the number of tokens that fit. layers: of
    --n-cpu-moe."""
    known, others, devices = rooms(kind, arch), apus(kind, arch), []
    if all(room.shared for room in known) if known else arch not in HERE and _unified(kind, arch):
        needs = needs.in_host_memory()
    for room in known:
        there = needs.in_host_memory() if room.shared else needs
        facts = {"needed": there.device(layers), "tokens": there.tokens(room.usable, layers)}
        several = None if kind == "cpu" or room.shared else there.gpus(room.usable)
        devices.append(asdict(room) | facts | {"advice": there.advice(room.usable, layers), "gpus": several})
    host = needs.host(layers)
    found = {"weights": needs.weights - host, "kv": needs.kv, "buffers": needs.buffers, "apus": others}
    found |= {"states": needs.states, "cells": needs.cells, "total": needs.device(layers), "host": host}
    return found | {"n_cpu_moe": layers, "token": needs.token, "context": needs.context, "devices": devices}


def rooms(kind: str, arch: str) -> list[Room]:
    """This machine's device for a native arch; otherwise the products that the arch stands for, the largest first.
    Empty if their memory is unknown, as for most APUs."""
    if arch in HERE:
        return _HERE[kind]()
    if kind == "cpu":
        return []
    found: dict[tuple[int, bool], list[str]] = {}
    for name in arch.split(","):
        for product, unified in _products(name):
            for size in MEMORY.get(product, ()):
                found.setdefault((size << 30, unified), []).append(product)
    return [
        Room(", ".join(dict.fromkeys(names)), size, size // SHARED_PART if unified else size - RESERVE, unified)
        for (size, unified), names in sorted(found.items(), reverse=True)
    ]


def apus(kind: str, arch: str) -> list[str]:
    """Those APUs among the products that the arch stands for whose memory is the system's, of any size."""
    if kind == "cpu" or arch in HERE:
        return []
    found = (product for name in arch.split(",") for product, unified in _products(name) if unified)
    return [product for product in dict.fromkeys(found) if product not in MEMORY]


def _unified(kind: str, arch: str) -> bool:
    """Whether an arch only stands for devices that use the host's memory."""
    return kind == "cpu" or all(_resolve(name).unified for name in arch.split(","))


def _resolve(name: str):
    """The chip, or the Vulkan profile, with this name."""
    from mlc_amd.schedules.gpu.base import arch, profiles

    try:
        return arch.resolve(name)
    except UserError:
        return profiles.resolve(name)


def _products(name: str) -> list[tuple[str, bool]]:
    """(product, whether its memory is the system's) for a GPU or a Vulkan profile. A profile stands for all chips of
    its family; a profile for APUs only for those that it names."""
    from mlc_amd.schedules.gpu.base import arch, profiles

    def known(chip: Chip) -> list[str]:
        return [product for product in chip.products if product in MEMORY]

    chip = _resolve(name)
    if isinstance(chip, profiles.Profile):
        if chip.unified:
            return [(product, True) for product in chip.products if chip.chips]
        base = chip.name.partition(":")[0]
        chips = [chip for chip in CHIPS.values() if profiles.FAMILY_PROFILES.get(chip.family) == base]
        return [(product, chip.unified) for chip in chips for product in known(chip)]
    products = known(chip) or (chip.products if chip.unified else ())
    named = arch.plain(name)
    return [(product, chip.unified) for product in ([named] if named in products else products)]


def _this_cpu() -> list[Room]:
    memory = int(str(machine.cpu()["memory"]))
    return [Room("this machine", memory, memory - RESERVE, True)]


def _this_vulkan_gpu() -> list[Room]:
    """The GPU for which a native arch compiles. For an APU all heaps count, because the driver has already applied
    Linux' limit."""
    from mlc_amd.runtime.devices.vulkan.gpu import list_gpus, preferred

    gpu = preferred(list_gpus())[0]
    memory = sum(heap.size for heap in gpu.heaps if gpu.unified or heap.device_local)
    return [Room(gpu.name, memory, memory - RESERVE, gpu.unified)]


def _this_rocm_gpu() -> list[Room]:
    gpus = kfd_gpus()
    limits = gpu_memory(gpus[0]["pci"]) if gpus else {}
    if not limits:
        return []
    chip = CHIPS.get(gpus[0]["arch"])
    unified = chip is not None and chip.unified
    memory = limits.get("vram", 0) + (limits.get("gtt", 0) if unified else 0)
    return [Room(gpus[0]["arch"], memory, memory - RESERVE, unified)]


_HERE = {"cpu": _this_cpu, "vulkan": _this_vulkan_gpu, "rocm": _this_rocm_gpu}


def lines(found: dict) -> list[tuple[str, str]]:
    """The result of `plan` as lines: (label, text)."""
    parts = (("weights", "weights"), ("kv", f"KV cache ({found['context']} tokens)"), ("buffers", "buffers"))
    total = ", ".join(f"{label} {display.size(found[key])}" for key, label in parts)
    result = [("memory", f"{display.size(found['total'])}: {total}")]
    if found["cells"]:
        each = display.size(found["states"] // found["cells"])
        result.append(("states", f"{display.size(found['states'])} of the KV cache: {found['cells']} states of {each}"))
    if found["host"]:
        result.append(("on host", f"{display.size(found['host'])}: experts, by --n-cpu-moe {found['n_cpu_moe']}"))
    result += [_line(device) for device in found["devices"]]
    if found["apus"]:
        memory = display.size(SHARED_PART * found["total"])
        result.append(
            ("fits", f"APUs ({', '.join(found['apus'])}) with {memory} of memory or more, half of which is the GPU's")
        )
    return result


def _line(device: dict) -> tuple[str, str]:
    shared = ", shared with the system" if device["shared"] else ""
    room = f"{device['name']} ({display.size(device['bytes'])}{shared}; {display.size(device['usable'])} usable)"
    if device["needed"] <= device["usable"]:
        return "fits", f"{room} up to {device['tokens']} tokens"
    advice = [f"{device['gpus']} of them, which share the layers out"] if device["gpus"] else []
    advice += [f"try {' or '.join(device['advice'])}"] if device["advice"] else []
    return "too large", f"for {room}" + (f": {'; or '.join(advice)}" if advice else "")
