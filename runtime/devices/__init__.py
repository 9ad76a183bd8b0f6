"""Devices run plans. They share a protocol:

Device(artifact, threads) -> checks that this machine can run the artifact, maps or uploads weights, allocates KV cache
                             and arena
.kv_types                    shapes and types of the cache's tensors, with the pages that they have
.write(name, values)         fills the first part of an io buffer ("state", "tokens" ..)
.run(function, meanwhile)    runs one function of the plan and waits; GPUs run long steps in pieces (pieces.py).
                             meanwhile: optional: is called once and writes io buffers of steps.LATE; a GPU computes
                             what does not read these at the same time. Its errors are raised when the device is idle
.can_start_ahead(function, late)  whether a run of that function may start while another one is in progress; late: also
                             before its LATE inputs are known; if so, the methods up to `wait` exist
.start(function, meanwhile)  `run` without waiting
.start_ahead(function, late) starts another run of the same function and rows while one is in progress: its tokens are
                             those that the other one samples (`sampled`), its other inputs what was written since. One
                             such run at a time
.complete_inputs(function)   the LATE inputs of a run that was started before they were known have been written
.wait()                      waits for the oldest of these runs; `read` returns its results, but for rows of `logits`
                             while another one is in progress
.run_plain(function)         the same launch by launch, without what was recorded or captured at load: for comparison
.read(name, rows)            the first rows of an io buffer as a NumPy array, valid until the next run
.clear()                     zeros the KV cache
.close()                     releases memory and the device; nothing else may be called afterwards
.time(function)              optional: runs a function; (kernel, seconds, gap before it in seconds) of each launch
.waited                      seconds that all runs spent waiting for the device
.copy_bandwidth()            optional: bytes per second, reads plus writes, of a copy in device memory; 0.0 if unknown
"""

import importlib.util
import logging

from mlc_amd.runtime.artifact.memory import on_host
from mlc_amd.runtime.cache.kv_pool import ONE_SEQUENCE, KvSize
from mlc_amd.runtime.errors import UserError

KINDS = ("cpu", "rocm", "vulkan")

log = logging.getLogger("mlc_amd")


def open_device(
    artifact,
    name: str | None = None,
    threads: int | None = None,
    n_cpu_moe: int = 0,
    kv: KvSize = ONE_SEQUENCE,
):
    """The device for an artifact's target. UserError if it cannot run here.

    name: the target's own kind; or, for targets rocm and vulkan, which GPU: its number as `mlc-amd doctor` lists it, or
    a part of its name. kv: how large the cache is. n_cpu_moe: of GPUs with their own memory, how many first layers'
    experts stay in host memory.
    """
    kind = artifact.manifest["target"]["kind"]
    log.debug("opens %s: target %s", artifact.path, kind)
    on_host(artifact.manifest["tensors"], n_cpu_moe)  # UserError for a number that makes no sense
    which = None if name == kind else name
    if which is not None and (which in KINDS or kind == "cpu"):
        other = which if which in KINDS else "rocm or vulkan to choose a GPU"
        raise UserError(f"this model was compiled for target '{kind}', not '{which}'; compile it with --target {other}")
    if kind == "cpu":
        if importlib.util.find_spec("tvm_ffi") is None:
            raise UserError(
                "this model was compiled for target 'cpu', which needs the package apache-tvm-ffi: install it with pip "
                "(a bundle cannot have it: compile the model with --target vulkan)"
            )
        from mlc_amd.runtime.devices.cpu import CpuDevice  # loads tvm_ffi

        if n_cpu_moe:
            log.warning("--n-cpu-moe has no effect: target cpu has all weights in host memory")
        return CpuDevice(artifact, threads, kv)
    if kind == "rocm":
        from mlc_amd.runtime.devices.hip.device import HipDevice

        return HipDevice(artifact, threads, which, n_cpu_moe, kv)
    from mlc_amd.runtime.devices.vulkan.device import VulkanDevice

    return VulkanDevice(artifact, threads, which, n_cpu_moe, kv)
