"""Lets the last workgroup of a launch continue with the results of all workgroups.

Each workgroup stores its results into a COHERENT parameter (`Outbox`), so that they are in device memory or a cache
that all workgroups share. Then it increments an atomic counter (`arrive`). The workgroup that finds that all others
have arrived loads all results.

The loads must not return old data. Their addresses depend on the value that the counter returned (`zero_after`), so
neither compiler nor hardware can start them early. Results of different workgroups are in different cache lines, which
nothing reads earlier in the launch, so no cache has an old copy. On Vulkan, results and counter are coherent, and there
are memory barriers before the increment and before the loads; so the increment needs no memory order itself.
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

LINE = 32  # float32 values of a cache line
Vector = tuple[list[Expr], Expr | None, tuple[Expr, ...]]  # (float32 registers, condition or None, index in the buffer)


class Outbox:
    """Stores vectors into a COHERENT parameter, for another workgroup of the launch to read. Each thread calls `send`
    for its vectors, then `publish`. After this, the other workgroup can read them. thread: number of this thread among
    `threads`. widths: the lengths of the vectors.

    For target rocm there are three ways:

    - GPUs with one L2 and an instruction that waits for stores (`Family.wait_stores`): plain stores, as L1 writes
      through, and this instruction.
    - other GPUs with one L2: plain stores. LLVM waits for stores only after a volatile one, so `publish` stores the
      first word of the first vector once more, as a volatile store.
    - GPUs whose L2s are not coherent: all stores are volatile. They bypass the L2, and each is waited for.
    """

    def __init__(self, arch: Device, thread: Expr, threads: int, widths: Iterable[int]):
        self.arch, self.thread = arch, thread
        self.first: tuple[Expr, Expr] | None = None  # (condition, address) of the first vector
        code = arch.code if isinstance(arch, GpuArch) else None
        self.volatile = code is not None and not code.coherent
        self.wait = code.wait_stores if code else None
        self.rewrites = code is not None and code.coherent and not self.wait
        widths = widths if self.volatile else [1] if self.rewrites else []
        self.stages = {width: T.alloc_buffer((threads, width), "float32", scope="shared") for width in widths}

    def send(self, condition: Expr | None, buffer: Buffer, *vectors: Vector) -> None:
        """Stores vectors, of different widths, if `condition` (None: always) and the vector's own condition hold. The
        first vector must have no condition of its own."""
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
        """A volatile store of this thread's part of a stage. TVM has no volatile stores but this intrinsic."""
        source = T.address_of(self.stages[width][self.thread, 0])
        T.evaluate(T.call_llvm_intrin("void", "llvm.memcpy", target, source, T.int32(width * 4), T.bool(True)))


def arrive(arch: Device, counter: Buffer, index: Expr, tid: Expr) -> Expr:
    """Counts this workgroup at counter[index], an int32 parameter. Returns the number of workgroups that arrived
    before, in a scalar register. tid: number of this thread. All threads of the workgroup must have called `publish`
    before."""
    arrived = T.alloc_buffer((1,), "int32", scope="shared")
    T.evaluate(T.tvm_storage_sync("shared"))
    with T.If(tid == 0), T.Then():
        put(arrived, T.call_intrin("int32", "tirx.atomic_add", T.address_of(counter[index]), T.int32(1)), 0)
    return uniform(arch, arrived[0])


def zero_after(arch: Device, old: Expr) -> Expr:
    """0, computed from `old`, the result of `arrive`. The caller must add it to the addresses from which it loads the
    results of other workgroups; so these loads cannot start before `old` is known."""
    memory_barrier(arch)
    return T.Bind(T.shift_right(old, T.int32(16)))
