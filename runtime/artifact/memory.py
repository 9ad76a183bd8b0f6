"""The memory that a model needs, by part, and what fits a GPU. No device is opened.

Experts may stay in host memory, as with llama.cpp's --n-cpu-moe: a token uses a few of them, so they are most of a
model's bytes but few of those that a step reads.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mlc_amd.runtime.artifact.manifest import RANK, Manifest
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.cache.pages import STATE
from mlc_amd.runtime.errors import UserError

CONTEXT_STEP = 64  # tokens: capacities that are proposed are multiples, as all are that are compiled
RING = 4  # copies of the scratch memory that the vulkan device has: independent kernels may overlap
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:gate|up|gate_up|down)_exps\.weight\b")


@dataclass(frozen=True)
class Needs:
    """Bytes by part."""

    weights: int  # packed weights, experts included
    experts: tuple[int, ...]  # of these, the experts' matrices of each layer; 0 where it has none
    kv: int  # KV cache, at a capacity of `context` tokens, and states of sequences
    token: int  # of one more token of capacity: cache and tables by position
    buffers: int  # intermediate tensors, scratch memory, logits
    context: int
    longest: int  # tokens of the model's own context
    states: int = 0  # of kv, the states of recurrent layers
    cells: int = 0  # number of these states
    copies: int = 0  # of buffers between host and kernels that a GPU's host keeps for itself

    def in_host_memory(self) -> "Needs":
        """The same on a device that works in the host's memory: the host's copies count, and experts have no other
        place."""
        return replace(self, buffers=self.buffers + self.copies, experts=(), copies=0)

    def host(self, layers: int) -> int:
        """Bytes of host memory when the experts of the first `layers` layers stay there."""
        return sum(self.experts[:layers])

    def device(self, layers: int = 0) -> int:
        """Bytes of device memory then."""
        return self.weights + self.kv + self.buffers - self.host(layers)

    def tokens(self, room: int, layers: int = 0) -> int:
        """The largest capacity with which everything fits `room` bytes, at most `longest`; 0: none. Windowed layers
        keep at most their window: the result is too small where the capacity is larger than that."""
        if self.token == 0:
            return self.longest if self.device(layers) <= room else 0
        most = self.context + (room - self.device(layers)) // self.token
        return max(min(most, self.longest) // CONTEXT_STEP * CONTEXT_STEP, 0)

    def layers_on_host(self, room: int) -> int | None:
        """The least number of first layers whose experts must stay in host memory for `room`; None: no number."""
        return next((n for n in range(len(self.experts) + 1) if self.device(n) <= room), None)

    def gpus(self, room: int) -> int | None:
        """The least number of GPUs with so much room each that hold the model, divided by layers; None: more than the
        layers allow. Layers count as equal."""
        each = (self.weights + self.kv) / max(len(self.experts), 1)
        whole = (room - self.buffers) // each  # layers that one holds
        return -(-len(self.experts) // int(whole)) if whole > 0 else None

    def advice(self, room: int, layers: int) -> list[str]:
        """Flags, each of which makes a model fit `room` bytes."""
        tokens, more = self.tokens(room, layers), self.layers_on_host(room)
        flags = [f"--ctx {tokens}"] if 0 < tokens < self.context else []
        return [*flags, f"--n-cpu-moe {more}"] if more is not None and more > layers else flags


@dataclass(frozen=True)
class Room:
    """A device's memory. bytes: its size; usable: what a plan may use; shared: it is the host's."""

    name: str
    bytes: int
    usable: int
    shared: bool


def of_manifest(manifest: Manifest) -> Needs:
    """What an artifact needs; of one that several GPUs share by tensor, each of them."""
    experts = [0] * len(manifest["model"]["layers"])
    for name, entry in manifest["tensors"].items():
        if (found := EXPERTS.match(name)) and RANK not in name:
            experts[int(found[1])] += nbytes(entry)
    states = [entry for entry in manifest["kv"] if entry.get("span") == STATE]
    kernels = [kernel for arch in manifest["launches"].values() for kernel in arch.values()]
    scratch = max((sum(kernel["scratch"]) for kernel in kernels), default=0)
    kind, io = manifest["target"]["kind"], sum(map(nbytes, manifest["io"].values()))
    arenas = 2 if "part_bytes" in manifest and "inline" not in manifest else 1  # ranks.py makes the second one
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
    """The experts' matrices of the first `layers` layers. UserError for a negative number, or without experts."""
    if layers < 0:
        raise UserError(f"--n-cpu-moe is {layers}: it must not be negative")
    experts = {name: int(found[1]) for name in tensors if (found := EXPERTS.match(name))}
    if layers and not experts:
        raise UserError("--n-cpu-moe: this model has no experts; leave the flag out")
    return frozenset(name for name, layer in experts.items() if layer < layers)


def shortage(needs: Needs, free: int, gpu: str, layers: int = 0, sized: bool = False) -> str:
    """The error message for a GPU whose free memory is too small: the memory needed, the memory free, and what would
    fit. sized: the user chose the size of the KV cache."""
    flags = ["a smaller --kv-memory"] if sized else needs.advice(free, layers)
    change = " or ".join(flags) if flags else "a smaller quantization"
    return (
        f"out of GPU memory: this model needs {gib(needs.device(layers))} (weights "
        f"{gib(needs.weights - needs.host(layers))}, KV cache {gib(needs.kv)} at --ctx {needs.context}), and "
        f"{gib(free)} of {gpu} are free; try {change}, or close other programs that use the GPU"
    )


def host_shortage(needs: Needs, layers: int) -> str:
    """The error message when the experts of the first `layers` layers do not fit the host memory for GPUs."""
    return (
        f"out of host memory: --n-cpu-moe {layers} needs {gib(needs.host(layers))} that the GPU can reach; Linux lets "
        "GPUs use half of the system's memory (kernel parameter ttm.pages_limit: pages of 4 KiB)"
    )


def gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
