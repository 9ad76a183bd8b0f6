"""The check (check.py) for Vulkan GPUs."""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.exchange.check import FRAMES, Kernel, arguments, check, one_arch, parts, probe
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.exchange.vulkan import RelayedBoxes
from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, VulkanLaunch
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance, choose
from mlc_amd.runtime.devices.vulkan.memory import OutOfMemory, VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines


class CheckedVulkanGpu:
    """See `CheckedGpu`. kernel.code: SPIR-V. parts: this rank's, float32 [FRAMES, values]. push, subgroup: see
    `Pipelines`."""

    def __init__(
        self,
        context: Context,
        boxes: RelayedBoxes,
        rank: int,
        kernel: Kernel,
        parts: np.ndarray,
        push: int,
        subgroup: int,
    ):
        self.context, self.name, self._nbytes = context, context.gpu.name, kernel.values * 4
        self._memory = VulkanMemory(context)
        frames, self._sums = (self._memory.block(count * self._nbytes, "device") for count in (FRAMES, 2))
        self._memory.fill([self._sums])
        self._memory.put(frames, 0, parts.reshape(-1).view(np.uint8))
        builder = Pipelines(context, push, subgroup)
        pipeline = builder.build({"exchange": (kernel.code, kernel.block)})["exchange"]
        recorder = CommandRecorder(context, builder.layout)
        recorder.begin()
        # Every launch writes the sums, so the recorder puts a barrier between two launches.
        written = ((self._sums.address, self._sums.address + self._sums.nbytes, True),)
        for addresses in arguments(kernel, frames.address, self._sums.address, boxes.arguments(rank)):
            values = (ctypes.c_uint64 * len(addresses))(*addresses)
            recorder.launch(VulkanLaunch("exchange", pipeline, kernel.grid, values, written))
        self._submission = recorder.end()
        context.idle_first()  # after a failed check kernels may still be waiting for words

    def begin(self) -> None:
        self.context.submit(self._submission)

    def wait(self) -> None:
        self.context.wait()

    def sums(self) -> np.ndarray:
        return np.frombuffer(self._memory.get(self._sums, 0, self._nbytes), np.float32)


def seconds_of_round(artifact, gpus: Sequence[int], rounds: int) -> float:
    """See `check`. gpus: the numbers of the GPUs, in the order of ranks."""
    try:
        with ExitStack() as held:
            return _checked(artifact, gpus, rounds, held)
    except (api.VulkanError, OutOfMemory) as e:
        raise Unsuitable(str(e)) from e


def _checked(artifact, gpus: Sequence[int], rounds: int, held: ExitStack) -> float:
    manifest = artifact.manifest
    exchange, target = manifest["exchange"], manifest["target"]
    needs = {profile: target["needs"][profile] for profile in target["archs"]}
    contexts, archs = [], []
    for gpu in gpus:
        instance = Instance()
        held.callback(instance.close)
        chosen, arch = choose(instance.gpus, needs, str(gpu))
        if chosen.type == "cpu":
            raise Unsuitable(f"{chosen.name} is a CPU, which other programs use, too")
        contexts.append(Context(instance, chosen, held))
        archs.append(arch)
    arch, memories = one_arch(archs), [VulkanMemory(one) for one in contexts]
    boxes = RelayedBoxes(memories, exchange["capacity"], artifact.path / exchange["relay"])
    held.callback(boxes.close)
    step, values = probe(artifact, arch)
    at, size = step["code"]
    code = (artifact.path / manifest["libraries"][arch]).read_bytes()[at : at + size]
    kernel = Kernel(code, tuple(step["grid"]), tuple(step["block"]), step["args"], values)
    given, push, subgroup = parts(len(gpus), values), needs[arch]["push_constants"], needs[arch]["subgroup_size"]
    ranks = [CheckedVulkanGpu(one, boxes, i, kernel, given[i], push, subgroup) for i, one in enumerate(contexts)]
    return check(ranks, boxes, values, rounds)
