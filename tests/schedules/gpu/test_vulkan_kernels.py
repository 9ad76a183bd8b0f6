"""The GPU's kernels as SPIR-V on Mesa's CPU driver, against the references of the tests of AMD's kernels.

Two profiles run there: the driver's own, with subgroups of 8 and packed dot products, and "generic", which has neither
subgroups nor float16 arithmetic and workgroups of one wave. The driver executes what it is given: races, wrong
addresses and lanes show.
"""

import functools
from dataclasses import replace

import gguf_blocks
import numpy as np
import pytest
import workloads
from attention_cases import CTX, Case, Rows, check_attention, check_rope
from samples import sample
from tvm.tirx.script import builder as T
from vulkan_harness import PROFILES, gpu, on_both, run
from workloads import built

from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.attention.attention import attention
from mlc_amd.schedules.gpu.attention.kv_write import rope_kv_write
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import padded
from mlc_amd.schedules.gpu.base.step import kernel
from mlc_amd.schedules.gpu.linear import gemm, gemv
from mlc_amd.schedules.gpu.linear.gemm_dot import choose
from mlc_amd.schedules.gpu.linear.gemm_tile import product_of
from mlc_amd.schedules.gpu.linear.gemv_plan import Plan
from mlc_amd.schedules.operators import Embed, LayerNorm, Quantize, RmsNorm
from mlc_amd.schedules.operators.attention import Rope
from mlc_amd.tools.reference import operators
from mlc_amd.tools.reference.case import Case as Call
from tests.schedules.gpu import test_gpu_gemm as gemm_cases
from tests.schedules.gpu import test_gpu_norm as norm_cases
from tests.schedules.gpu.test_gpu_gemm import error

TOLERANCE = 2e-5  # of the largest result


@pytest.fixture(autouse=True, scope="module")
def device():
    gpu()


@pytest.fixture(params=PROFILES)
def profile(request):
    return PROFILES[request.param]


def execute(kernel, arrays, profile):
    """Runs the kernel on the arrays of its parameters' names; they hold what it wrote afterwards."""
    names = [param.name for param in kernel.params]
    results = run(kernel, [arrays[name] for name in names], profile)
    for name, result in zip(names, results, strict=True):
        arrays[name][...] = result


# ---- linear layers


def check_linear(profile, segments, k, m=1, layout="rows", biases=None, residual=False, plan=None):
    """Runs a linear layer on random weights and checks its outputs; they start as NaN."""
    biases, rng = biases or (False,) * len(segments), np.random.default_rng(5)
    inputs, x, _ = gemm_cases.problem(layout, m, k, False)
    arrays, expected = {"state": gemm_cases.state(m), **inputs}, []
    for i, ((fmt, n), bias) in enumerate(zip(segments, biases, strict=True)):
        planes, w = gemm_cases.weights(fmt, n, k, i)
        arrays |= {f"W{i}_{p}": plane for p, plane in planes.items()} | {
            f"Y{i}": np.full((m, padded(n)), np.nan, np.float32)
        }
        y = x @ w.astype(np.float64).T
        if bias:
            arrays[f"bias{i}"] = rng.standard_normal(n, np.float32)
            y = y + arrays[f"bias{i}"]
        if residual:
            arrays["R"] = rng.standard_normal(arrays["Y0"].shape, np.float32)
            y = y + arrays["R"][:, :n]
        expected.append(y)
    op = workloads.linear_op(segments, k, m, layout, biases, residual=residual)
    execute((gemv if m <= gemv.FEW else gemm).linear(op, profile, "linear", plan), arrays, profile)
    for i, y in enumerate(expected):
        assert error(arrays[f"Y{i}"][:, : y.shape[1]], y) < TOLERANCE
    return arrays


SAMPLE = ("q4_0", "q2_k", "mxfp4", "f16")  # codes, codes with minima, a codebook, floats


def layout_of(fmt):
    return "rows" if FORMATS[fmt].kind == "int8" else ""


