"""The norm of one token's activations inside the kernel that multiplies them: `norm.rms_norm` and a GEMV in one launch.

In: X float32 [1, k], G float32 [k]. Out: x * G / sqrt(mean(x*x) + eps), in the int8 blocks of `quantize.py`, in the
shared memory of each workgroup. Every workgroup computes all of it, which takes less time than a launch of its own
where workgroups are few, caches fast and launches slow (`pays`).
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier
from mlc_amd.schedules.gpu.base.norm import row_scale, scaled, square, workgroup_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import FIELDS, WIDTH, load_columns, quantize_block
from mlc_amd.schedules.gpu.base.registers import lane_of, put, vector
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.tir import Buffer, Expr

COLUMNS = 16  # that a thread has at a time: 16 bytes of its results
NORM_WAVES = 8  # waves of a workgroup, at least, where the arch has as many
STEPS = 4  # of a thread at most, whose columns stay in registers
CACHE = 1.5  # how much faster its caches are than its memory


def pays(workgroups: int, k: int, arch: Device) -> bool:
    """Whether so many workgroups read k columns of x and of g in less time than a launch takes, and can hold their
    norm. On an H200 a norm of 4096 columns takes 4 us among the launches of a step, and the kernels of q, k and v and
    of gate and up take 1.5 and 2.8 us longer with it."""
    threads = min(NORM_WAVES * arch.wave, arch.threads)
    fits = shared_bytes(k) <= arch.lds // 2 and k <= STEPS * threads * COLUMNS
    return fits and workgroups * k * 8 <= arch.launch_us * 1e-6 * CACHE * arch.bandwidth * 1e9


class Normed(NamedTuple):
    """`gemv_rows.Acts` of one token in shared memory: uint32x4 [k / 16], and float32x4 [KB]."""

    k: int
    quads: Buffer
    s: Buffer

    def words(self, block: Expr) -> list[Expr]:
        found = [T.Bind(self.quads[block * 2 + j]) for j in range(2)]
        return [T.Bind(lane_of(x, j)) for x in found for j in range(4)]

    def fields(self, block: Expr) -> list[Expr]:
        found = T.Bind(self.s[block])
        return [lane_of(found, j) for j in range(FIELDS)]


def shared_bytes(k: int) -> int:
    """Of shared memory."""
    return k + k // BLOCK * FIELDS * 4


def emit_norm(arch: Device, acts: list[Buffer], k: int, eps: float, lane: Expr, wave: Expr, waves: int) -> Normed:
    """The normed activations; all threads of the workgroup, `waves` waves, must call this. acts: X, G."""
    X, G = acts
    threads, units = waves * arch.wave, k // COLUMNS
    quads = T.alloc_buffer((units,), "uint32x4", scope="shared")
    fields = T.alloc_buffer((k // BLOCK,), "float32x4", scope="shared")
    part = T.alloc_buffer((waves,), "float32", scope="shared")
    thread, steps = T.Bind(wave * arch.wave + lane), []
    for i in range(-(-units // threads)):
        unit, live = thread + i * threads, None
        if (i + 1) * threads > units:  # after the last unit lanes repeat it
            unit, live = T.min(unit, T.int32(units - 1)), unit < units
        unit = T.Bind(unit)
        steps.append((unit, live, *(
            [x for c in range(0, COLUMNS, WIDTH) for x in load_columns(buf, *row, unit * COLUMNS + c)]
            for buf, row in ((X, (0,)), (G, ()))
        )))  # fmt: skip
    total = T.float32(0)
    for _, live, x, _ in steps:
        total = total + square(x, live)
    scale = row_scale(workgroup_sum(arch, waves, total, part, wave, lane), k, eps)
    for unit, live, x, g in steps:
        words, own = quantize_block(arch, scaled(x, scale, g))
        with when(live):
            put(quads, vector([T.reinterpret("uint32", word) for word in words]), unit)
            with T.If(unit % (BLOCK // COLUMNS) == 0), T.Then():
                put(fields, vector(own), T.shift_right(unit, T.int32(1)))
    barrier()
    return Normed(k, quads, fields)
