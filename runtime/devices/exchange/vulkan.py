"""The transport between Vulkan GPUs. A kernel writes its words to its outbox, in cached host memory, which the relay
polls. The relay copies them to the inboxes of the other GPUs. An inbox is in its GPU's own memory, which the host
writes through the PCIe BAR and the GPU's kernels poll."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlc_amd.runtime.devices.exchange.relay import Relay, RelayCode, runs_here
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.vulkan.memory import MemoryBlock, OutOfMemory, VulkanMemory
from mlc_amd.runtime.exchange_layout import CONTROL, DONE, EMPTY, FAILED, RANK, WORD, inbox_words, outbox_words


class RelayedBoxes:
    """A transport (see the package's docstring). memories: of the GPUs, in the order of ranks. capacity: words in a
    slot. code: file with the relay's machine code. threads: see `Relay`.

    Raises Unsuitable if this host cannot run the relay, or if a GPU has no memory of these kinds. That words arrive in
    time is only tested by check.py."""

    def __init__(self, memories: Sequence[VulkanMemory], capacity: int, code: Path, threads: int | None = None):
        if not runs_here():
            raise Unsuitable("the relay is machine code for x86-64")
        boxes = inbox_words(len(memories), capacity) * WORD, outbox_words(capacity) * WORD
        self._inboxes = [_block(memory, boxes[0], "inbox") for memory in memories]
        self._outboxes = [_block(memory, boxes[1], "outbox") for memory in memories]
        # In the GPU's own memory, as its kernels count rounds there; the host reads only FAILED, after a step.
        self._controls = [_block(memory, CONTROL * 4, "inbox") for memory in memories]
        outboxes, inboxes = ([block.mapped for block in blocks] for blocks in (self._outboxes, self._inboxes))
        self._relay = Relay(RelayCode(code), outboxes, inboxes, capacity, threads)
        for memory in memories:  # after an error a GPU is closed before the others: the relay must stop before that
            memory.context.held.callback(self._relay.close)
        self._clear()

    def arguments(self, rank: int) -> list[int]:
        return [blocks[rank].address for blocks in (self._inboxes, self._outboxes, self._controls)]

    def begin(self, rounds: int, words: int) -> None:
        self._relay.begin(rounds, words)

    def failed(self) -> list[int]:
        return [rank for rank in range(len(self._controls)) if self._control(rank)[FAILED]]

    def reset(self) -> None:
        self._relay.stop()
        self._clear()

    def close(self) -> None:
        self._relay.close()

    def _clear(self) -> None:
        for block in (*self._inboxes, *self._outboxes):
            block.view(0, np.int32, (block.nbytes // 4,))[...] = EMPTY
        for rank in range(len(self._controls)):
            self._control(rank)[[DONE, FAILED, RANK]] = 0, 0, rank

    def _control(self, rank: int) -> np.ndarray:
        return self._controls[rank].view(0, np.int32, (CONTROL,))


def _block(memory: VulkanMemory, nbytes: int, kind: str) -> MemoryBlock:
    try:
        return memory.block(nbytes, kind)
    except OutOfMemory as e:
        what = "memory of its own that the host may write" if kind == "inbox" else "cached host memory"
        raise Unsuitable(f"{memory.gpu.name} offers no {what}: enable Resizable BAR in the BIOS setup") from e
