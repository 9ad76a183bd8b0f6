"""Checks how a driver distributes the components of a cooperative matrix over the lanes of a subgroup. Vulkan leaves
this to drivers, but some kernels assume a known distribution (runtime/matrix_lanes.py). Artifacts with such kernels
also have the kernel `fragment_probe`, which writes the actual distribution."""

import math
from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, prepare
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.gpu import Instance, VulkanGpu
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines
from mlc_amd.runtime.gpus import DeviceKind
from mlc_amd.runtime.matrix_lanes import DISTRIBUTIONS, LANES


def known_order(
    instance: Instance,
    gpu: VulkanGpu,
    kind: DeviceKind | None,
    needs: dict,
    step: dict,
    module: tuple[bytes, tuple[int, ...]],
) -> bool:
    """Runs `fragment_probe` on a GPU. Returns whether its driver distributes matrices as kernels assume. kind: the kind
    of device that the kernels were compiled for, None if unknown. needs: of the profile, as in the manifest. step: the
    launch of `fragment_probe`, as in the manifest. module: (SPIR-V, size of the workgroup)."""
    if kind is None or kind.lane_unit not in DISTRIBUTIONS:
        return False
    with ExitStack() as held:
        context = Context(instance, gpu, held)
        memory, pipelines = VulkanMemory(context), Pipelines(context, needs["push_constants"], needs["subgroup_size"])
        (m, n, k), expected = kind.lane_matrix, DISTRIBUTIONS[kind.lane_unit]
        index = np.arange(m * k).astype(np.float16)
        shapes = [(LANES, 1 + part.shape[1]) for part in (expected.a_row, expected.b_column)] + [(m, n)]
        sizes = [index.nbytes, *(4 * math.prod(shape) for shape in shapes)]
        found, blocks = memory.spread(dict(enumerate(sizes)), "device")
        memory.fill(blocks)
        memory.put(*found[0], index.view(np.uint8))
        begins = [found[arg][0].address + found[arg][1] for arg in step["args"]]
        spans = [(begin, begin + sizes[arg]) for begin, arg in zip(begins, step["args"], strict=True)]
        recorder = CommandRecorder(context, pipelines.layout)
        recorder.begin()
        pipeline = pipelines.build({"fragment_probe": module})["fragment_probe"]
        recorder.launch(prepare("fragment_probe", pipeline, step, spans))
        context.run(recorder.end())
        results = (np.frombuffer(memory.get(*found[i], sizes[i]), np.float32) for i in (1, 2, 3))
        return is_known(kind, *(of.reshape(shape).astype(int) for of, shape in zip(results, shapes, strict=True)))


def is_known(kind: DeviceKind, a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> bool:
    """Whether this is the distribution that the kernels of a kind assume. a, b: int [lanes, 1 + components]: a lane's
    number of components, then the index of each: row * k + column of A, row * n + column of B. sums: int [m, n], for
    each element of the result lane * components + component."""
    (_, n, k), expected = kind.lane_matrix, DISTRIBUTIONS[kind.lane_unit]
    count = expected.b_column.shape[1]
    (a_row, a_column), (b_row, b_column) = divmod(a[:, 1:], k), divmod(b[:, 1:], n)
    found = [
        a[:, 0] == expected.a_row.shape[1],
        b[:, 0] == count,
        a_row == expected.a_row,
        b_column == expected.b_column,
        a_column.reshape(LANES, -1, count) == b_row[:, None],
        b_row == b_row[expected.peer],
    ]
    if expected.sums is not None:
        found.append(sums[expected.sums].ravel() == np.arange(sums.size))
    return all(part.all() for part in found)
