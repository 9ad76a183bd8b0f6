"""The SPIR-V emulator (tests/dev/spirv): what it computes, what it refuses; and kernels exactly as GPUs get them."""

import numpy as np
import pytest
from attention_cases import CTX, Case, Rows, check_attention
from samples import sample
from spirv_emulation import emulated, execute
from spirv_kernels import kernel
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.base import device
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.operators.attention import Rope
from tests.dev.spirv.emulator import Fault
from tests.schedules.gpu import test_vulkan_kernels

NVIDIA = resolve("nvidia")
WAVES, LANES = 2, 32
SIZE = WAVES * LANES


def turned(body, size=SIZE):
    """A kernel int32 x -> y of two waves: body(b, shared, wave, lane, i)."""

    def emit(b, _group, lane, wave):
        shared = T.alloc_buffer((size,), "int32", scope=device.WAVE_SHARED)
        body(b, shared, wave, lane, T.Bind(wave * LANES + lane))

    return kernel({name: ((SIZE,), "int32") for name in "xy"}, (1,), (LANES, WAVES), emit)


def ran(func):
    x = np.arange(SIZE, dtype=np.int32) * 3 - 40
    return x, emulated(func, [x, np.zeros_like(x)], NVIDIA)[1]


def exchanging(*barriers, distance=1):
    """Lanes write their number, look at another's, and write again; barriers between."""
    between, after = barriers

    def body(b, shared, wave, lane, i):
        T.buffer_store(shared, b.x[i], [i])
        between()
        other = T.Bind(shared[(i + distance) % SIZE if distance >= LANES else wave * LANES + (lane + distance) % LANES])
        after()
        T.buffer_store(shared, other, [i])
        T.buffer_store(b.y, shared[i], [i])

    return turned(body)


def nothing():
    pass


def test_lanes_meet_at_barriers():
    x, y = ran(exchanging(device.wave_barrier, device.wave_barrier))
    assert np.array_equal(y, np.roll(x.reshape(WAVES, LANES), -1, axis=1).reshape(-1))
    x, y = ran(exchanging(device.barrier, device.barrier, distance=LANES + 1))
    assert np.array_equal(y, np.roll(x, -LANES - 1))


@pytest.mark.parametrize(
    ("barriers", "distance", "fault"),
    [
        ((nothing, device.wave_barrier), 1, "never written|read that another lane wrote"),
        ((device.wave_barrier, nothing), 1, "written that another lane read"),
        ((device.wave_barrier, device.barrier), LANES, "never written|read that another lane wrote"),
        ((device.barrier, device.wave_barrier), LANES, "read that another lane wrote|written that another lane read"),
    ],
)
def test_lanes_that_do_not_meet_race(barriers, distance, fault):
    """The first wave's lanes wait for each other at a barrier of a wave, the workgroup's at its own alone."""
    with pytest.raises(Fault, match=fault):
        ran(exchanging(*barriers, distance=distance))


