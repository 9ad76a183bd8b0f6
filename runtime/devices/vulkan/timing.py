"""Reads the timestamps that a CommandRecorder writes to a query pool, and measures the bandwidth of a GPU's memory."""

import ctypes
from contextlib import ExitStack

from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, prepare
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.memory import OutOfMemory, VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines

COPIES = 8  # repetitions of the copy, of which the fastest counts; one repetition on a driver that runs on the CPU


def query_pool(context: Context, count: int) -> int:
    info = api.QueryPoolInfo(queryType=api.QUERY_TIMESTAMP, queryCount=count)
    return context.own("vkDestroyQueryPool", context.create("vkCreateQueryPool", info))


def results(context: Context, pool: int, count: int) -> list[int]:
    data = (ctypes.c_uint64 * count)()
    flags = api.RESULT_64 | api.RESULT_WAIT
    context.calls.vkGetQueryPoolResults(context.device, pool, 0, count, 8 * count, data, 8, flags)
    return list(data)


def seconds(context: Context, begin: int, end: int) -> float:
    """The seconds between two timestamps, which may have wrapped around once."""
    return (end - begin & (1 << context.clock_bits) - 1) * context.gpu.limits["tick"] * 1e-9


def copy_bandwidth(base: Context, nbytes: int, needs: dict, step: dict, module: tuple[bytes, tuple[int, ...]]) -> float:
    """Bytes per second, reads plus writes, of a copy kernel on the GPU of `base`; 0.0 without enough memory. nbytes:
    that a launch copies. needs: of the kernel's profile. step: the kernel's launch, as in the manifest. module:
    (SPIR-V, size of the workgroup)."""
    with ExitStack() as held:
        context = Context(base.instance, base.gpu, held)
        memory = VulkanMemory(context)
        try:
            blocks = [memory.block(nbytes, "device") for _ in range(2)]
        except OutOfMemory:
            return 0.0
        memory.fill(blocks)
        pipelines = Pipelines(context, needs["push_constants"], needs["subgroup_size"])
        pipeline = pipelines.build({"copy": module})["copy"]
        copies = COPIES if base.gpu.type != "cpu" else 1
        pool = query_pool(context, 2 * copies)
        recorder = CommandRecorder(context, pipelines.layout, (pool, 0, 2 * copies))
        recorder.begin()
        spans = [(blocks[i].address, blocks[i].address + nbytes) for i in step["args"]]
        for _ in range(copies):
            recorder.launch(prepare("copy", pipeline, step, spans))
            recorder.barrier()
        submission = recorder.end()
        for _ in range(2):  # the first is a warm-up
            context.run(submission)
        stamps = results(context, pool, 2 * copies)
        spent = min(seconds(context, begin, end) for begin, end in zip(stamps[::2], stamps[1::2], strict=True))
        return 2 * nbytes / max(spent, 1e-9)
