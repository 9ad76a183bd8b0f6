"""Decides which GPUs a model runs on, and which layers each GPU has.

In: an artifact and the user's options (`Placement`). Out: numbers of GPUs and their `Stage`s. Without such options a
model runs on the best GPU if it fits there, otherwise on the fewest GPUs that hold it, the best ones first. The layers
are divided in proportion to the free memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlc_amd.runtime.artifact.manifest import Manifest
from mlc_amd.runtime.artifact.memory import gib, nbytes, of_manifest
from mlc_amd.runtime.artifact.stages import Stage, divide, most_stages, stages
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.devices.choice import selection
from mlc_amd.runtime.errors import UsageError, UserError

KINDS = ("cpu", "rocm", "vulkan")


@dataclass(frozen=True)
class Placement:
    """The user's options. device: the name of one GPU, as `open_device` takes it. devices: numbers of GPUs (--devices),
    () if not given. shares: proportions of the layers, one for each GPU (--tensor-split), () for free memory."""

    device: str | None = None
    devices: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.devices and self.device is not None:
            raise UsageError("--device and --devices both say which GPUs to use: give one of them")
        if self.shares and len(self.devices) not in (0, len(self.shares)):
            raise UsageError(f"--tensor-split has {len(self.shares)} numbers for {len(self.devices)} GPUs")
        if self.shares and not sum(self.shares) > 0:
            raise UsageError("--tensor-split: not all numbers may be 0")


@dataclass(frozen=True)
class GpuMemory:
    """A GPU. index: its number; free: its free memory in bytes."""

    index: int
    name: str
    free: int


def placement(kind: str, name: str | None, devices: tuple[int, ...] = (), shares: tuple[float, ...] = ()) -> Placement:
    """The placement that arguments of `open_device` choose for a model of target `kind`. Raises UserError for another
    target's name, for GPUs with target cpu, and for contradictory arguments."""
    which = None if name == kind else name
    if which in KINDS or (kind == "cpu" and (which is not None or devices or shares)):
        other = which if which in KINDS else "rocm or vulkan to choose a GPU"
        asked = f"not '{which}'" if which is not None else "which has no GPUs"
        raise UserError(f"this model is for target '{kind}', {asked}; compile it with --target {other}")
    return Placement(which, devices, shares)


def find(artifact, wanted: Placement, n_cpu_moe: int = 0) -> list[tuple[int, Stage]]:
    """[(GPU's number, its stage)]; empty if the whole model runs on one GPU, which the caller then chooses. n_cpu_moe:
    see `open_device`. Raises UserError for GPUs that do not exist, and for more GPUs than layers."""
    alone = len(wanted.devices) == 1 or len(wanted.shares) == 1
    if alone or artifact.manifest["target"]["kind"] == "cpu" or selection(wanted.device):
        return []
    if not (wanted.devices or wanted.shares):
        return _as_few_as_hold_it(artifact, _of_kind(artifact.manifest, several=False), n_cpu_moe)
    gpus = [*_of_kind(artifact.manifest, several=True)]
    if wanted.devices:
        known = _check_known(wanted.devices, gpus)
        gpus = [known[index] for index in wanted.devices]
    else:
        if len(gpus) < len(wanted.shares):
            raise UserError(f"--tensor-split has {len(wanted.shares)} numbers, and this machine {len(gpus)} GPUs")
        gpus = gpus[: len(wanted.shares)]
    found = _divided(artifact, gpus, wanted.shares)
    return [(gpu.index, stage) for gpu, stage in zip(gpus, found, strict=True)]


def of_tensors(manifest: Manifest, wanted: Placement) -> list[int]:
    """The numbers of the GPUs, in the order of ranks, for a model that was compiled with --split tensor: those that the
    user names, or the best ones. Raises UserError for another number of GPUs, and for GPUs that do not exist."""
    gpus, count = [*_of_kind(manifest, several=bool(wanted.devices))], manifest["gpus"]
    if wanted.device is not None or wanted.shares or len(wanted.devices) not in (0, count):
        raise UserError(f"this model was compiled for {count} GPUs (--split tensor): name {count} with --devices")
    if len(gpus) < count and not wanted.devices:
        raise UserError(
            f"this model was compiled for {count} GPUs (--split tensor), and this machine has {len(gpus)} that can run "
            "it; compile it for fewer, or name GPUs with --devices"
        )
    _check_known(wanted.devices, gpus)
    return [*wanted.devices] or [gpu.index for gpu in gpus[:count]]