def test_a_place_that_two_lanes_write():
    def body(b, shared, wave, lane, i):
        T.buffer_store(shared, b.x[i], [i // 2 * 2])
        device.barrier()
        T.buffer_store(b.y, shared[i // 2 * 2], [i])

    with pytest.raises(Fault, match="different values to one place"):
        ran(turned(body))


def test_shared_memory_that_nobody_wrote():
    def body(b, shared, wave, lane, i):
        with T.If(i < SIZE - 1), T.Then():
            T.buffer_store(shared, b.x[i], [i])
        device.barrier()
        T.buffer_store(b.y, shared[i], [i])

    with pytest.raises(Fault, match="never written"):
        ran(turned(body))


@pytest.mark.parametrize(
    ("barriers", "fault"),
    [
        ((device.barrier, device.barrier), None),
        ((nothing, device.barrier), "added to that"),
        ((device.barrier, nothing), "read that another lane wrote"),
    ],
)
def test_atomic_additions_to_shared_memory(barriers, fault):
    def body(b, shared, wave, lane, i):
        T.buffer_store(shared, T.int32(5), [i])
        barriers[0]()
        T.evaluate(T.call_intrin("int32", "tirx.atomic_add", T.address_of(shared[i % 4]), b.x[i]))
        barriers[1]()
        T.buffer_store(b.y, shared[i], [i])

    if fault:
        with pytest.raises(Fault, match=fault):
            ran(turned(body))
        return
    x, y = ran(turned(body))
    wanted = np.full(SIZE, 5)
    np.add.at(wanted, np.arange(SIZE) % 4, x)
    assert np.array_equal(y, wanted)


@pytest.mark.parametrize(
    ("place", "fault"),
    [("x", "bytes 132 to 260 of argument 0, which has 256"), ("y", "argument 1"), ("shared", "of 64")],
)
def test_places_outside(place, fault):
    def body(b, shared, wave, lane, i):
        T.buffer_store(shared, b.x[i + (place == "x")], [i + (place == "shared")])
        T.buffer_store(b.y, T.int32(1), [i + (place == "y")])

    with pytest.raises(Fault, match=fault):
        ran(turned(body))


def test_branches_loops_and_exchanges():
    def body(b, shared, wave, lane, i):
        total = T.alloc_buffer((1,), "int32", scope="local")
        T.buffer_store(total, T.int32(0), [0])
        with T.serial(T.Bind(lane % 5)) as j:  # lanes leave it one after the other
            odd = T.Bind(b.x[i] % 2 != 0)
            with T.If(odd):
                with T.Then():
                    T.buffer_store(total, total[0] - 1, [0])
                with T.Else():
                    T.buffer_store(total, total[0] + j, [0])
        T.buffer_store(b.y, device.wave_sum(NVIDIA, T.Bind(total[0])), [i])

    x, y = ran(turned(body))
    steps = np.arange(SIZE) % LANES % 5
    own = np.where(x % 2 == 0, steps * (steps - 1) // 2, -steps).reshape(WAVES, LANES)
    assert np.array_equal(y, np.repeat(own.sum(1), LANES))


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ("reduction", r"reduced in 18 of 32 lanes"),
        ("barrier", r"a barrier that 18 of 32 lanes"),
        ("shuffle", "elsewhere"),
    ],
)
def test_lanes_that_are_elsewhere(what, fault):
    def body(b, shared, wave, lane, i):
        with T.If(b.x[i] > 0), T.Then():
            if what == "reduction":
                T.buffer_store(b.y, device.wave_sum(NVIDIA, T.Bind(b.x[i])), [i])
            elif what == "shuffle":
                T.buffer_store(b.y, device.wave_sum(NVIDIA, T.Bind(b.x[i]), 4), [i])
            else:
                device.wave_barrier()

    with pytest.raises(Fault, match=fault):
        ran(turned(body))


def test_lanes_that_are_together():
    """Four lanes that share a row exchange values, while those of other rows are elsewhere."""

    def body(b, shared, wave, lane, i):
        with T.If(lane < 12), T.Then():
            T.buffer_store(b.y, device.wave_sum(NVIDIA, T.Bind(b.x[i]), 4), [i])

    x, y = ran(turned(body))
    sums = np.repeat(x.reshape(WAVES, -1, 4).sum(2), 4, axis=1)
    assert np.array_equal(y.reshape(WAVES, LANES), np.where(np.arange(LANES) < 12, sums, 0))


# ---- kernels as GPUs get them; those of matrices: test_gemm_lanes.py, test_vulkan_coop.py and others

ATTENTION = {
    "row": Case(4, 1, 64, layout="pairs", rope=Rope(False, 64), states=((70, 1),)),
    "rows": Case(
        2, 1, 32, m=8, layout="rows", several=8, rope=Rope(True, 32, 1e-6), states=(Rows((3, CTX - 1), (61, 5)),),
    ),
}  # fmt: skip
ON = [(name, arch) for name in ATTENTION for arch in ("nvidia", "vangogh", "gfx90c", "rdna4")]


@pytest.mark.parametrize(
    ("name", "arch"), sample(ON, [("row", "nvidia"), ("rows", "nvidia"), ("rows", "vangogh"), ("row", "gfx90c")])
)
def test_decode_attention(name, arch):
    case, profile = ATTENTION[name], resolve(arch)
    func = attention(case.op, profile, "k")
    check_attention(case, lambda arrays: execute(func, arrays, profile))


LINEAR = [(arch, m) for arch in ("vangogh", "rdna2", "gfx90c") for m in (1, 8, 16)]


@pytest.mark.parametrize(("arch", "m"), sample(LINEAR, [("vangogh", 1), ("vangogh", 16), ("gfx90c", 8)]))
def test_linear(arch, m, monkeypatch):
    monkeypatch.setattr(test_vulkan_kernels, "execute", execute)
    test_vulkan_kernels.check_linear(resolve(arch), [("q4_k", 41), ("q8_0", 16)], 512, m)