@pytest.mark.parametrize(("profile_name", "fmt"), on_both(gguf_blocks.DISTINCT, SAMPLE))
def test_gemv_formats(profile_name, fmt):
    profile = PROFILES[profile_name]
    # a plan of another size for each profile, as the driver takes long over much code of the small one
    plan = Plan(rows=2 if profile.subgroups else 1, waves=4, lanes=64, unroll=1)
    check_linear(profile, [(fmt, 40)], 512, layout=layout_of(fmt), plan=plan)


@pytest.mark.parametrize(
    ("fmt", "k"), [("q4_0", 32), ("q8_0", 96), ("q4_k", 2304), ("f32", 33), ("bf16", 1000), ("f16", 4096)]
)
def test_gemv_columns(profile, fmt, k):
    check_linear(profile, [(fmt, 16)], k, layout=layout_of(fmt))


@pytest.mark.parametrize("k", [512, 1056, 2304])  # a part of a workgroup's threads, all, several times all
def test_gemv_of_a_norm(profile, k):
    """The same numbers as a norm that stores its result, quantized, and a GEMV of that."""
    segments, rng = [("q4_0", 40), ("q8_0", 16)], np.random.default_rng(5)
    arrays = {"state": gemm_cases.state(1), "X": rng.standard_normal((1, k), np.float32)}
    arrays |= {"G": rng.standard_normal(k, np.float32), "A": np.zeros((1, k // 32, 32), np.int8)}
    arrays |= {"S": np.zeros((1, k // 32, 4), np.float32)}
    for i, (fmt, n) in enumerate(segments):
        planes, _ = gemm_cases.weights(fmt, n, k, i)
        arrays |= {f"W{i}_{p}": plane for p, plane in planes.items()}
        arrays[f"Y{i}"] = np.full((1, padded(n)), np.nan, np.float32)
    apart = {name: array.copy() for name, array in arrays.items()}
    execute(built(RmsNorm(k=k, m=1, eps=1e-5, layout="rows", rows="all"), profile), apart, profile)
    execute(gemv.linear(workloads.linear_op(segments, k, 1, "rows"), profile, "linear"), apart, profile)
    op = workloads.linear_op(segments, k, 1, "rows", eps=1e-5)
    execute(gemv.linear(op, profile, "linear", Plan(2, 4, 64, 1)), arrays, profile)
    expected = operators.results(Call(op, arrays, "gpu", np.arange(1)))
    for i, (_, n) in enumerate(segments):  # sums of squares differ in their order: some codes by one
        assert error(arrays[f"Y{i}"][:, :n], apart[f"Y{i}"][:, :n].astype(np.float64)) < 2e-3
        assert error(arrays[f"Y{i}"][:, :n], expected[f"Y{i}"].value) < 2e-3  # selftest's reference


def test_gate_up_of_a_norm(profile):
    k, f, rng = 512, 64, np.random.default_rng(5)
    arrays = {"state": gemm_cases.state(1), "X": rng.standard_normal((1, k), np.float32)}
    arrays |= {"G": rng.standard_normal(k, np.float32), "Y": np.full((1, f), np.nan, np.float32)}
    x = arrays["X"].astype(np.float64)
    x, made = x / np.sqrt((x * x).mean() + 1e-5) * arrays["G"], []
    for i, prefix in enumerate(("G_", "U_")):
        planes, w = gemm_cases.weights("q4_k", f, k, i)
        arrays |= {prefix + p: plane for p, plane in planes.items()}
        made.append(x @ w.astype(np.float64).T)
    op = workloads.gate_up_op("q4_k", "q4_k", f, k, 1, "rows", "", eps=1e-5)
    execute(gemv.gate_up_swiglu(op, profile, "k"), arrays, profile)
    gate, up = made
    assert error(arrays["Y"], gate / (1 + np.exp(-gate)) * up) < 0.02  # activations are int8


def test_gemv_segments_share_a_launch(profile):
    check_linear(
        profile, [("q4_k", 64), ("q5_0", 21), ("q6_k", 16)], 512, biases=(True, True, False), plan=Plan(2, 2, 16, 2)
    )


@pytest.mark.parametrize("fmt", ["q4_0", "bf16"])
def test_gemv_residual(profile, fmt):
    check_linear(profile, [(fmt, 37)], 256, layout=layout_of(fmt), biases=(True,), residual=True)


@pytest.mark.parametrize(
    ("m", "fmt"),
    [(2, "q4_1"), (2, "mxfp4"), (4, "bf16"), (gemv.FEW, "q5_k"), (gemv.FEW, "q6_k"), (gemv.FEW, "iq1_m")],
)
def test_gemv_of_few_tokens(m, fmt):
    k = 544 if FORMATS[fmt].block == 32 else 512  # of 17 blocks not all lanes have one in the last step
    check_linear(PROFILES["lavapipe"], [(fmt, 37), (fmt, 16)], k, m, layout_of(fmt), (True, False))


def test_gemv_of_float_rows_takes_some_tokens():
    """As routers of steps do; groups of tokens after the live ones are left alone."""
    profile, m, n, k, live = PROFILES["lavapipe"], 24, 40, 96, 9
    op = workloads.linear_op([("f32", n)], k, m, "")
    assert [gemv.suits(op, replace(profile, units=units)) for units in (4, 5)] == [False, True]
    x, (planes, w) = np.random.default_rng(0).standard_normal((m, k), np.float32), gemm_cases.weights("f32", n, k, 0)
    out = np.full((m, padded(n)), np.nan, np.float32)
    arrays = {"state": gemm_cases.state(live), "X": x, "Y0": out} | {f"W0_{p}": plane for p, plane in planes.items()}
    execute(gemv.linear(op, profile, "linear"), arrays, profile)
    assert error(arrays["Y0"][:live, :n], x[:live] @ w.T) < 1e-6
    assert np.isnan(arrays["Y0"][2 * gemv.FEW :]).all()


def test_gemv_of_few_tokens_without_subgroups():
    check_linear(PROFILES["generic"], [("q4_k", 24)], 256, 4, residual=True)


@pytest.mark.parametrize(("profile_name", "fmt"), on_both(gguf_blocks.DISTINCT, SAMPLE))
def test_gemm_formats(profile_name, fmt):
    profile = PROFILES[profile_name]
    check_linear(profile, [(fmt, 48)], 256 if FORMATS[fmt].kind == "int8" else 96, 16, layout_of(fmt))


def test_gemm_segments_share_a_launch():
    profile = PROFILES["lavapipe"]
    check_linear(profile, [("q4_1", 96), ("q6_k", 37), ("q8_0", 16)], 256, 32, biases=(True, True, False))


@pytest.mark.parametrize("fmt", ["q4_0", "f16"])
def test_gemm_residual(profile, fmt):
    check_linear(profile, [(fmt, 41)], 64, 32, layout_of(fmt), (True,), True)


def test_gemm_leaves_tiles_without_live_tokens(profile):
    m, k, live = 64, 64, 17
    inputs, x, _ = gemm_cases.problem("rows", m, k, False)
    planes, w = gemm_cases.weights("q4_1", 48, k, 0)
    arrays = {"state": gemm_cases.state(live), **inputs, "Y0": np.full((m, 48), np.nan, np.float32)}
    arrays |= {f"W0_{p}": plane for p, plane in planes.items()}
    op = workloads.linear_op([("q4_1", 48)], k, m, "rows")
    execute(gemm.linear(op, profile, "linear"), arrays, profile)
    assert error(arrays["Y0"][:live], (x @ w.T)[:live]) < TOLERANCE
    tokens = choose(product_of(op, profile)).tokens
    assert np.isnan(arrays["Y0"][-(-live // tokens) * tokens :]).all() and tokens < m


# m, gate format, up format, f, k, layout
GATE_UP = {
    "decode": (1, "q4_0", "q4_0", 64, 512, "rows"),
    "decode mixed": (1, "q4_k", "q6_k", 64, 768, "rows"),
    "decode one unit": (1, "q4_0", "q5_1", 64, 32, "rows"),
    "decode half": (1, "q2_k", "q2_k", 32, 256, "half"),
    "decode float": (1, "f32", "f16", 32, 128, "rows"),
    "decode float32": (1, "iq4_nl", "q4_1", 32, 256, ""),
    "few": (2, "q4_k", "q6_k", 64, 768, "rows"),
    "few float": (gemv.FEW, "f16", "f16", 32, 96, "half"),
    "few more": (gemv.FEW, "q4_0", "q4_0", 64, 512, "rows"),
    "chunk": (16, "q4_k", "q6_k", 96, 256, "rows"),
    "chunk large": (64, "q4_0", "q4_0", 96, 64, "rows"),
    "chunk float32": (32, "q8_0", "q8_0", 64, 64, ""),
    "chunk half": (16, "q4_0", "q8_0", 32, 64, "half"),
    "chunk float": (16, "f16", "f32", 64, 64, "rows"),
}


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(0.79788456 * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_sq": lambda x: np.maximum(x, 0) ** 2,
}


def check_gate_up(profile, case, act="silu"):
    m, gate, up, f, k, layout = GATE_UP[case]
    layout_in = layout_of(gate)
    (gate_planes, g), (up_planes, u) = gemm_cases.weights(gate, f, k, 1), gemm_cases.weights(up, f, k, 2)
    # gates of a size at which the sigmoid bends
    inputs, x, _ = gemm_cases.problem(layout_in, m, k, False, 3 / np.sqrt((g.astype(np.float64) ** 2).sum(1).mean()))
    g, u = (x @ w.astype(np.float64).T for w in (g, u))
    expected = ACTIVATIONS[act](g) * u
    outputs = {"A_out": np.zeros((m, f // 32, 32), np.int8), "S_out": np.full((m, f // 32, 4), np.nan, np.float32)}
    if layout != "rows":
        name = "Y"
        outputs = {name: np.full((m, f), np.nan, {"half": np.float16, "": np.float32}[layout])}
    arrays = {"state": gemm_cases.state(m), **inputs, **outputs}
    arrays |= {prefix + p: a for prefix, planes in (("G_", gate_planes), ("U_", up_planes)) for p, a in planes.items()}
    op = workloads.gate_up_op(gate, up, f, k, m, layout_in, layout, act=act)
    make = gemv.gate_up_swiglu if m <= gemv.FEW else gemm.gate_up_swiglu
    execute(make(op, profile, "gate_up"), arrays, profile)
    if layout != "rows":
        assert error(next(iter(outputs.values())), expected) < {"half": 6e-4, "": TOLERANCE}[layout]
        return
    A, S = arrays["A_out"], arrays["S_out"]
    blocks, d = expected.reshape(m, -1, 32), S[..., 0]
    np.testing.assert_allclose(d, np.abs(blocks).max(-1) / 127, rtol=1e-4)
    assert (np.abs(A * d[..., None] - blocks) < 0.502 * d[..., None]).all()
    np.testing.assert_allclose(S, gemm_cases.sums(A, d), rtol=1e-6)


@pytest.mark.parametrize(("profile_name", "case"), on_both(GATE_UP, ("decode mixed", "few", "chunk float32")))
def test_gate_up_swiglu(profile_name, case):
    check_gate_up(PROFILES[profile_name], case)


@pytest.mark.parametrize("act", list(ACTIVATIONS)[1:])
@pytest.mark.parametrize("case", [next(case for case in GATE_UP if (GATE_UP[case][0] == 1) == one) for one in (1, 0)])
def test_activations(case, act):
    check_gate_up(PROFILES["lavapipe"], case, act)


def test_activations_of_large_numbers():
    """They overflow nowhere: 2**x in them does."""
    x = np.array([-1e20, -1e4, -90, -1, 0, 1, 90, 1e4], np.float32)
    for name, reference in ACTIVATIONS.items():
        with kernel(name) as ir:
            X, Y = (T.arg(n, T.buffer((8,), "float32")) for n in "XY")
            with launch((1,), (8,)) as (_, i):
                T.buffer_store(Y, gated(name, T.Bind(X[i]), T.float32(1)), [i])
        arrays = {"X": x, "Y": np.zeros_like(x)}
        execute(ir.get(), arrays, PROFILES["lavapipe"])
        with np.errstate(over="ignore"):
            expected = reference(x.astype(np.float64)).astype(np.float32)
        np.testing.assert_allclose(arrays["Y"], expected, rtol=1e-5, atol=1e-30, err_msg=name)


# ---- token vectors


@pytest.mark.parametrize("layout", ["rows", "half"])
@pytest.mark.parametrize("chunk", norm_cases.CHUNKS[1:3])
def test_quantize(profile, layout, chunk):
    m, k, live = chunk
    x, out = norm_cases.rows_of(m, k), norm_cases.outputs(m, k, layout)
    execute(built(Quantize(k=k, m=m, layout=layout), profile), norm_cases.state(live) | {"X": x} | out, profile)
    norm_cases.check(out, x[:live].astype(np.float64))


@pytest.mark.parametrize(
    ("layout", "rows", "chunk"), [("", "last", 1), ("rows", "all", 2), ("half", "all", 1), ("rows", "all", 0)]
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
Q8 = {"kv": "q8_0"}
ATTENTION = {
    "decode group 4": Case(8, 2, 64, states=((0, 1), (63, 1), (64, 1), (299, 1), (CTX - 1, 1))),
    "decode group 1": Case(2, 2, 96, layout="half", rope=Rope(True, 48), states=TWO),
    "decode group 2": Case(2, 1, 128, layout="rows", rope=Rope(True, 128, 1e-6), states=TWO),
    "decode group 7": Case(7, 1, 32, layout="rows", rope=Rope(False, 32), states=TWO),
    "decode group 9": Case(9, 1, 32, states=((299, 1),)),
    "decode head 24": Case(2, 1, 24, rope=Rope(True, 24, 1e-6), states=TWO),
    "decode norm after": Case(2, 1, 64, rope=Rope(False, 48, 1e-6, norm_after=True, value_norm=True), states=TWO),
    "decode reads": Case(2, 1, 64, rope=Rope(True, 64, 1e-6, writes=False), states=TWO),
    "decode window": Case(2, 1, 64, rope=Rope(True, 0), states=((0, 1), (103, 1), (500, 1)), attributes=WINDOW),
    "prefill group 3": Case(3, 1, 64, 16, "rows", states=((0, 16), (57, 13))),
    "prefill group 4": Case(4, 1, 128, 16, "half", states=((100, 16),)),
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
    "mixed window": Case(2, 1, 48, 32, "half", several=8, states=MIXED, attributes=WINDOW),
    "mixed chunk": Case(2, 1, 32, 32, several=8, states=MIXED, attributes={"chunk": 100}),
    "prefill chunk": Case(2, 1, 32, 16, "", states=((393, 16),), attributes={"chunk": 100}),
    "prefill window": Case(3, 1, 64, 16, "", states=((60, 16), (400, 13)), attributes=WINDOW | {"window": 9}),
    "decode q8": Case(2, 1, 128, layout="rows", rope=Rope(True, 48, 1e-6, value_norm=True), states=TWO, attributes=Q8),
    "mixed q8": Case(2, 1, 64, 32, several=8, states=MIXED, attributes=Q8 | WINDOW),
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
}


@functools.cache
def attention_kernel(profile, name):
    return attention(ATTENTION[name].op, replace(profile, matrix=""), "attention")


# Models on this driver, in test_vulkan_device.py, have one more decode and one more mixed kernel.
EACH_RUN = [("generic", name) for name in ("decode window", "rows")]  # Mesa takes seconds for its chunks
EACH_RUN += [("lavapipe", f"decode {name}") for name in ("norm after", "reads", "window", "chunk")]
EACH_RUN += [("lavapipe", name) for name in ("prefill head 80", "prefill window", "rows", "rows of a window")]
EACH_RUN += [("lavapipe", name) for name in ("mixed chunk", "mixed q8")]


@pytest.mark.parametrize(
    ("profile_name", "name"), sample(on_both(ATTENTION, ("decode window", "rows", "mixed", "mixed q8")), EACH_RUN)
)
def test_attention(profile_name, name):
    profile = PROFILES[profile_name]
    check_attention(ATTENTION[name], lambda arrays: execute(attention_kernel(profile, name), arrays, profile))


@pytest.mark.parametrize("name", ROPE)
def test_rope_kv_write(profile, name):
    case = ROPE[name]
    kernel = rope_kv_write(case.write, profile, "rope")
    # the last state has no room for more than one token
    states = {(5, max(1, case.m - 1)), (CTX - 1, case.m), Rows((63, 64, 200, CTX - 1)[: case.m])}
    check_rope(case, lambda arrays: execute(kernel, arrays, profile), states)
