"""Boxes of Vulkan GPUs: a GPU polls its inbox in its own memory, which the host writes through the bus (the BAR), and
writes its outbox in cached host memory, which the relay polls."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlc_amd.runtime.devices.exchange.relay import Relay, RelayCode, runs_here
from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.devices.vulkan import api
from mlc_amd.runtime.devices.vulkan.memory import MemoryBlock, VulkanMemory
from mlc_amd.runtime.exchange_layout import CONTROL, DONE, FAILED, RANK, WORD, inbox_words, outbox_words


class RelayedBoxes:
    """A transport (see the package's docstring) between the GPUs of these memories, in the order of ranks. capacity:
    words of a slot; code: file of the relay's machine code; threads: as of `Relay`. Unsuitable without memory for it;
    `check.py` tells whether it works."""

    def __init__(self, memories: Sequence[VulkanMemory], capacity: int, code: Path, threads: int | None = None):
        if not runs_here():
            raise Unsuitable("the relay is machine code for x86-64")
        sizes = inbox_words(len(memories), capacity) * WORD, outbox_words(capacity) * WORD
        self._inboxes = [_block(memory, sizes[0], "input", api.DEVICE_LOCAL) for memory in memories]
        self._outboxes = [_block(memory, sizes[1], "output", api.HOST_CACHED) for memory in memories]
        # the GPU's own memory: it counts there; the host reads one word of it after a step
        self._controls = [_block(memory, CONTROL * 4, "input", api.DEVICE_LOCAL) for memory in memories]
        addresses = [[block.mapped for block in boxes] for boxes in (self._outboxes, self._inboxes)]
        self._relay = Relay(RelayCode(code), *addresses, capacity, threads)
        self._clear()

    def blocks(self, rank: int) -> list[MemoryBlock]:
        """Of the kernel's parameters Inbox, Outbox0 and Control."""
        return [of_all[rank] for of_all in (self._inboxes, self._outboxes, self._controls)]

    def arguments(self, rank: int) -> list[int]:
        return [block.address for block in self.blocks(rank)]

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
            block.view(0, np.uint8, (block.nbytes,))[...] = 0
        for rank in range(len(self._controls)):
            self._control(rank)[[DONE, FAILED, RANK]] = 0, 0, rank

    def _control(self, rank: int) -> np.ndarray:
        return self._controls[rank].view(0, np.int32, (CONTROL,))


def _block(memory: VulkanMemory, nbytes: int, kind: str, also: int) -> MemoryBlock:
    """Mapped coherent memory with a further property."""
    block, needed = memory.block(nbytes, kind), api.HOST_COHERENT | also
    if block.flags & needed != needed:
        what = "memory of its own that the host may write" if also == api.DEVICE_LOCAL else "cached host memory"
        raise Unsuitable(f"{memory.gpu.name} offers no {what}; enable Resizable BAR in the BIOS setup")
    return block
