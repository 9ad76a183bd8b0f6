"""The words that GPUs send each other: 8 bytes, two halves of data. Who waits for a half polls it until it is not EMPTY
any more, then makes it EMPTY again: no flag, no order of stores, no fence is needed, and halves may come one by one.

Words go in pairs of 16 bytes. All accesses are volatile: each goes to memory, no cache has an old copy.
"""

from tvm.tirx.script import builder as T

from mlc_amd.runtime.exchange_layout import EMPTY
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import lane_of, vector
from mlc_amd.schedules.tir import Buffer, Expr

PAIR_BYTES = 16


class Words:
    """Loads and stores of pairs by the threads of a workgroup, `thread` is this one's number out of `threads`. On AMD's
    own API they go through LDS: TVM has no volatile accesses, LLVM's copy of memory can be one. It is made of accesses
    of 8 bytes, as LDS and parameters are declared to be aligned: none tears a word."""

    def __init__(self, arch: Device, thread: Expr, threads: int):
        self.arch, self.thread = arch, thread
        self.stage = None
        if arch.api != "vulkan":
            self.stage, self.blank = (T.alloc_buffer((threads, 2), "int64", scope="shared") for _ in range(2))
            for i in range(2):
                T.buffer_store(self.blank, T.int64(EMPTY), [thread, i])

    def load(self, buffer: Buffer, index: Expr) -> tuple[Expr, Expr]:
        """buffer[index] and the one after it. index: even."""
        address = T.address_of(buffer[index])
        if self.stage is None:
            pair = T.Bind(T.call_extern("int64x2", "vk.volatile_load", address))
            return T.Bind(lane_of(pair, 0)), T.Bind(lane_of(pair, 1))
        self._copy(T.address_of(self.stage[self.thread, 0]), address)
        return T.Bind(self.stage[self.thread, 0]), T.Bind(self.stage[self.thread, 1])

    def store(self, buffer: Buffer, index: Expr, *pair: Expr) -> None:
        """The opposite."""
        address = T.address_of(buffer[index])
        if self.stage is None:
            T.evaluate(T.call_extern("void", "vk.volatile_store", address, vector(pair)))
            return
        for i, word in enumerate(pair):
            T.buffer_store(self.stage, word, [self.thread, i])
        self._copy(address, T.address_of(self.stage[self.thread, 0]))

    def empty(self, buffer: Buffer, index: Expr) -> None:
        """Stores a pair that is EMPTY."""
        if self.stage is None:
            self.store(buffer, index, T.int64(EMPTY), T.int64(EMPTY))
        else:
            self._copy(T.address_of(buffer[index]), T.address_of(self.blank[self.thread, 0]))

    def _copy(self, target: Expr, source: Expr) -> None:
        T.evaluate(T.call_llvm_intrin("void", "llvm.memcpy", target, source, T.int32(PAIR_BYTES), T.bool(True)))


def word(low: Expr, high: Expr) -> Expr:
    """Two int32 as a word."""
    low, high = (T.Select(half == EMPTY, T.int32(EMPTY - 1), half) for half in (low, high))
    lower = T.cast(T.reinterpret("uint32", T.Bind(low)), "int64")
    return T.Bind(T.shift_left(T.cast(T.Bind(high), "int64"), T.int64(32)) | lower)


def halves_of(word: Expr) -> tuple[Expr, Expr]:
    """The reverse."""
    return T.Bind(T.cast(word, "int32")), T.Bind(T.cast(T.shift_right(word, T.int64(32)), "int32"))
