"""The words that GPUs send each other: 8 bytes = 32 bits of data and, above them, the number of the round, in one
store. A word that has the round's number has its data, too: no flag, no order of stores, no fence is needed.

Words go in pairs of 16 bytes. All accesses are volatile: each goes to memory, no cache has an old copy.
"""

from tvm.tirx.script import builder as T

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
        self.stage = None if arch.api == "vulkan" else T.alloc_buffer((threads, 2), "int64", scope="shared")

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

    def _copy(self, target: Expr, source: Expr) -> None:
        T.evaluate(T.call_llvm_intrin("void", "llvm.memcpy", target, source, T.int32(PAIR_BYTES), T.bool(True)))


def word(data: Expr, number: Expr) -> Expr:
    """int32 data and number as a word."""
    low = T.cast(T.reinterpret("uint32", data), "int64")
    return T.Bind(T.shift_left(T.cast(number, "int64"), T.int64(32)) | low)


def data_of(word: Expr) -> Expr:
    return T.Bind(T.cast(word, "int32"))


def number_of(word: Expr) -> Expr:
    return T.Bind(T.cast(T.shift_right(word, T.int64(32)), "int32"))
