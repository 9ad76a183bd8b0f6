"""Decode kernels of the GPU, run in the ISA emulator: linear layers of one and of a few tokens, and gate/up with SwiGLU
of one, against numpy.

The oracle: gguf-py's dequantized weights times the dequantized activations in float64.
"""

import re
from itertools import product

import gguf_blocks
import numpy as np
import pytest
from act_layouts import from_pairs
from samples import sample
from workloads import gate_up_op, linear_op

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import ARCHS, resolve
from mlc_amd.schedules.gpu.base.planes import padded
from mlc_amd.schedules.gpu.linear.gemv import FEW, gate_up_swiglu, linear
from mlc_amd.schedules.gpu.linear.gemv_plan import Plan, gate_up_default, linear_default
from tests.dev.gfxemu import emulate

ARCH_NAMES = ("gfx1100", "gfx1201", "gfx942")
TOLERANCE = 1e-5  # of the largest result
LINEAR_ROWS = 9216  # at a model's size
# Those that differ in what the code depends on: the generation, the kind of dot product, the default plans.
DIFFERENT = {
    (
        arch.name[:6],
        arch.dot,
        linear_default(linear_op([("q4_0", LINEAR_ROWS)], 4096, 1, "rows"), arch),
        gate_up_default(gate_up_op("q4_0", "q4_0", 32, 4096, 1, "rows", "rows"), arch),
    ): name
    for name, arch in ARCHS.items()
}


def weights(fmt, n, k, seed, prefix):
    """(exact weights float64 [n, k], parameters)."""
    planes, w = gguf_blocks.weights(fmt, n, k, seed, "rows")
    return w.astype(np.float64), {prefix + p: plane for p, plane in planes.items()}


def activations(k, kind, m=1):
    """(exact x float64 [m, k], parameters)."""
    x = np.random.default_rng(0).standard_normal((m, k)).astype(np.float32)
    if kind == "float":
        return x.astype(np.float64), {"X": x}
    blocks = x.reshape(m, -1, 32)
    d = np.abs(blocks).max(2, keepdims=True) / np.float32(127)
    q = np.rint(blocks / d).astype(np.int8)
    total = [q.sum(2, dtype=np.int32), q[..., :16].sum(2, dtype=np.int32), q[..., 16:].sum(2, dtype=np.int32)]
    s = np.stack([d[..., 0], *(d[..., 0] * t for t in total)], 2).astype(np.float32)
    return (q * d.astype(np.float64)).reshape(m, k), {"A": q, "S": s}


def state():
    return {"state": np.array([7, 1, 0, 0], np.int32)}


def check_no_spills(module):
    for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert set(re.findall(rf"\.{what}:\s+(\d+)", module.assembly)) == {"0"}, what


def run_linear(arch, segments, k, biases, residual, plan=None, wave_order="fwd", m=1):
    layout = "rows" if FORMATS[segments[0][0]].kind == "int8" else ""
    kernel = linear(linear_op(segments, k, m, layout, biases, residual), resolve(arch), "linear", plan)
    return run_kernel(kernel, arch, segments, k, m, biases, residual, wave_order)


def run_kernel(kernel, arch, segments, k, m, biases, residual, wave_order):
    """Compiles and runs a linear layer's kernel, checks its outputs and returns the emulator's result."""
    module = compile_hsaco({"linear": kernel}, resolve(arch))
    check_no_spills(module)
    x, arrays = activations(k, FORMATS[segments[0][0]].kind, m)
    arrays |= state()
    expected, rng = [], np.random.default_rng(5)
    for i, ((fmt, n), bias) in enumerate(zip(segments, biases, strict=True)):
        w, parts = weights(fmt, n, k, i, f"W{i}_")
        arrays |= parts | {f"Y{i}": np.full((m, padded(n)), np.nan, np.float32)}
        y = x @ w.T
        scale = np.abs(y).max()
        if bias:
            arrays[f"bias{i}"] = (rng.standard_normal(n) * scale).astype(np.float32)
            y = y + arrays[f"bias{i}"]
        if residual:
            arrays["R"] = (rng.standard_normal((m, padded(n))) * scale).astype(np.float32)
            y = y + arrays["R"][:, :n]
        expected.append(y)
    [result] = emulate(module, "linear", arrays, wave_order)
    for i, y in enumerate(expected):
        assert np.abs(arrays[f"Y{i}"][:, : y.shape[1]] - y).max() <= TOLERANCE * np.abs(y).max()
    return result


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("fmt", gguf_blocks.DISTINCT)
def test_formats(arch, fmt):
    run_linear(arch, [(fmt, 40)], 1024, (False,), False, Plan(rows=2, waves=4, lanes=64, unroll=1), wave_order=3)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
