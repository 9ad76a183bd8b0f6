"""Decode attention as it is split up for large GPUs (`attention_decode.py`), on any Vulkan device, against numpy in
float64.

The plan of such a GPU on a small one: short steps, splits that meet in device memory, and one split alone where there
are few keys.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from test_cpu_attention import LOG2E, attention_reference
from test_gpu_attention import CTX, Case, check_output, check_written, outputs, pack, rope_inputs, stale_caches, unpack
from test_vulkan_kernels import execute
from vulkan_harness import gpu

from mlc_amd.schedules.gpu.attention_decode import attention_decode, scratch_shapes, splits_of
from mlc_amd.schedules.gpu.profiles import resolve
from mlc_amd.schedules.gpu.rope_kv_write import Rope

POSITIONS = (0, 127, 128, CTX - 1)
CASES = {
    "queries": Case(8, 2, 128, act=""),
    "rope": Case(4, 1, 64, act="rows", rope=Rope(False, 64)),
    "normalized": Case(2, 1, 96, act="half", rope=Rope(True, 96, 1e-6)),
}


@functools.cache
def profile():
    """An NVIDIA GPU's plan for workgroups of four waves, of the test device's size."""
    found = gpu()
    wave = found.subgroup[1]
    return replace(resolve("lavapipe"), family="nvidia", units=132, wave=wave, threads=4 * wave)


@pytest.mark.parametrize("name", CASES)
def test_splits(name):
    heads, kv_heads, d, _, act, rope, _ = CASES[name]
    kernel = attention_decode(heads, kv_heads, d, CTX, act, profile(), "attention", rope)
    assert splits_of(heads, kv_heads, d, CTX, profile()).count > 1
    rng = np.random.default_rng(1)
    scratch = {
        n: np.full(shape, np.nan, dtype) if dtype == "float32" else np.zeros(shape, dtype)
        for n, (shape, dtype) in scratch_shapes(heads, kv_heads, d).items()
    }
    for position in POSITIONS:
        k, v = stale_caches(rng, kv_heads, d, position if rope else position + 1)
        Kc, Vc = pack(k, v)
        if rope:
            inputs, rotated = rope_inputs(rng, CASES[name])
            queries, own = rotated(position, 1)
        else:
            inputs = {"Qo": (rng.standard_normal((1, heads, d)) * 2 * LOG2E / np.sqrt(d)).astype(np.float16)}
            queries = inputs["Qo"].astype(np.float64) / LOG2E * np.sqrt(d)
        out = outputs(1, heads * d)
        state = np.array([position, 1, 0, 0], np.int32)
        execute(kernel, {"state": state, "Kc": Kc, "Vc": Vc, **inputs, **scratch, **out}, profile())
        new_k, new_v = unpack(Kc, Vc)
        if rope:
            check_written(k, new_k, position, own)
            check_written(v, new_v, position, inputs["V"].reshape(1, kv_heads, d))
        keys, values = (x[:, : position + 1].astype(np.float64) for x in (new_k, new_v))
        check_output(out, act, 1, attention_reference(queries, keys, values, position))
        assert not scratch["Arrived"].any()
