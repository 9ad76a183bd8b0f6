"""GEMM plans that make activations int8, in the ISA emulator: against numpy with the same rounding of activations and
exact weights. Sums are rounded to one of their units (`gemm_matrix_int8.py`), which is what TOLERANCE is for."""

import gguf_blocks
import numpy as np
import pytest
import workloads
from samples import sample

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.base.profiles import resolve as profile
from mlc_amd.schedules.gpu.linear.gemm import gate_up_swiglu, linear, plans
from mlc_amd.schedules.gpu.linear.gemm_matrix import MatrixTile
from mlc_amd.tools.reference.activations import in_layout, read
from tests.dev.gfxemu import emulate
from tests.schedules.gpu.test_gpu_gemv import check_no_spills

ARCHS = ("gfx1201", "gfx942", "gfx950")
INT8 = [name for name in gguf_blocks.DISTINCT if FORMATS[name].kind == "int8"]
K = 512
TOLERANCE = 1e-3  # of the largest result: a fifth of what int8 activations are off; a tie of rounding makes half of it
TILE = MatrixTile(32, 32, 1, 2, 1, 1)


def rounded(x):
    """x [m, k] in int8 with a scale for each 128 columns."""
    groups = x.astype(np.float32).reshape(len(x), -1, 128)
    top = np.abs(groups).max(-1, keepdims=True)
    q = np.rint(groups * (np.float32(127) * (1 / top)))  # as the kernel, so that ties round alike
    return (q * (top / 127)).reshape(x.shape).astype(np.float64)


def layout_of(arch):
    return f"lanes:{arch.wave // 16}"


def activations(m, k=K):
    return np.random.default_rng(1).standard_normal((m, k)).astype(np.float16)


def state(live):
    return np.array([5, live, 0, 0], np.int32)


def run_linear(arch_name, segments, m=32, tile=TILE, live=None, residual=False, k=K):
    """Runs it; asserts that rows of live tokens are right; returns the whole results."""
    arch, x, live = resolve(arch_name), activations(m, k), live or m
    op = workloads.linear_op(segments, k, m, layout_of(arch), (False,) * len(segments), residual=residual)
    module = compile_hsaco({"k": linear(op, arch, "k", tile)}, arch)
    arrays, expected = {"state": state(live), "H": in_layout(op.layout, x)}, []
    for i, (fmt, n) in enumerate(segments):
        planes, w = gguf_blocks.weights(fmt, n, k, i, "rows")
        arrays |= {f"W{i}_{name}": plane for name, plane in planes.items()}
        arrays[f"Y{i}"] = np.full((m, -(-n // 16) * 16), np.nan, np.float32)
        expected.append(rounded(x) @ w.astype(np.float64).T)
    if residual:
        arrays["R"] = np.random.default_rng(2).standard_normal(arrays["Y0"].shape, np.float32)
        expected[0] = expected[0] + arrays["R"][:, : segments[0][1]]
    results = emulate(module, "k", arrays, wave_order=3)
    assert any("i8" in name or "iu8" in name for result in results for name in result.by_mnemonic)
    for i, y in enumerate(expected):
        assert np.abs(arrays[f"Y{i}"][:live, : y.shape[1]] - y[:live]).max() < TOLERANCE * np.abs(y).max()
    return [arrays[f"Y{i}"] for i in range(len(segments))]


@pytest.mark.emulator
def test_a_linear():
    run_linear("gfx1201", (("q4_k", 48),))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("fmt", INT8)
@pytest.mark.parametrize("arch", ARCHS)
def test_formats(arch, fmt):
    run_linear(arch, ((fmt, 41),))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
def test_segments_and_waves_along_all_axes(arch):
    """Two waves along tokens, rows and columns; three groups of columns for two waves."""
    run_linear(arch, (("q4_0", 80), ("iq4_nl", 48)), 64, MatrixTile(64, 64, 2, 1, 2, 1), k=384)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS[:2])
def test_tiles_without_live_tokens_are_left(arch):
    (y,) = run_linear(arch, (("q4_0", 32),), 64, live=9, residual=True)
    assert np.isnan(y[32:]).all()


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
def test_gate_up(arch):
    arch, m, f = resolve(arch), 32, 96
    layout, x = layout_of(arch), activations(m)
    op = workloads.gate_up_op("q4_0", "q5_1", f, K, m, layout, layout)
    module = compile_hsaco({"k": gate_up_swiglu(op, arch, "k", TILE)}, arch)
    (gate_planes, g), (up_planes, u) = (gguf_blocks.weights(of, f, K, i, "rows") for i, of in enumerate(op.formats))
    scale = np.float32(4 / np.abs(rounded(x) @ g.T.astype(np.float64)).max())  # at which the sigmoid bends
    x = (x * scale).astype(np.float16)
    arrays = {"state": state(m), "H": in_layout(layout, x), "Y": in_layout(layout, np.zeros((m, f)))}
    arrays |= {f"G_{name}": plane for name, plane in gate_planes.items()}
    arrays |= {f"U_{name}": plane for name, plane in up_planes.items()}
    emulate(module, "k", arrays, wave_order=2)
    a, b = (rounded(x) @ w.astype(np.float64).T for w in (g, u))
    y = a / (1 + np.exp(-a)) * b
    assert np.abs(read(layout, {"H": arrays["Y"]})[:m, :f] - y).max() < 2e-3 * np.abs(y).max()


@pytest.mark.parametrize("arch", sample(ARCHS[:2], ["gfx1201"]))
@pytest.mark.parametrize("fmt", sample(["q4_0", "q4_k", "q6_k", "q8_0"], ["q4_k"]))
def test_the_largest_tiles_do_not_spill(arch, fmt):
    target = resolve(arch)
    op = workloads.linear_op(((fmt, 256),), 4096, 128, layout_of(target), (False,))
    tiles = {(4, 2): MatrixTile(64, 256, 1, 8, 1, 1), (8, 1): MatrixTile(128, 128, 1, 8, 1, 1)}
    if target.wave == 64:
        tiles = {(8, 2): MatrixTile(128, 128, 1, 4, 1, 1)}
    kernels = {f"k{t}x{n}": linear(op, target, f"k{t}x{n}", tile) for (t, n), tile in tiles.items()}
    check_no_spills(compile_hsaco(kernels, target))
    assert {plan for plan in plans(op, target).plans if plan.int8} >= set(tiles.values())


@pytest.mark.parametrize(
    "arch, fmt, k, exist",
    [
        ("gfx1201", "q4_0", 512, True),
        ("gfx942", "q8_0", 512, True),
        ("gfx942", "f16", 512, False),  # no codes
        ("gfx942", "q4_0", 448, False),  # no whole groups of columns
        ("gfx1100", "q4_0", 512, False),  # its int8 instructions are not faster
        ("gfx90a", "q4_0", 512, False),
    ],
)
def test_where_the_plans_exist(arch, fmt, k, exist):
    target = resolve(arch)
    space = plans(workloads.linear_op(((fmt, 64),), k, 64, layout_of(target), (False,)), target)
    assert space.default.int8 == 0 and any(plan.int8 for plan in space.plans) == exist
    assert not any(plan.int8 and (space.valid(plan) is not None) for plan in space.plans)


def test_there_are_none_on_vulkan():
    op = workloads.linear_op((("q4_0", 64),), 512, 64, "lanes:2", (False,))
    assert not any(plan.int8 for plan in plans(op, profile("rdna4")).plans)
