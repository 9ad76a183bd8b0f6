"""Opens the device of an artifact's target."""

import importlib.util
import logging
from dataclasses import replace

from mlc_amd.runtime.artifact.memory import EXPERTS, on_host
from mlc_amd.runtime.artifact.ranks import rank_artifact
from mlc_amd.runtime.artifact.stages import Stage
from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.devices import division
from mlc_amd.runtime.devices.division import Placement, placement
from mlc_amd.runtime.devices.exchange.choice import exchanges_inline
from mlc_amd.runtime.devices.several import Opener
from mlc_amd.runtime.devices.staged import StagedDevice
from mlc_amd.runtime.devices.tensor import TensorDevice
from mlc_amd.runtime.errors import UserError

log = logging.getLogger("mlc_amd")


def open_device(
    artifact,
    name: str | None = None,
    threads: int | None = None,
    n_cpu_moe: int = 0,
    kv: KvSize = ONE_SEQUENCE,
    devices: tuple[int, ...] = (),
    shares: tuple[float, ...] = (),
):
    """Opens the device of an artifact's target. Raises UserError if the artifact cannot run on this machine.

    name: the kind of the target ("cpu", "rocm", "vulkan"); or a GPU: its number in `mlc-amd doctor`, or a part of its
    name. threads: of target cpu. devices: numbers of several GPUs, which share the model. shares: the proportion of
    layers of each of them, by default that of their free memory. kv: the size of the KV cache. n_cpu_moe: the experts
    of so many first layers stay in host memory, on GPUs with memory of their own."""
    kind = artifact.manifest["target"]["kind"]
    log.debug("opens %s: target %s", artifact.path, kind)
    on_host(artifact.manifest["tensors"], n_cpu_moe)  # UserError for an invalid number
    wanted = placement(kind, name, devices, shares)
    if kind == "cpu":
        return _open_cpu(artifact, threads, n_cpu_moe, kv)
    if artifact.manifest["gpus"] > 1:
        return _open_ranks(artifact, wanted, kv)
    found = division.find(artifact, wanted, n_cpu_moe)
    if not found:
        return _open_gpu(artifact, threads, str(devices[0]) if devices else wanted.device, n_cpu_moe, kv)
    log.info(division.described(found))

    def opener(gpu: int, stage: Stage) -> Opener:
        experts = n_cpu_moe if any(map(EXPERTS.match, stage.manifest["tensors"])) else 0
        size = division.cache_size(kv, stage, artifact)
        return lambda: _open_one_of_several(stage.of(artifact), gpu, experts, size)

    return StagedDevice(artifact, [opener(*one) for one in found])


def _open_ranks(artifact, wanted: Placement, kv: KvSize) -> TensorDevice:
    """Opens the GPUs of a model that was compiled with --split tensor: one rank of the artifact on each."""
    gpus = artifact.manifest["gpus"]
    chosen = division.of_tensors(artifact.manifest, wanted)
    size = kv if kv.memory is None else replace(kv, memory=kv.memory // gpus)

    inline = exchanges_inline(artifact, chosen)

    def opener(rank: int, gpu: int) -> Opener:
        return lambda: _open_one_of_several(rank_artifact(artifact, rank, inline), gpu, 0, size)

    return TensorDevice(artifact, [opener(*one) for one in enumerate(chosen)])


def _open_cpu(artifact, threads: int | None, n_cpu_moe: int, kv: KvSize):
    if importlib.util.find_spec("tvm_ffi") is None:
        raise UserError(
            "this model was compiled for target 'cpu', which needs the package apache-tvm-ffi: install it with pip "
            "(a bundle contains it if `mlc-amd deploy` made it from a model for target cpu)"
        )
    from mlc_amd.runtime.devices.cpu import CpuDevice  # imports tvm_ffi

    if n_cpu_moe:
        log.warning("--n-cpu-moe has no effect: target cpu has all weights in host memory")
    return CpuDevice(artifact, threads, kv)


def _open_one_of_several(artifact, gpu: int, n_cpu_moe: int, kv: KvSize):
    """Opens one of several GPUs; a UserError's message starts with the GPU's number."""
    try:
        return _open_gpu(artifact, None, str(gpu), n_cpu_moe, kv)
    except UserError as e:
        raise type(e)(f"GPU {gpu}: {e}") from e


def _open_gpu(artifact, threads: int | None, which: str | None, n_cpu_moe: int, kv: KvSize):
    if artifact.manifest["target"]["kind"] == "rocm":
        from mlc_amd.runtime.devices.hip.device import HipDevice

        return HipDevice(artifact, threads, which, n_cpu_moe, kv)
    from mlc_amd.runtime.devices.vulkan.device import VulkanDevice

    return VulkanDevice(artifact, threads, which, n_cpu_moe, kv)
