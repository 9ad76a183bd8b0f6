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
from mlc_amd.schedules.gpu.linear.gemm import gate_up_swiglu, plans
from mlc_amd.schedules.gpu.linear.gemm_matrix import MatrixTile
from mlc_amd.tools.reference.activations import in_layout, read
from tests.dev.gfxemu import emulate
from tests.schedules.gpu.test_gpu_gemv import check_no_spills

ARCHS = ("gfx1201", "gfx942", "gfx950")
INT8 = [name for name in gguf_blocks.DISTINCT if FORMATS[name].kind == "int8"]
K = 512
TOLERANCE = 2e-3  # of the largest result: two fifths of what int8 activations are off; ties of rounding make half of it
TILE = MatrixTile(32, 32, 1, 2, 1, 1)


def rounded(x):
    """x [m, k] in int8 with a scale for each 128 columns."""
    groups = x.astype(np.float32).reshape(len(x), -1, 128)
    top = np.abs(groups).max(-1, keepdims=True)
    q = np.rint(groups * (np.float32(127) * (1 / top)))  # as the kernel, so that ties round alike
    return (q * (top / 127)).reshape(x.shape).astype(np.float64)


def gate_up(arch, gate, up=None, f=64, k=K, m=32):
    layout = f"lanes:{arch.wave // 16}"
    return workloads.gate_up_op(gate, up or gate, f, k, m, layout, layout)


def run(arch_name, op, tile=TILE, live=None):
    """Runs it; asserts that rows of live tokens are right; returns all results [m, f]."""
    arch, live = resolve(arch_name), live or op.m
    x = np.random.default_rng(1).standard_normal((op.m, op.k)).astype(np.float16)
    module = compile_hsaco({"k": gate_up_swiglu(op, arch, "k", tile)}, arch)
    (gate_planes, g), (up_planes, u) = (
        gguf_blocks.weights(of, op.n, op.k, i, "rows") for i, of in enumerate(op.formats)
    )
    scale = np.float32(4 / np.abs(rounded(x) @ g.T.astype(np.float64)).max())  # at which the sigmoid bends
    x = (x * scale).astype(np.float16)
    arrays = {"state": np.array([5, live, 0, 0], np.int32), "H": in_layout(op.layout_in, x)}
    arrays["Y"] = in_layout(op.layout, np.full((op.m, op.n), np.nan))
    arrays |= {f"G_{name}": plane for name, plane in gate_planes.items()}
    arrays |= {f"U_{name}": plane for name, plane in up_planes.items()}
    results = emulate(module, "k", arrays, wave_order=3)
    assert any("i8" in name or "iu8" in name for result in results for name in result.by_mnemonic)
    a, b = (rounded(x) @ w.astype(np.float64).T for w in (g, u))
    y, found = a / (1 + np.exp(-a)) * b, read(op.layout, {"H": arrays["Y"]})[: op.m, : op.n]
    assert np.abs(found - y)[:live].max() < TOLERANCE * np.abs(y[:live]).max()
    return found


@pytest.mark.emulator
def test_one_format():
    run("gfx1201", gate_up(resolve("gfx1201"), "q4_k", f=32, k=256))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("fmt", INT8)
@pytest.mark.parametrize("arch", ARCHS)
def test_formats(arch, fmt):
    run(arch, gate_up(resolve(arch), fmt))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS)
def test_two_formats_and_waves_along_all_axes(arch):
    """Two waves along tokens, rows and columns; three groups of columns for two waves; rows that fill no tile."""
    run(arch, gate_up(resolve(arch), "q4_0", "q5_1", 96, 384, 64), MatrixTile(64, 64, 2, 1, 2, 1))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCHS[:2])
def test_tiles_without_live_tokens_are_left(arch):
    assert np.isnan(run(arch, gate_up(resolve(arch), "q4_0", m=64), live=9)[32:]).all()


@pytest.mark.parametrize("arch", sample(ARCHS[:2], ["gfx1201"]))
@pytest.mark.parametrize("fmt", sample(["q4_0", "q4_k", "q6_k", "q8_0"], ["q4_k"]))
def test_the_largest_tiles_do_not_spill(arch, fmt):
    target = resolve(arch)
    op = gate_up(target, fmt, f=256, k=4096, m=128)
    tile = MatrixTile(128, 128, 1, 4, 1, 1) if target.wave == 64 else MatrixTile(64, 128, 1, 8, 1, 1)
    assert tile in plans(op, target).plans
    check_no_spills(compile_hsaco({"k": gate_up_swiglu(op, target, "k", tile)}, target))


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
    space = plans(gate_up(resolve(arch), fmt, k=k, m=64), resolve(arch))
    assert space.default.int8 == 0 and any(plan.int8 for plan in space.plans) == exist
    assert not any(plan.int8 and (space.valid(plan) is not None) for plan in space.plans)


def test_other_layers_have_none():
    """Their inputs count for more."""
    arch = resolve("gfx1201")
    linear = workloads.linear_op((("q4_0", 64),) * 3, 512, 64, "lanes:2", (False,) * 3)
    assert not any(plan.int8 for plan in plans(linear, arch).plans)


def test_there_are_none_on_vulkan():
    assert not any(plan.int8 for plan in plans(gate_up(resolve("gfx1201"), "q4_0", m=64), profile("rdna4")).plans)