def _as_few_as_hold_it(artifact, found: Iterator[GpuMemory], n_cpu_moe: int) -> list[tuple[int, Stage]]:
    """found: the GPUs, the best first; it is read beyond the best GPU only if that does not hold the model."""
    best = next(found, None)
    if best is None or of_manifest(artifact.manifest).device(n_cpu_moe) <= best.free:
        return []
    gpus = [best, *found]
    for count in range(2, min(len(gpus), most_stages(artifact.manifest)) + 1):
        pairs = list(zip(gpus, _divided(artifact, gpus[:count], ()), strict=False))
        if all(of_manifest(stage.manifest).device(n_cpu_moe) <= gpu.free for gpu, stage in pairs):
            return [(gpu.index, stage) for gpu, stage in pairs]
    return []  # opening the best GPU raises the error, which says what would fit


def _check_known(devices: Sequence[int], gpus: Sequence[GpuMemory]) -> dict[int, GpuMemory]:
    """{number: GPU} of `gpus`. Raises UserError if a number in `devices` is not among them."""
    known = {gpu.index: gpu for gpu in gpus}
    if absent := [index for index in devices if index not in known]:
        there = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus) or "none that runs this model"
        raise UserError(f"--devices: no GPU {absent[0]} here for this model; there are {there}")
    return known


def _divided(artifact, gpus: Sequence[GpuMemory], shares: Sequence[float]) -> list[Stage]:
    sizes = {name: count for name, (_, count) in artifact.weights.places.items()}
    borders = divide(artifact.manifest, sizes, shares or [float(gpu.free) for gpu in gpus])
    return stages(artifact.manifest, borders, sizes)


def cache_size(kv: KvSize, stage: Stage, artifact) -> KvSize:
    """The size of a stage's part of the KV cache. If `kv` is in bytes, a stage gets them in proportion to its paged
    tensors, after those of fixed size."""
    if kv.memory is None:
        return kv
    fixed, paged = _cache_bytes(stage.manifest)
    whole_fixed, whole_paged = _cache_bytes(artifact.manifest)
    return replace(kv, memory=fixed + max(kv.memory - whole_fixed, 0) * paged // max(whole_paged, 1))


def _cache_bytes(manifest: Manifest) -> tuple[int, int]:
    """(bytes of the KV tensors whose size is fixed, bytes of the paged ones for one sequence)."""
    paged = sum(nbytes(entry) for entry in manifest["kv"] if "span" in entry)
    return sum(map(nbytes, manifest["kv"])) - paged, paged


def described(found: Sequence[tuple[int, Stage]]) -> str:
    """A line for the log: the number of layers on each GPU, and the memory that they take."""
    sizes = [gib(of_manifest(stage.manifest).device()) for _, stage in found]
    parts = [f"{stage.layers} ({size}) on GPU {gpu}" for (gpu, stage), size in zip(found, sizes, strict=True)]
    return "layers are divided: " + ", ".join(parts)


def _of_kind(manifest, several: bool) -> Iterator[GpuMemory]:
    """The GPUs that can run the artifact, the best first. several: also those that are used beside others only if the
    user names them: drivers that run on the CPU, APUs (they share the host's memory), and second drivers of a GPU."""
    if manifest["target"]["kind"] == "vulkan":
        from mlc_amd.runtime.devices.vulkan.gpu import list_gpus, missing, preferred

        needs = [manifest["target"]["needs"][profile] for profile in manifest["target"]["archs"]]
        able = [gpu for gpu in preferred(list_gpus()) if not all(missing(gpu, needed) for needed in needs)]
        seen = set()
        for gpu in able:
            if several or not (gpu.unified or (gpu.pci and gpu.pci in seen)):
                free = sum(heap.free for heap in gpu.heaps if gpu.unified or heap.device_local)
                yield GpuMemory(gpu.index, gpu.name, free)
                seen.add(gpu.pci)
        return
    from mlc_amd.runtime.devices.hip.gpu import with_free_memory

    for gpu, free in with_free_memory(manifest["libraries"]):
        if several or not gpu.integrated:
            yield GpuMemory(gpu.index, gpu.name, free)
