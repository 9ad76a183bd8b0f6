"""Loads and stores of the words that GPUs send each other. A word is 8 bytes, two halves of data
(runtime/exchange_layout.py). A receiver polls a word until neither half is EMPTY, then sets it to EMPTY again. So no
flags, no order of stores and no fences are needed, and the halves may arrive one after the other.

Words are accessed in pairs of 16 bytes. All accesses are volatile, so that each reaches memory instead of a cache.
"""

from tvm.tirx.script import builder as T

from mlc_amd.runtime.exchange_layout import EMPTY
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import lane_of, vector
from mlc_amd.schedules.tir import Buffer, Expr

PAIR_BYTES = 16


class Words:
    """Loads and stores of pairs of words by the threads of a workgroup. thread: number of this thread among `threads`.

    For target rocm they go through LDS. TVM has no volatile accesses, but LLVM's memcpy intrinsic can be volatile. LLVM
    implements it by accesses of 8 bytes, because LDS and parameters are declared with this alignment; so no access
    tears a word."""

    def __init__(self, arch: Device, thread: Expr, threads: int):
        self.arch, self.thread = arch, thread
        self.stage = None
        if arch.api != "vulkan":
            self.stage, self.blank = (T.alloc_buffer((threads, 2), "int64", scope="shared") for _ in range(2))
            for i in range(2):
                T.buffer_store(self.blank, T.int64(EMPTY), [thread, i])

    def load(self, buffer: Buffer, index: Expr) -> tuple[Expr, Expr]:
        """Loads the words buffer[index] and buffer[index + 1]. index: even."""
        address = T.address_of(buffer[index])
        if self.stage is None:
            pair = T.Bind(T.call_extern("int64x2", "vk.volatile_load", address))
            return T.Bind(lane_of(pair, 0)), T.Bind(lane_of(pair, 1))
        self._copy(T.address_of(self.stage[self.thread, 0]), address)
        return T.Bind(self.stage[self.thread, 0]), T.Bind(self.stage[self.thread, 1])

    def store(self, buffer: Buffer, index: Expr, *pair: Expr) -> None:
        """Stores two words to buffer[index] and buffer[index + 1]. index: even."""
        address = T.address_of(buffer[index])
        if self.stage is None:
            T.evaluate(T.call_extern("void", "vk.volatile_store", address, vector(pair)))
            return
        for i, word in enumerate(pair):
            T.buffer_store(self.stage, word, [self.thread, i])
        self._copy(address, T.address_of(self.stage[self.thread, 0]))

    def empty(self, buffer: Buffer, index: Expr) -> None:
        """Sets a pair of words to EMPTY. index: even."""
        if self.stage is None:
            self.store(buffer, index, T.int64(EMPTY), T.int64(EMPTY))
        else:
            self._copy(T.address_of(buffer[index]), T.address_of(self.blank[self.thread, 0]))

    def _copy(self, target: Expr, source: Expr) -> None:
        T.evaluate(T.call_llvm_intrin("void", "llvm.memcpy", target, source, T.int32(PAIR_BYTES), T.bool(True)))


def word(low: Expr, high: Expr) -> Expr:
    """Two int32 halves as an int64 word. A half that equals EMPTY is changed by 1."""
    low, high = (T.Select(half == EMPTY, T.int32(EMPTY - 1), half) for half in (low, high))
    lower = T.cast(T.reinterpret("uint32", T.Bind(low)), "int64")
    return T.Bind(T.shift_left(T.cast(T.Bind(high), "int64"), T.int64(32)) | lower)


def halves_of(word: Expr) -> tuple[Expr, Expr]:
    """The two int32 halves of a word."""
    return T.Bind(T.cast(word, "int32")), T.Bind(T.cast(T.shift_right(word, T.int64(32)), "int32"))