@pytest.mark.parametrize(
    ("fmt", "k"),
    [
        *product(("q4_0", "q6_k", "f16"), (256, 768, 2048, 14336)),
        ("q4_0", 32),
        ("q8_0", 96),
        ("q5_1", 4064),
        ("q4_k", 2304),
        ("f32", 33),
        ("bf16", 1000),
    ],
)
def test_columns(arch, fmt, k):
    run_linear(arch, [(fmt, 16)], k, (False,), False)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize(
    "plan", [None, Plan(rows=8, waves=1, lanes=8, unroll=4), Plan(rows=1, waves=2, lanes=16, unroll=2)]
)
def test_segments_share_a_launch(arch, plan):
    run_linear(arch, [("q4_k", 64), ("q5_0", 21), ("q6_k", 16)], 512, (True, True, False), False, plan, wave_order=1)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("fmt", ["q4_0", "bf16"])
def test_residual(arch, fmt):
    run_linear(arch, [(fmt, 37)], 256, (True,), True)


def code_bytes(fmt, weights):
    """Bytes of so many weights' codes, without scales, as the kernels read them."""
    return {"q4_0": 16, "q4_k": 16, "q6_k": 24, "q8_0": 32}[fmt] * weights // 32


GATE_UP = {
    "q4_0": ("q4_0", "q4_0", 64, 512, "rows"),
    "mixed": ("q4_k", "q6_k", 64, 768, "rows"),
    "mixed units": ("q8_0", "q3_k", 32, 256, "rows"),
    "wide": ("q5_k", "q5_k", 32, 4096, "rows"),
    "float32": ("iq4_nl", "q4_1", 32, 1024, ""),
    "one unit a row": ("q4_0", "q5_1", 64, 32, "rows"),
    "float16": ("q2_k", "q2_k", 32, 256, "pairs"),
    "float weights": ("f16", "bf16", 64, 320, ""),
    "float weights to int8": ("f32", "f16", 32, 128, "rows"),
}


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("case", GATE_UP)
def test_gate_up_swiglu(arch, case):
    gate, up, f, k, layout = GATE_UP[case]
    kind = FORMATS[gate].kind
    kernel = gate_up_swiglu(
        gate_up_op(gate, up, f, k, 1, "rows" if kind == "int8" else "", layout), resolve(arch), "gate_up"
    )
    module = compile_hsaco({"gate_up": kernel}, resolve(arch))
    check_no_spills(module)
    (x,), arrays = activations(k, kind)
    (g, gate_planes), (u, up_planes) = weights(gate, f, k, 1, "G_"), weights(up, f, k, 2, "U_")
    # so that silu is neither 0 nor the identity
    shrink = np.float32(2.0 ** -np.ceil(np.log2(np.abs(g @ x).max() / 8)))
    x, arrays = (
        x * shrink,
        arrays | {p: arrays[p] * shrink for p in ("S", "X") if p in arrays} | gate_planes | up_planes | state(),
    )
    a, b = g @ x, u @ x
    y = a / (1 + np.exp(-a)) * b
    outputs = {"Y": np.full((1, f), np.nan, np.float32)} if layout == "" else {"Y": np.full((1, f), np.nan, np.float16)}
    if layout == "rows":
        outputs = {"A_out": np.zeros((1, f // 32, 32), np.int8), "S_out": np.full((1, f // 32, 4), np.nan, np.float32)}
    emulate(module, "gate_up", arrays | outputs, wave_order=2)
    if layout == "":
        assert np.abs(outputs["Y"][0] - y).max() <= TOLERANCE * np.abs(y).max()
    elif layout == "pairs":
        expected = np.clip(y, -65504, 65504)
        assert np.abs(from_pairs(outputs["Y"])[0] - expected).max() <= 1e-3 * np.abs(expected).max()
    else:
        q, s, y = outputs["A_out"][0].astype(np.int64), outputs["S_out"][0], y.reshape(-1, 32)
        top = np.abs(y).max(1, keepdims=True)
        assert np.abs(s[:, :1] - top / 127).max() <= TOLERANCE * top.max() / 127
        assert (np.abs(q * s[:, :1] - y) <= 0.501 * top / 127 + TOLERANCE * top.max()).all()
        sums = np.stack([q.sum(1), q[:, :16].sum(1), q[:, 16:].sum(1)], 1)
        np.testing.assert_allclose(s[:, 1:], s[:, :1] * sums, rtol=1e-6)


EACH_RUN = ("gfx906", "gfx1010", "gfx1201")


@pytest.mark.parametrize("arch", sample(DIFFERENT.values(), EACH_RUN))
def test_every_kind_of_arch_compiles(arch):
    """Also those without an emulator: no spills, no scratch."""
    target = resolve(arch)
    kernels = {
        "linear": linear(
            linear_op([("iq4_xs", LINEAR_ROWS - 1024), ("q6_k", 1024)], 4096, 1, "rows", (True, False), False),
            target,
            "linear",
        ),
        "gate_up": gate_up_swiglu(
            gate_up_op("q4_0", "q4_0", 14336, 4096, 1, "rows", "rows", norm_in=1e-5), target, "gate_up"
        ),
        "norm": linear(linear_op([("q6_k", 4096)], 4096, 1, "rows", residual=True, norm_out="rows"), target, "norm"),
    }
    module = compile_hsaco(kernels, target)
    check_no_spills(module)
    assert "load_b128" in module.assembly or "load_dwordx4" in module.assembly


@pytest.mark.parametrize("arch", sample(ARCH_NAMES, ["gfx1100"]))
def test_all_formats_hold_everything_in_registers(arch):
    """Besides the emulator's tests, which see fewer of them in a usual run."""
    target, kernels = resolve(arch), {}
    for fmt in gguf_blocks.DISTINCT:
        layout = "rows" if FORMATS[fmt].kind == "int8" else ""
        kernels[fmt] = linear(linear_op([(fmt, 40)], 1024, 1, layout, (False,), False), target, fmt)
    for case, (gate, up, f, k, layout) in GATE_UP.items():
        name, layout_in = case.replace(" ", "_"), "rows" if FORMATS[gate].kind == "int8" else ""
        kernels[name] = gate_up_swiglu(gate_up_op(gate, up, f, k, 1, layout_in, layout), target, name)
    check_no_spills(compile_hsaco(kernels, target))


def test_no_fewer_than_eight_waves_fit_a_simd_of_gfx1030():
    """At a model's size: q, k and v of one launch, whose steps LLVM would mix."""
    arch, layer = resolve("gfx1030"), (4096, 1024, 1024)
    kernels = {
        fmt: linear(linear_op([(fmt, n) for n in layer], 4096, 1, "rows", [False] * 3, False), arch, fmt)
        for fmt in ("q4_k", "q6_k")
    }
    found = hsaco.parse(compile_hsaco(kernels, arch).hsaco).kernels.values()
    assert len(found) == 2 and min(hsaco.occupancy(kernel, arch, 128)[0] for kernel in found) >= 8


def test_what_is_no_gemv_is_refused():
    arch = resolve("gfx1100")
    for segments, m, layout, biases, residual in (
        ([("q4_0", 16)], 3, "rows", (False,), False),
        ([("q4_0", 16)], 2 * FEW, "rows", (False,), False),
        ([("q4_0", 16)], 1, "pairs", (False,), False),
        ([("q4_0", 16), ("f16", 16)], 1, "rows", (False, False), False),
        ([("q4_0", 16), ("q4_0", 16)], 1, "rows", (False, False), True),
        ([("q4_0", 16)], 1, "rows", (), False),
    ):
        with pytest.raises(ValueError):
            linear(linear_op(segments, 256, m, layout, biases, residual), arch, "linear")
    with pytest.raises(ValueError, match="whole blocks"):
        gate_up_swiglu(gate_up_op("q4_0", "q4_0", 48, 256, 1, "rows", "rows"), arch, "gate_up")
    with pytest.raises(UserError, match="too large"):
        linear(linear_op([("f16", 1 << 18)], 1 << 13, 1, "", (False,), False), arch, "linear")
