"""TensorIR to SPIR-V: lanes of a subgroup that exchange values, on Mesa's CPU driver."""

import numpy as np
import pytest
from spirv_kernels import (
    RNG,
    execute,
    kernel,
)
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base import device, profiles


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_shuffles(profile, dtype):
    wave, waves = profile.wave, 2 if profile.subgroups else 1
    masks = [2**i for i in range(wave.bit_length() - 1)] + [wave - 1]
    x = (np.arange(waves * wave).reshape(waves, wave) + 100).astype(dtype)
    name = np.dtype(dtype).name

    def body(b, _group, lane, w):
        value = T.Bind(b.X[w, lane])
        number = T.Bind(T.call_extern("int32", "vk.lane"))
        found = [T.Bind(T.call_extern(name, "vk.shuffle_xor", value, T.int32(mask))) for mask in masks]
        found.append(T.Bind(T.call_extern(name, "vk.shuffle", value, (number * 5 + 3) % wave)))
        found.append(T.Bind(T.call_extern(name, "vk.broadcast", value, T.int32(2))))
        for i, y in enumerate(found):
            T.buffer_store(b.Y, y, [i, w, lane])

    got = np.zeros((len(masks) + 2, waves, wave), dtype)
    func = kernel({"X": (x.shape, name), "Y": (got.shape, name)}, (1,), (wave, waves), body)
    got, lanes = execute(func, {"X": x, "Y": got}, profile).Y, np.arange(wave)
    for i, mask in enumerate(masks):
        assert np.array_equal(got[i], x[:, lanes ^ mask])
    assert np.array_equal(got[-2], x[:, (lanes * 5 + 3) % wave])
    assert np.array_equal(got[-1], np.repeat(x[:, 2:3], wave, 1))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_reductions(profile, dtype):
    wave, waves, name = profile.wave, 2 if profile.subgroups else 1, np.dtype(dtype).name
    x = RNG(32).integers(0 if dtype is np.uint32 else -50, 50, (waves, wave)).astype(dtype)

    def body(b, _group, lane, w):
        value = T.Bind(b.X[w, lane])
        for i, op in enumerate(("add", "max", "min")):
            T.buffer_store(b.Y, T.Bind(T.call_extern(name, f"vk.reduce_{op}", value)), [i, w, lane])

    func = kernel({"X": (x.shape, name), "Y": ((3, waves, wave), name)}, (1,), (wave, waves), body)
    got = execute(func, {"X": x, "Y": np.zeros((3, waves, wave), dtype)}, profile).Y
    for y, reference in zip(got, (x.sum(1), x.max(1), x.min(1)), strict=True):
        assert np.array_equal(y, np.repeat(reference[:, None], wave, 1))


def test_any_lane(profile):
    wave = profile.wave

    def body(b, group, lane):
        found = T.Bind(T.call_extern("bool", "vk.any", b.X[group, lane] == 7))
        T.buffer_store(b.Y, T.cast(found, "int32"), [group, lane])

    x = np.zeros((3, wave), np.int32)
    x[1, wave - 1] = x[2, 0] = 7
    got = execute(
        kernel({n: (x.shape, "int32") for n in "XY"}, (3,), (wave,), body), {"X": x, "Y": x * 0 - 1}, profile
    ).Y
    assert np.array_equal(got, np.repeat([[0], [1], [1]], wave, 1))


@pytest.mark.parametrize("block", [(64,), (4, 16), (2, 4, 8), (16, 4)])
def test_lanes_follow_thread_numbers(block):
    """Neighbours in the linear order of threads are neighbours in subgroups, whatever a workgroup's shape."""
    profile = profiles.resolve("lavapipe")

    def body(b, _group, *axes):
        linear = axes[0]
        for axis, below in zip(axes[1:], np.cumprod(block), strict=False):
            linear = linear + axis * int(below)
        linear = T.Bind(linear)
        T.buffer_store(b.Y, T.Bind(T.call_extern("int32", "vk.shuffle_xor", linear, T.int32(3))), [linear])

    got = execute(kernel({"Y": ((64,), "int32")}, (1,), block, body), {"Y": np.zeros(64, np.int32)}, profile).Y
    assert np.array_equal(got, np.arange(64) ^ 3)


def test_shared_memory_of_a_wave(profile):
    """Each wave through its own part of shared memory, in loops of different lengths."""
    wave, waves = profile.wave, 4 if profile.subgroups else 1

    def body(b, _group, lane, w):
        shared = T.alloc_buffer((waves, wave), "int32", scope=device.WAVE_SHARED)
        T.buffer_store(b.Y, T.int32(0), [w, lane])
        with T.serial(w + 1) as step:
            T.buffer_store(shared, lane * 10 + step, [w, lane])
            device.wave_barrier()
            T.buffer_store(b.Y, b.Y[w, lane] + shared[w, wave - 1 - lane], [w, lane])
            device.wave_barrier()

    got = execute(
        kernel({"Y": ((waves, wave), "int32")}, (1,), (wave, waves), body),
        {"Y": np.zeros((waves, wave), np.int32)},
        profile,
    ).Y
    w, lane = np.arange(waves)[:, None], np.arange(wave)[None]
    assert np.array_equal(got, (w + 1) * (wave - 1 - lane) * 10 + w * (w + 1) // 2)
