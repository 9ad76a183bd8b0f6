"""Computes the memory that a model needs, by part, and what fits a GPU. No device is opened.

Experts may stay in host memory, as with llama.cpp's --n-cpu-moe. They are most of a model's bytes, but a step reads
only a few of them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mlc_amd.runtime.artifact.manifest import RANK, Manifest
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.errors import UserError

CONTEXT_STEP = 64  # tokens: proposed capacities are multiples of this, like all capacities that are compiled
RING = 4  # copies of the scratch memory in the vulkan device, so that independent kernels may overlap
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|gate_up|down)_exps\.weight\b")


@dataclass(frozen=True)
class Needs:
    """Bytes by part."""

    weights: int  # packed weights, experts included
    experts: tuple[int, ...]  # part of `weights`: the experts' matrices of each layer; 0 for a layer without experts
    kv: int  # KV cache at a capacity of `context` tokens, and states of sequences
    token: int  # for one more token of capacity: cache and tables by position
    buffers: int  # intermediate tensors, scratch memory, logits
    context: int
    longest: int  # tokens of the model's own context
    states: int = 0  # part of `kv`: the states of recurrent layers
    cells: int = 0  # number of these states
    copies: int = 0  # host memory for the GPU host's own copies of the io buffers

    def in_host_memory(self) -> "Needs":
        """The needs on a device that uses the host's memory: copies count, and experts cannot be kept elsewhere."""
        return replace(self, buffers=self.buffers + self.copies, experts=(), copies=0)

    def host(self, layers: int) -> int:
        """Bytes of host memory if the experts of the first `layers` layers stay there."""
        return sum(self.experts[:layers])

    def device(self, layers: int = 0) -> int:
        """Bytes of device memory if the experts of the first `layers` layers stay in host memory."""
        return self.weights + self.kv + self.buffers - self.host(layers)

    def tokens(self, room: int, layers: int = 0) -> int:
        """The largest capacity, in tokens, with which everything fits `room` bytes; at most `longest`, 0 if none fits.
        Windowed layers never keep more than their window, so the result is too small beyond that."""
        if self.token == 0:
            return self.longest if self.device(layers) <= room else 0
        most = self.context + (room - self.device(layers)) // self.token
        return max(min(most, self.longest) // CONTEXT_STEP * CONTEXT_STEP, 0)

    def layers_on_host(self, room: int) -> int | None:
        """The least number of first layers whose experts must stay in host memory to fit `room` bytes, or None."""
        return next((n for n in range(len(self.experts) + 1) if self.device(n) <= room), None)

    def gpus(self, room: int) -> int | None:
        """The least number of GPUs with `room` bytes each that hold the model, divided by layers; None if even a GPU
        for each layer is not enough. All layers count as equally large."""
        each = (self.weights + self.kv) / max(len(self.experts), 1)
        whole = (room - self.buffers) // each  # layers that one GPU holds
        return -(-len(self.experts) // int(whole)) if whole > 0 else None

    def advice(self, room: int, layers: int) -> list[str]:
        """Flags, each of which alone makes the model fit `room` bytes."""
        tokens, more = self.tokens(room, layers), self.layers_on_host(room)
        flags = [f"--ctx {tokens}"] if 0 < tokens < self.context else []
        return [*flags, f"--n-cpu-moe {more}"] if more is not None and more > layers else flags


@dataclass(frozen=True)
class Room:
    """A device's memory. bytes: its size. usable: bytes that a plan may use. shared: whether it is the host's."""

    name: str
    bytes: int
    usable: int
    shared: bool


def of_manifest(manifest: Manifest) -> Needs:
    """The needs of an artifact. If several GPUs share it by tensor: the needs of each GPU."""
    experts = [0] * len(manifest["model"]["layers"])
    for name, entry in manifest["tensors"].items():
        if (found := EXPERTS.match(name)) and RANK not in name:
            experts[int(found[1])] += nbytes(entry)
    states = [entry for entry in manifest["kv"] if entry.get("span") == STATE]
    kernels = [kernel for arch in manifest["launches"].values() for kernel in arch.values()]
    scratch = max((sum(kernel["scratch"]) for kernel in kernels), default=0)
    kind, io = manifest["target"]["kind"], sum(map(nbytes, manifest["io"].values()))
    arenas = 2 if "part_bytes" in manifest and "inline" not in manifest else 1  # ranks.py adds the second one
    return Needs(
        weights=manifest.get("part_bytes", manifest["weight_bytes"]),
        experts=tuple(experts),
        kv=sum(map(nbytes, manifest["kv"])),
        token=manifest["token_bytes"],
        buffers=manifest["arena_bytes"] * arenas + scratch * (RING if kind == "vulkan" else 1) + io,
        context=manifest["context"],
        longest=manifest["model"]["context"],
        states=sum(map(nbytes, states)),
        cells=states[0]["shape"][0] if states else 0,
        copies=0 if kind == "cpu" else io,
    )


def nbytes(entry: Mapping) -> int:
    """Bytes of a tensor of the manifest."""
    return byte_count(entry["dtype"], entry["shape"])


def on_host(tensors: Iterable[str], layers: int) -> frozenset[str]:
    """The names of the experts' matrices of the first `layers` layers. Raises UserError for a negative number, and for
    a positive one if there are no experts."""
    if layers < 0:
        raise UserError(f"--n-cpu-moe is {layers}: it must not be negative")
    experts = {name: int(found[1]) for name in tensors if (found := EXPERTS.match(name))}
    if layers and not experts:
        raise UserError("--n-cpu-moe: this model has no experts; leave the flag out")
    return frozenset(name for name, layer in experts.items() if layer < layers)


def shortage(needs: Needs, free: int, gpu: str, layers: int = 0, sized: bool = False) -> str:
    """The error message for a GPU with too little free memory: the memory needed, the memory free, and what would fit.
    sized: whether the user chose the size of the KV cache."""
    flags = ["a smaller --kv-memory"] if sized else needs.advice(free, layers)
    change = " or ".join(flags) if flags else "a smaller quantization"
    return (
        f"out of GPU memory: this model needs {gib(needs.device(layers))} (weights "
        f"{gib(needs.weights - needs.host(layers))}, KV cache {gib(needs.kv)} at --ctx {needs.context}), and "
        f"{gib(free)} of {gpu} are free; try {change}, or close other programs that use the GPU"
    )


def host_shortage(needs: Needs, layers: int) -> str:
    """The error message if the experts of the first `layers` layers do not fit the host memory that GPUs may use."""
    return (
        f"out of host memory: --n-cpu-moe {layers} needs {gib(needs.host(layers))} that the GPU can reach; Linux lets "
        "GPUs use half of the system's memory (kernel parameter ttm.pages_limit: pages of 4 KiB)"
    )


def gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
