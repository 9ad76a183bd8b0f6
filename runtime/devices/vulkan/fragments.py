"""The distribution of a cooperative matrix's components over the lanes of a subgroup: drivers choose it, and some
kernels (schedules/gpu/linear/gemm_lanes.py, attention_rows_matrix.py) rely on one. Artifacts with such kernels have one
that writes the distribution, `fragment_probe`."""

from contextlib import ExitStack

import numpy as np

from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, prepare
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines

SHAPE = ROWS, COLUMNS, DEPTH = 16, 8, 16  # of the matrices: A has ROWS x DEPTH components, B DEPTH x COLUMNS
LANES, QUAD = 32, 4


def known_order(base: Context, needs: dict, step: dict, module: tuple[bytes, tuple[int, ...]]) -> bool:
    """Whether the driver of the GPU of `base` distributes matrices as `is_known` says. needs: of the kernel's profile;
    step: of `fragment_probe`, as in the manifest; module: (SPIR-V, block)."""
    with ExitStack() as held:
        context = Context(base.instance, base.gpu, held)
        memory, pipelines = VulkanMemory(context), Pipelines(context, needs["push_constants"], needs["subgroup_size"])
        index = np.arange(ROWS * DEPTH).astype(np.float16)
        sizes = [index.nbytes, 4 * ROWS * DEPTH, 4 * DEPTH * COLUMNS]
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
        a, b = (np.frombuffer(memory.get(*found[i], sizes[i]), np.float32).reshape(LANES, -1) for i in (1, 2))
    return is_known(a.astype(int), b.astype(int))


def is_known(a: np.ndarray, b: np.ndarray) -> bool:
    """a [lane, 8], b [lane, 4]: for the components that a lane has, in order, row * DEPTH + column of A and row *
    COLUMNS + column of B. Lane 4*r + q has four columns of A's row r, then the same ones of row r + 8; and the same
    four rows of B's column r, in the same order. Which four depends on q alone."""
    lanes = np.arange(LANES)[:, None]
    order = np.arange(2 * QUAD)
    (a_row, a_column), (b_row, b_column) = divmod(a, DEPTH), divmod(b, COLUMNS)
    low, high = a_column[:, :QUAD], a_column[:, QUAD:]
    return bool(
        (a_row == lanes // QUAD + ROWS // 2 * (order // QUAD)).all()
        and (b_column == lanes // QUAD).all()
        and (low == b_row).all()
        and (high == b_row).all()
        and (b_row == b_row[lanes[:, 0] % QUAD]).all()
    )
