"""How the workgroups of a launch find the last of them, which goes on with the results of all.

Each workgroup stores its results into a COHERENT parameter, complete beyond the caches that workgroups do not share
(`Outbox`), and then increments an atomic counter. The one that finds all others arrived loads them, at addresses
that depend on what the counter returned, so neither compiler nor hardware can start the loads early. Results of
different workgroups lie in different cache lines, which nothing reads earlier in the launch, so no cache has an old
copy. On Vulkan results and counter are coherent, and memory barriers stand before the increment and before the loads;
so the increment itself orders nothing.
"""

from collections.abc import Iterable

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.arch import GpuArch
from mlc_amd.schedules.gpu.base.device import memory_barrier, uniform
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, put, vector
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.tir import Buffer, Expr

LINE = 32  # float32 of a cache line
Vector = tuple[list[Expr], Expr | None, tuple[Expr, ...]]  # float32 registers, a condition, and where they go


class Outbox:
    """How the threads of a workgroup store vectors into a COHERENT parameter, for another workgroup of the launch to
    read: each thread calls `send` for its vectors, then `publish`; then everything that it sent is in device memory.
    thread: this thread's number out of `threads`; widths: of the vectors.

    On AMD's own API, where the GPU has one L2, the vectors are plain stores (L1 writes through) and there is one wait
    for all of them: an instruction where there is one (`Family.wait_stores`); elsewhere LLVM waits for stores only
    after volatile ones, so the first word of the first vector is stored once more, volatile. Where L2s are not
    coherent, all stores are volatile, which gets them beyond their own, and are waited for one by one.
    """

    def __init__(self, arch: Device, thread: Expr, threads: int, widths: Iterable[int]):
        self.arch, self.thread = arch, thread
        self.first: tuple[Expr, Expr] | None = None  # condition and address of the first vector
        code = arch.code if isinstance(arch, GpuArch) else None
        self.volatile = code is not None and not code.coherent
        self.wait = code.wait_stores if code else None
        self.rewrites = code is not None and code.coherent and not self.wait
        widths = widths if self.volatile else [1] if self.rewrites else []
        self.stages = {width: T.alloc_buffer((threads, width), "float32", scope="shared") for width in widths}

    def send(self, condition: Expr | None, buffer: Buffer, *vectors: Vector) -> None:
        """Stores vectors where `condition` (None: always) and their own hold; the first vector has no other. Of each
        width there is one."""
        for values, _, index in vectors:
            if self.volatile:
                T.buffer_store(self.stages[len(values)], vector(values), [self.thread, at(0, len(values))])
            elif self.rewrites and self.first is None:
                T.buffer_store(self.stages[1], values[0], [self.thread, 0])
                self.first = condition, T.address_of(buffer[index])
        with when(condition):
            for values, other, index in vectors:
                with when(other):
                    if self.volatile:
                        self._copy(T.address_of(buffer[index]), len(values))
                    else:
                        T.buffer_store(buffer, vector(values), [*index[:-1], at(index[-1], len(values))])

    def publish(self) -> None:
        memory_barrier(self.arch)
        if self.wait:
            name, operand, dtype = self.wait
            T.evaluate(T.call_llvm_intrin("void", name, tirx.const(operand, dtype)))
        elif self.rewrites and self.first:
            condition, target = self.first
            with when(condition):
                self._copy(target, 1)

    def _copy(self, target: Expr, width: int) -> None:
        """A volatile store of this thread's part of a stage, which TVM has no other name for."""
        source = T.address_of(self.stages[width][self.thread, 0])
        T.evaluate(T.call_llvm_intrin("void", "llvm.memcpy", target, source, T.int32(width * 4), T.bool(True)))


def arrive(arch: Device, counter: Buffer, index: Expr, tid: Expr) -> Expr:
    """Counts this workgroup at counter[index], an int32 parameter; the number of those that arrived before, in a scalar
    register. All its threads, `tid` is this one's number, have published what they stored."""
    arrived = T.alloc_buffer((1,), "int32", scope="shared")
    T.evaluate(T.tvm_storage_sync("shared"))
    with T.If(tid == 0), T.Then():
        put(arrived, T.call_intrin("int32", "tirx.atomic_add", T.address_of(counter[index]), T.int32(1)), 0)
    return uniform(arch, arrived[0])


def zero_after(arch: Device, old: Expr) -> Expr:
    """0, which is not known before `old` is: part of the addresses of what other workgroups stored, which the caller
    may load from here on."""
    memory_barrier(arch)
    return T.Bind(T.shift_right(old, T.int32(16)))
