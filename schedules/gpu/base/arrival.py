"""How the workgroups of a launch find the last of them, which goes on with what all made.

Each workgroup stores its results into a COHERENT parameter, complete beyond the caches that workgroups do not share
(`device.Outbox`), and then increments an atomic counter. The one that finds all others arrived loads them, at addresses
that depend on what the counter returned, so neither compiler nor hardware can start the loads early. Results of
different workgroups lie in different cache lines, which nothing reads earlier in the launch, so no cache has an old
copy. On Vulkan results and counter are coherent, and memory barriers stand before the increment and before the loads;
so the increment itself orders nothing.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import memory_barrier, uniform
from mlc_amd.schedules.gpu.base.registers import put

LINE = 32  # float32 of a cache line


def arrive(arch, counter, index, tid):
    """Counts this workgroup at counter[index], an int32 parameter; the number of those that arrived before, in a scalar
    register. All its threads, `tid` is this one's number, have published what they stored."""
    arrived = T.alloc_buffer((1,), "int32", scope="shared")
    T.evaluate(T.tvm_storage_sync("shared"))
    with T.If(tid == 0), T.Then():
        put(arrived, T.call_intrin("int32", "tirx.atomic_add", T.address_of(counter[index]), T.int32(1)), 0)
    return uniform(arch, arrived[0])


def zero_behind(arch, old):
    """0, which is not known before `old` is: part of the addresses of what other workgroups stored, which the caller
    may load from here on."""
    memory_barrier(arch)
    return T.Bind(T.shift_right(old, T.int32(16)))
