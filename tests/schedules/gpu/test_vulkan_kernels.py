"""The GPU's kernels as SPIR-V on Mesa's CPU driver, against the references of the tests of AMD's kernels.

Two profiles run there: the driver's own, with subgroups of 8 and packed dot products, and "generic", which has neither
subgroups nor float16 arithmetic and workgroups of one wave. The driver executes what it is given: races, wrong
addresses and lanes show.
"""

from dataclasses import replace

import gguf_blocks
import numpy as np
import pytest
import workloads
from act_layouts import from_pairs
from samples import sample
from tvm.tirx.script import builder as T
from vulkan_harness import PROFILES, execute, on_both
from workloads import built

from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.activations import gated
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import padded
from mlc_amd.schedules.gpu.base.step import kernel
from mlc_amd.schedules.gpu.linear import gemm, gemv
from mlc_amd.schedules.gpu.linear.gemm_dot import choose
from mlc_amd.schedules.gpu.linear.gemm_tile import product_of
from mlc_amd.schedules.gpu.linear.gemv_plan import Plan
from mlc_amd.schedules.operators import RmsNorm
from mlc_amd.tools.reference import operators
from mlc_amd.tools.reference.case import Case as Call
from tests.schedules.gpu import test_gpu_gemm as gemm_cases
from tests.schedules.gpu import test_gpu_norm_linear as norm_cases
from tests.schedules.gpu.test_gpu_gemm import error

pytestmark = pytest.mark.usefixtures("vulkan")

TOLERANCE = 2e-5  # of the largest result


# ---- linear layers


def check_linear(profile, segments, k, m=1, layout="rows", biases=None, residual=False, plan=None):
    """Runs a linear layer on random weights and checks its outputs; they start as NaN."""
    biases, rng = biases or (False,) * len(segments), np.random.default_rng(5)
    inputs, x, _ = gemm_cases.problem(layout, m, k)
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


NORMS = (512, 1056, 2304)  # a part of a workgroup's threads, all, several times all


@pytest.mark.parametrize(("profile_name", "k"), sample(on_both(NORMS, NORMS), [("lavapipe", 2304), ("generic", 1056)]))
def test_gemv_of_a_norm(profile_name, k):
    """The same numbers as a norm that stores its result, quantized, and a GEMV of that."""
    profile = PROFILES[profile_name]
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


@pytest.mark.parametrize(("profile_name", "m"), sample(on_both((1, 4), (1, 4)), [("lavapipe", 4), ("generic", 1)]))
def test_norms_that_gemvs_prepare_and_complete(profile_name, m):
    profile = PROFILES[profile_name]

    def run(op, _, arrays):
        execute(built(op, profile), arrays, profile)

    norm_cases.check_prepared("", "q4_0", m, 64, 256, run)
    norm_cases.check_completed("", "q4_0", m, 256, run)


def test_gemv_segments_share_a_launch(profile):
    check_linear(
        profile, [("q4_k", 64), ("q5_0", 21), ("q6_k", 16)], 512, biases=(True, True, False), plan=Plan(2, 2, 16, 2)
    )


@pytest.mark.parametrize("fmt", ["q4_0", "bf16"])
def test_gemv_residual(profile, fmt):
    check_linear(profile, [(fmt, 37)], 256, layout=layout_of(fmt), biases=(True,), residual=True)


FEW = [(2, "q4_1"), (2, "mxfp4"), (4, "bf16"), (gemv.FEW, "q5_k"), (gemv.FEW, "q6_k"), (gemv.FEW, "iq1_m")]


@pytest.mark.parametrize(("m", "fmt"), sample(FEW, FEW[1:4]))
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


# The GEMVs have each format.
GEMMS = [*(("lavapipe", fmt) for fmt in (*SAMPLE, "q6_k", "iq1_m")), *(("generic", fmt) for fmt in ("q4_0", "f16"))]


@pytest.mark.parametrize(("profile_name", "fmt"), sample(on_both(gguf_blocks.DISTINCT, SAMPLE), GEMMS))
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
    inputs, x, _ = gemm_cases.problem("rows", m, k)
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
    "decode pairs": (1, "q2_k", "q2_k", 32, 256, "pairs"),
    "decode float": (1, "f32", "f16", 32, 128, "rows"),
    "decode float32": (1, "iq4_nl", "q4_1", 32, 256, ""),
    "few": (2, "q4_k", "q6_k", 64, 768, "rows"),
    "few float": (gemv.FEW, "f16", "f16", 32, 96, "pairs"),
    "few more": (gemv.FEW, "q4_0", "q4_0", 64, 512, "rows"),
    "chunk": (16, "q4_k", "q6_k", 96, 256, "rows"),
    "chunk large": (64, "q4_0", "q4_0", 96, 64, "rows"),
    "chunk float32": (32, "q8_0", "q8_0", 64, 64, ""),
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
    inputs, x, _ = gemm_cases.problem(layout_in, m, k, 3 / np.sqrt((g.astype(np.float64) ** 2).sum(1).mean()))
    g, u = (x @ w.astype(np.float64).T for w in (g, u))
    expected = ACTIVATIONS[act](g) * u
    outputs = {"A_out": np.zeros((m, f // 32, 32), np.int8), "S_out": np.full((m, f // 32, 4), np.nan, np.float32)}
    if layout != "rows":
        name = "Y"
        outputs = {name: np.full((m, f), np.nan, {"pairs": np.float16, "": np.float32}[layout])}
    arrays = {"state": gemm_cases.state(m), **inputs, **outputs}
    arrays |= {prefix + p: a for prefix, planes in (("G_", gate_planes), ("U_", up_planes)) for p, a in planes.items()}
    op = workloads.gate_up_op(gate, up, f, k, m, layout_in, layout, act=act)
    make = gemv.gate_up_swiglu if m <= gemv.FEW else gemm.gate_up_swiglu
    execute(make(op, profile, "gate_up"), arrays, profile)
    if layout != "rows":
        (got,) = outputs.values()
        got = from_pairs(got) if layout else got
        assert error(got, expected) < {"pairs": 6e-4, "": TOLERANCE}[layout]
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
