"""Norms, embedding and attention as SPIR-V on Mesa's CPU driver, as test_vulkan_kernels.py does linear layers."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from attention_cases import CTX, Case, Rows, check_attention, check_rope
from samples import sample
from vulkan_harness import PROFILES, execute, on_both
from workloads import built

from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.kv_write import rope_kv_write
from mlc_amd.schedules.operators import Embed, LayerNorm, Quantize, RmsNorm
from mlc_amd.schedules.operators.attention import Rope
from mlc_amd.tools.reference.attention import multiplied
from tests.schedules.gpu import test_gpu_gemm as gemm_cases
from tests.schedules.gpu import test_gpu_norm as norm_cases
from tests.schedules.gpu.test_gpu_gemm import error

pytestmark = pytest.mark.usefixtures("vulkan")


# ---- token vectors


@pytest.mark.parametrize(("layout", "rotation"), [("rows", 0), ("pairs", 0), ("rows", 32), ("", 128)])
@pytest.mark.parametrize("chunk", norm_cases.CHUNKS[1:3])
def test_quantize(profile, layout, rotation, chunk):
    m, k, live = chunk
    rotation = rotation and math.gcd(rotation, k)
    x, out = norm_cases.rows_of(m, k), norm_cases.outputs(m, k, layout)
    if rotation:  # sums of few digits
        x = np.rint(x * 10).clip(-999, 999)
    kernel = built(Quantize(k=k, m=m, layout=layout, rotation=rotation), profile)
    execute(kernel, norm_cases.state(live) | {"X": x} | out, profile)
    norm_cases.check(out, multiplied(x[:live], rotation), atol=1e-4 if rotation else 1e-9)


@pytest.mark.parametrize(
    ("layout", "rows", "chunk"), [("", "last", 1), ("rows", "all", 2), ("pairs", "all", 1), ("rows", "all", 0)]
)
def test_rms_norm(profile, layout, rows, chunk):
    m, k, live = norm_cases.CHUNKS[chunk]
    x, g = norm_cases.rows_of(m, k), np.random.default_rng(9).standard_normal(k).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + norm_cases.EPS) * g)[:live]
    out = norm_cases.outputs(m if rows == "all" else 1, k, layout)
    kernel = built(RmsNorm(k=k, m=m, eps=norm_cases.EPS, layout=layout, rows=rows), profile)
    execute(kernel, norm_cases.state(live) | {"X": x, "G": g} | out, profile)
    norm_cases.check(out, expected if rows == "all" else expected[-1:])


@pytest.mark.parametrize(("single", "live", "picked"), [(2, 5, [0, 1, 4]), (0, 7, [6]), (3, 3, [0, 1, 2]), (0, 0, [])])
def test_norm_of_answers(profile, single, live, picked):
    m, k = 8, 96
    x, g = norm_cases.rows_of(m, k), np.random.default_rng(9).standard_normal(k).astype(np.float32)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + norm_cases.EPS) * g
    out, state = norm_cases.outputs(4, k, "rows"), {"state": np.array([single, live, 0, 0], np.int32)}
    kernel = built(RmsNorm(k=k, m=m, eps=norm_cases.EPS, layout="rows", rows="answers:4"), profile)
    execute(kernel, state | {"X": x, "G": g} | out, profile)
    norm_cases.check(out, expected[picked])


@pytest.mark.parametrize(("layout", "rows", "chunk", "bias"), [("", "last", 1, True), ("rows", "all", 2, False)])
def test_layer_norm(profile, layout, rows, chunk, bias):
    m, k, live = norm_cases.CHUNKS[chunk]
    rng = np.random.default_rng(9)
    x, (g, b) = (rng.standard_normal((n, k)).astype(np.float32) for n in (m, 2))
    x += 3  # a mean that counts
    wide = x.astype(np.float64)
    wide -= wide.mean(-1, keepdims=True)
    expected = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + norm_cases.EPS) * g + b * bias)[:live]
    out = norm_cases.outputs(m if rows == "all" else 1, k, layout)
    kernel = built(LayerNorm(k=k, m=m, eps=norm_cases.EPS, bias=bias, layout=layout, rows=rows), profile)
    execute(kernel, norm_cases.state(live) | {"X": x, "G": g, "B": b} | out, profile)
    if layout:
        norm_cases.check(out, expected)
    else:  # sums of which little is left
        assert error(out["Y"], expected[-1:]) < 1e-6


# format of the table, scale
EMBEDS = [
    *((fmt, 1.0) for fmt in ("q4_0", "q5_1", "q3_k", "q6_k", "iq4_xs", "mxfp4", "nvfp4", "iq1_m", "bf16")),
    ("q4_0", 0.25), ("bf16", 0.25),
]  # fmt: skip


@pytest.mark.parametrize(("profile_name", "case"), on_both(EMBEDS, (("q6_k", 1.0), ("bf16", 0.25))))
def test_embed(profile_name, case):
    profile, (fmt, scale) = PROFILES[profile_name], case
    vocab, columns, m, live = 37, 256, 5, 4
    planes, table = gemm_cases.weights(fmt, vocab, columns, 3)
    tokens = np.array([-1, vocab, 17, 36, 5], np.int32)
    X = np.full((m, columns), norm_cases.LEFT, np.float32)
    arrays = norm_cases.state(live) | {"tokens": tokens, "X": X} | planes
    execute(built(Embed(fmt=fmt, vocab=vocab, k=columns, m=m, scale=scale), profile), arrays, profile)
    np.testing.assert_array_equal(X[:live], table[np.clip(tokens, 0, vocab - 1)[:live]] * np.float32(scale))
    assert (X[live:] == norm_cases.LEFT).all()


# ---- attention

TWO = ((0, 1), (130, 1))
WINDOW = {"window": 40, "softcap": 4.0, "sinks": True, "scale": 0.2}
SINGLES = (Rows((0, 130, CTX - 1)), Rows((299, 5, 64, 63, 0, 128, 200, 400)), Rows())
MIXED = (Rows((130, 5, 299), (57, 13)), Rows((), (0, 30)), Rows((CTX - 1,) * 8), Rows((64, 300), (450, 30)))
Q8, Q4 = {"kv": "q8_0"}, {"kv": "q4_0"}
ATTENTION = {
    "decode group 4": Case(8, 2, 64, states=((0, 1), (63, 1), (64, 1), (299, 1), (CTX - 1, 1))),
    "decode group 1": Case(2, 2, 96, layout="pairs", rope=Rope(True, 48), states=TWO),
    "decode group 2": Case(2, 1, 128, layout="rows", rope=Rope(True, 128, 1e-6), states=TWO),
    "decode group 7": Case(7, 1, 32, layout="rows", rope=Rope(False, 32), states=TWO),
    "decode group 9": Case(9, 1, 32, states=((299, 1),)),
    "decode head 24": Case(2, 1, 24, rope=Rope(True, 24, 1e-6), states=TWO),
    "decode norm after": Case(2, 1, 64, rope=Rope(False, 48, 1e-6, norm_after=True, value_norm=True), states=TWO),
    "decode reads": Case(2, 1, 64, rope=Rope(True, 64, 1e-6, writes=False), states=TWO),
    "decode window": Case(2, 1, 64, rope=Rope(True, 0), states=((0, 1), (103, 1), (500, 1)), attributes=WINDOW),
    "prefill group 3": Case(3, 1, 64, 16, "rows", states=((0, 16), (57, 13))),
    "prefill group 4": Case(4, 1, 128, 16, "pairs", states=((100, 16),)),
    "prefill group 1": Case(2, 2, 96, 16, "", states=((57, 13), (CTX - 16, 16))),
    "prefill head 80": Case(2, 1, 80, 16, "", states=((57, 13),)),
    "decode window of a page": Case(
        2, 1, 64, rope=Rope(True, 64), states=((63, 1), (64, 1), (500, 1)),
        attributes={"window": 64, "sinks": True},
    ),
    "decode chunk": Case(2, 1, 48, states=((39, 1), (500, 1)), attributes={"chunk": 40}),
    "prefill window of a page": Case(
        2, 1, 48, 16, "", states=((56, 16), (401, 13)), attributes={"window": 49, "sinks": True}
    ),
    "rows": Case(4, 2, 64, 8, "rows", several=8, states=SINGLES),
    "rows of a window": Case(2, 1, 32, 8, several=8, states=SINGLES, attributes=WINDOW),
    "rows of chunks": Case(2, 1, 32, 8, several=8, states=SINGLES, attributes={"chunk": 100}),
    "many rows": Case(2, 1, 32, 64, several=64, states=(Rows(tuple(range(0, 448, 7))), Rows((511, 0, 300)))),
    "mixed": Case(3, 1, 64, 32, several=8, states=MIXED),
    "mixed window": Case(2, 1, 48, 32, "pairs", several=8, states=MIXED, attributes=WINDOW),
    "mixed chunk": Case(2, 1, 32, 32, several=8, states=MIXED, attributes={"chunk": 100}),
    "prefill chunk": Case(2, 1, 32, 16, "", states=((393, 16),), attributes={"chunk": 100}),
    "prefill window": Case(3, 1, 64, 16, "", states=((60, 16), (400, 13)), attributes=WINDOW | {"window": 9}),
    "decode q8": Case(2, 1, 128, layout="rows", rope=Rope(True, 48, 1e-6, value_norm=True), states=TWO, attributes=Q8),
    "mixed q8": Case(2, 1, 64, 32, several=8, states=MIXED, attributes=Q8 | WINDOW),
    "decode q4": Case(8, 2, 128, layout="rows", states=TWO, attributes=Q4),
    "rows q4": Case(2, 1, 96, 8, "rows", several=8, states=SINGLES[:2], attributes=Q4, back=True),
    "mixed q4": Case(2, 1, 96, 32, several=8, states=MIXED, attributes={"kv": "q8_0/q4_0"} | WINDOW),
}  # fmt: skip
ROPE = {
    "neox partial": Case(3, 1, 96, 4, rope=Rope(True, 48)),
    "interleaved": Case(2, 1, 64, 1, rope=Rope(False, 64)),
    "norm": Case(4, 2, 128, 4, rope=Rope(True, 128, 1e-6)),
    "head 24": Case(3, 1, 24, 4, rope=Rope(True, 12, 1e-6)),
    "norm after": Case(3, 1, 48, 4, rope=Rope(True, 24, 1e-6, norm_after=True, value_norm=True)),
    "reads": Case(3, 1, 64, 4, rope=Rope(True, 64, 1e-6, writes=False)),
    "none": Case(2, 1, 64, 4, rope=Rope(True, 0), attributes={"scale": 0.3}),
    "q8": Case(3, 1, 96, 4, rope=Rope(True, 48, 1e-6), attributes=Q8),
    "q4": Case(3, 1, 128, 4, rope=Rope(True, 48, 1e-6), attributes=Q4),
    "q8 and q4": Case(3, 1, 96, 4, rope=Rope(True, 48, 1e-6), attributes={"kv": "q8_0/q4_0"}),
    "reads q4": Case(3, 1, 256, 4, rope=Rope(True, 64, 1e-6, writes=False), attributes=Q4),
}


@functools.cache
def attention_kernel(profile, name):
    return attention(ATTENTION[name].op, replace(profile, matrix=""), "attention")


# Models on this driver, in test_vulkan_device.py, have one more decode and one more mixed kernel.
EACH_RUN = [("generic", "decode window")]  # Mesa takes seconds for its chunks
EACH_RUN += [("lavapipe", f"decode {name}") for name in ("norm after", "reads", "chunk")]
EACH_RUN += [("lavapipe", name) for name in ("prefill window", "rows", "decode q4", "rows q4", "mixed q4")]


@pytest.mark.parametrize(
    ("profile_name", "name"), sample(on_both(ATTENTION, ("decode window", "rows", "mixed", "mixed q8")), EACH_RUN)
)
def test_attention(profile_name, name):
    profile = PROFILES[profile_name]
    check_attention(ATTENTION[name], lambda arrays: execute(attention_kernel(profile, name), arrays, profile))


@pytest.mark.parametrize(
    ("profile_name", "name"), sample(on_both(ROPE, ROPE), on_both(ROPE, ("neox partial", "q8", "q4")))
)
def test_rope_kv_write(profile_name, name):
    profile, case = PROFILES[profile_name], ROPE[name]
    kernel = rope_kv_write(case.write, profile, "rope")
    # the last state has no room for more than one token
    states = {(5, max(1, case.m - 1)), (CTX - 1, case.m), Rows((63, 64, 200, CTX - 1)[: case.m])}
    check_rope(case, lambda arrays: execute(kernel, arrays, profile), states)
