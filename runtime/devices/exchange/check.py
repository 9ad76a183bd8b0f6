"""Whether Vulkan GPUs get each other's words while kernels run, and how long a round takes: thousands of rounds of the
exchange kernel whose sums tell whether every word was right.

Parts are whole numbers, the residual of a round is the sum of the one before, so a single wrong word shows in the end.
Parts repeat after FRAMES rounds, and slots after two: an old word is a wrong one.
"""

import ctypes
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.exchange.vulkan import RelayedBoxes
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, VulkanLaunch
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.memory import VulkanMemory
from mlc_amd.runtime.devices.vulkan.pipelines import Pipelines

PARAMS: tuple[int, ...] = (1, 2, 3, 5, 6, 7)  # numbers of the kernel's parameters X, R, Y, Inbox, Outbox0, Control
FRAMES = 5  # parts of each rank
AT_ONCE = 160  # rounds of a submission, about those of a step; even, as sums alternate between two buffers
LARGEST = 100  # of a part's numbers; all sums of float32 are exact below 2**24


class Module(NamedTuple):
    """The exchange kernel (schedules/gpu/exchange) of `values`, with a residual. args: of its parameters (state, X, R,
    Y, P, Inbox, Outbox0, Control) the numbers of those that the module has, in its order."""

    binary: bytes
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[int, ...]
    values: int


def check(
    contexts: Sequence[Context], boxes: RelayedBoxes, module: Module, rounds: int, push: int, subgroup: int
) -> float:
    """Seconds of a round, at best, launches included. contexts: of the GPUs, by rank; boxes: between them, reset before
    it returns; rounds: at least so many; push, subgroup: as of `Pipelines`. Unsuitable when words are wrong or do not
    come."""
    repeats, n = -(-rounds // AT_ONCE), module.values
    assert repeats * AT_ONCE * LARGEST * len(contexts) < 1 << 24, "sums would not be exact"
    parts = np.random.default_rng(1).integers(-LARGEST, LARGEST, (len(contexts), FRAMES, n), endpoint=True)
    uses = np.bincount(np.arange(AT_ONCE) % FRAMES, minlength=FRAMES) * repeats
    expected, best = np.einsum("f,rfn->n", uses, parts), math.inf
    with ExitStack() as held:
        ranks = [
            _Rank(context, boxes, rank, module, parts[rank], (push, subgroup)) for rank, context in enumerate(contexts)
        ]
        held.callback(boxes.reset)
        for _ in range(repeats):
            boxes.begin(AT_ONCE, n // 2)
            start = time.perf_counter()
            for rank in ranks:
                rank.context.submit(rank.submission)
            for rank in ranks:
                rank.context.wait()
            best = min(best, (time.perf_counter() - start) / AT_ONCE)
            if failed := boxes.failed():
                raise Unsuitable(f"words of the other GPUs do not reach {', '.join(ranks[i].name for i in failed)}")
        for rank in ranks:
            if wrong := int((rank.sums() != expected).sum()):
                raise Unsuitable(f"{rank.name} got wrong words: {wrong} of {n} sums differ after {rounds} rounds")
    return best


class _Rank:
    """One GPU: its buffers, and what to submit for AT_ONCE rounds."""

    def __init__(
        self,
        context: Context,
        boxes: RelayedBoxes,
        rank: int,
        module: Module,
        parts: np.ndarray,
        pipelines: tuple[int, int],
    ):
        self.context, self.name, self._nbytes = context, context.gpu.name, module.values * 4
        self._memory = VulkanMemory(context)
        self._parts, self._sums = (self._memory.block(count * self._nbytes, "device") for count in (FRAMES, 2))
        self._memory.fill([self._sums])
        self._memory.put(self._parts, 0, parts.astype(np.float32).reshape(-1).view(np.uint8))
        builder = Pipelines(context, *pipelines)
        pipeline = builder.build({"exchange": (module.binary, module.block)})["exchange"]
        recorder = CommandRecorder(context, builder.layout)
        recorder.begin()
        shared = [(block.address, block.address + block.nbytes, True) for block in boxes.blocks(rank)]
        for i in range(AT_ONCE):
            part = self._span(self._parts.address, i % FRAMES, False)
            before, after = (self._span(self._sums.address, (i + j) % 2, bool(j)) for j in (0, 1))
            params: dict[int, tuple[int, int, bool]] = dict(zip(PARAMS, (part, before, after, *shared), strict=True))
            spans = tuple(params[number] for number in module.args)
            push = (ctypes.c_uint64 * len(spans))(*(begin for begin, _, _ in spans))
            recorder.launch(VulkanLaunch("exchange", pipeline, module.grid, push, spans))
        self.submission = recorder.end()

    def _span(self, address: int, number: int, written: bool) -> tuple[int, int, bool]:
        begin = address + number * self._nbytes
        return begin, begin + self._nbytes, written

    def sums(self) -> np.ndarray:
        return np.frombuffer(self._memory.get(self._sums, 0, self._nbytes), np.float32)
