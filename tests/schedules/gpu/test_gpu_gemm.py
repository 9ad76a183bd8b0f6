"""Prefill kernels of the GPU, run in the ISA emulator: linear layers and gate/up with SwiGLU, against numpy.

The oracle: gguf-py's dequantized weights times the activations in float64; on matrix units the weights are rounded to
float16. gfx10 and gfx906 have no emulator: their kernels are compiled and looked at, and the same source runs as gfx11
code.
"""

import functools
import itertools
import re
from typing import NamedTuple

import gguf_blocks
import numpy as np
import pytest
import workloads
from samples import sample

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.gpu.linear.gemm import engine, gate_up_swiglu, linear
from mlc_amd.schedules.gpu.linear.gemm_dot import DotTile
from mlc_amd.schedules.gpu.linear.gemm_matrix import MatrixTile
from mlc_amd.schedules.gpu.linear.gemm_tile import product_of
from mlc_amd.schedules.gpu.linear.linear import head_linear
from mlc_amd.tools.reference.activations import in_layout, read
from tests.dev.gfxemu import emulate

INT8 = [name for name in gguf_blocks.DISTINCT if FORMATS[name].kind == "int8"]
FLOAT = [name for name, fmt in FORMATS.items() if fmt.kind == "float"]
TOLERANCE = 2e-5  # of the largest result
# the same on matrix units for formats whose weights are products of two scales, or sums with a minimum: these are
# rounded twice (`coop_load.py`)
TOLERANCE_SCALED = 1e-3


class Case(NamedTuple):
    """One linear kernel: attributes, and its tile."""

    segments: tuple
    k: int = 256
    m: int = 16
    layout: str = "matrix"
    biases: tuple = (False,)
    residual: bool = False
    tile: object = None


MATRIX = "matrix"  # the layout of activations for an arch's matrix units
SMALL_DOT = DotTile(16, 64, 4)
MIXED = (("q4_k", 96), ("q6_k", 37), ("q8_0", 16))
LINEAR = {f"{name}-matrix": Case(((name, 48),), 512 if i % 2 else 256) for i, name in enumerate(gguf_blocks.DISTINCT)}
LINEAR |= {f"{name}-dot": Case(((name, 48),), 512 if i % 2 else 256, layout="rows") for i, name in enumerate(INT8)}
LINEAR |= {f"{name}-float": Case(((name, 48),), 96, layout="", tile=SMALL_DOT) for name in FLOAT}
LINEAR |= {
    "mixed-matrix": Case(MIXED, 256, 32, MATRIX, (True, True, False)),
    "mixed-dot": Case(MIXED, 256, 32, "rows", (True, True, False)),
    "residual-matrix": Case((("q4_0", 41),), 96, 8, MATRIX, (True,), True),  # tokens that are half a tile
    "residual-dot": Case((("q4_0", 41),), 96, 16, "rows", (True,), True),
    "residual-float": Case((("f16", 41),), 96, 16, "", (True,), True, SMALL_DOT),
    "cut-matrix": Case((("q4_k", 32), ("q5_0", 21)), 512, 24, biases=(False, True), tile=MatrixTile(32, 16, 2, 1, 2)),
    "medium-matrix": Case((("q4_0", 80),), 192, 64),
    "medium-dot": Case((("q4_1", 144),), 64, 64, "rows"),
    # columns that are no whole groups
    "large-matrix": Case((("q4_0", 144),), 160, 256, tile=MatrixTile(128, 32, 1, 2, 2)),
    "shared-matrix": Case((("q4_0", 48),), 192, 32, tile=MatrixTile(16, 16, 1, 1, 2)),  # three steps, two waves
    # two waves along each axis
    "wide-matrix": Case((("q4_0", 80), ("q8_0", 48)), 320, 64, biases=(False, True), tile=MatrixTile(64, 64, 2, 2, 2)),
    "large-float": Case((("bf16", 48),), 64, 64, "", tile=DotTile(64, 128, 8)),
    "exact-float": Case((("f32", 41),), 256, 32, "", (True,)),  # on matrix units, too: a router's
    "gates-float": Case((("f32", 1), ("f32", 8)), 128, 32, "", (False, False)),  # a router and another gate, one step
}
# name -> (gate format, up format, f, m, layout_in, layout)
SWIGLU = {
    "small-matrix": ("q4_k", "q6_k", 96, 16, MATRIX, MATRIX),
    "large-matrix": ("q4_0", "q4_0", 96, 128, MATRIX, MATRIX),
    "f32-matrix": ("q8_0", "f16", 64, 32, MATRIX, ""),
    "rows-dot": ("q4_k", "q6_k", 96, 16, "rows", "rows"),
    "large-dot": ("q4_0", "q4_0", 96, 64, "rows", "rows"),
    "f32-dot": ("q8_0", "q8_0", 64, 32, "rows", ""),
    "rows-float": ("f16", "f32", 64, 16, "", "rows"),
}
SWIGLU_K = 256
SAMPLE = [
    "q4_0-matrix",
    "q6_k-matrix",
    "q2_k-matrix",
    "q8_0-matrix",
    "iq4_xs-matrix",
    "q5_1-matrix",
    "f16-matrix",
    "bf16-matrix",
    "mixed-matrix",
    "residual-matrix",
    "medium-matrix",
    "large-matrix",
    "shared-matrix",
    "cut-matrix",
]
MATRIX_SWIGLU = [name for name in SWIGLU if name.endswith("-matrix")]
DOT = [name for name in LINEAR if name.endswith(("-dot", "-float"))]
# arch -> (linear kernels, gate/up kernels) that run there
EMULATED = {
    "gfx1100": (list(LINEAR), list(SWIGLU)),
    "gfx1201": (SAMPLE, MATRIX_SWIGLU),
    "gfx942": (SAMPLE, MATRIX_SWIGLU),
    "gfx90a": (SAMPLE[:2], MATRIX_SWIGLU[:1]),
}
DOT_MNEMONICS = {
    "gfx1030": "v_dot4c?_i32_i8",
    "gfx1012": "v_dot4c?_i32_i8",
    "gfx906": "v_dot4c?_i32_i8",
    "gfx1010": "v_mad_i32_i24|v_mul_i32_i24",
}


def placed(layout, arch):
    """The layout on that arch."""
    return f"lanes:{arch.wave // 16}" if layout == MATRIX else layout


def kernel_name(kind, name):
    return f"{kind}_{name}".replace("-", "_")


@functools.cache
def library(arch_name, linears, swiglus):
    """The code object with these kernels."""
    arch = resolve(arch_name)
    kernels = {}
    for name in linears:
        segments, k, m, layout, *attributes, residual, tile = LINEAR[name]
        attributes = segments, k, m, placed(layout, arch), *attributes
        op, label = workloads.linear_op(*attributes, residual=residual), kernel_name("linear", name)
        kernels[label] = linear(op, arch, label, tile)
    for name in swiglus:
        gate, up, f, m, layout_in, layout = SWIGLU[name]
        tile = DotTile(16, 32, 4) if name.endswith("-float") else None
        label = kernel_name("swiglu", name)
        op = workloads.gate_up_op(gate, up, f, SWIGLU_K, m, placed(layout_in, arch), placed(layout, arch))
        kernels[label] = gate_up_swiglu(op, arch, label, tile)
    return compile_hsaco(kernels, arch)


def weights(name, n, k, seed):
    """A random weight: its planes and the float32 matrix [n, k] that gguf-py makes of the same blocks."""
    return gguf_blocks.weights(name, n, k, seed, "rows")


def quantized(x):
    """A int8 [m, KB, 32] and S float32 [m, KB, 4] of x [m, k], and the values [m, k] that they stand for."""
    blocks = x.reshape(len(x), -1, 32)
    d = (np.abs(blocks).max(-1) / 127).astype(np.float32)
    q = np.rint(blocks / d[..., None]).astype(np.int8)
    return {"A": q, "S": sums(q, d)}, (q * d[..., None].astype(np.float64)).reshape(x.shape)


def sums(q, d):
    """S of A = q and the scales d [m, KB]."""
    parts = [1, q.sum(-1), q[..., :16].sum(-1, dtype=np.int32), q[..., 16:].sum(-1, dtype=np.int32)]
    return np.stack([(d * part).astype(np.float32) for part in parts], -1)


def problem(layout, m, k, scale=1):
    """(parameters of random activations, the values that count, what rounds the weights)."""
    x = np.random.default_rng(1).standard_normal((m, k), np.float32) * np.float32(scale)
    if layout == "rows":
        return *quantized(x), lambda w: w.astype(np.float64)
    if not layout:
        return {"X": x}, x, lambda w: w
    half = x.astype(np.float16)
    return {"H": in_layout(layout, half)}, half.astype(np.float64), lambda w: w.astype(np.float16).astype(np.float64)


def state(live):
    return np.array([5, live, 0, 0], np.int32)


def error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


def tolerance(fmt, name):
    scaled = FORMATS[fmt].minimum or "S" in FORMATS[fmt].scales
    return TOLERANCE_SCALED if scaled and name.endswith("-matrix") else TOLERANCE


def run_linear(arch, name, live, wave_order, kernels=None):
    """Results of a linear kernel and what they should be: lists of [m, n]. Results start as NaN. kernels: names of the
    linear and the gate/up kernels of its code object; default those of EMULATED."""
    case, rng = LINEAR[name], np.random.default_rng(3)
    inputs, x, rounded = problem(placed(case.layout, resolve(arch)), case.m, case.k)
    arrays, expected = {"state": state(live), **inputs}, []
    for i, ((fmt, n), bias) in enumerate(zip(case.segments, case.biases, strict=True)):
        planes, w = weights(fmt, n, case.k, i)
        arrays |= {f"W{i}_{p}": plane for p, plane in planes.items()}
        y = x @ rounded(w).T
        if bias:
            arrays[f"bias{i}"] = rng.standard_normal(n, np.float32)
            y = y + arrays[f"bias{i}"]
        arrays[f"Y{i}"] = np.full((case.m, -(-n // 16) * 16), np.nan, np.float32)
        expected.append(y)
    if case.residual:
        arrays["R"] = rng.standard_normal(arrays["Y0"].shape, np.float32)
        expected[0] = expected[0] + arrays["R"][:, : expected[0].shape[1]]
    module = library(arch, *map(tuple, kernels or EMULATED[arch]))
    results = emulate(module, kernel_name("linear", name), arrays, wave_order)
    return [arrays[f"Y{i}"][:, : e.shape[1]] for i, e in enumerate(expected)], expected, results


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch, name", [(arch, name) for arch, (names, _) in EMULATED.items() for name in names])
def test_linear(arch, name):
    check_linear(arch, name)


def check_linear(arch, name, kernels=None):
    got, expected, results = run_linear(arch, name, LINEAR[name].m, 1, kernels)
    for y, e, (fmt, _) in zip(got, expected, LINEAR[name].segments, strict=True):
        assert error(y, e) < tolerance(fmt, name)
    used = set().union(*(r.by_mnemonic for r in results))
    wanted = {"-matrix": "wmma|mfma", "-dot": "dot4", "-float": "fma"}["-" + name.rsplit("-", 1)[1]]
    assert any(re.search(wanted, mnemonic) for mnemonic in used)


def instructions_of_eight(arch_name, fmt):
    """Wave-instructions for 1000 weights of a workgroup of the default kernel of eight tokens, 4096 rows and columns,
    whose results are checked."""
    arch, m, k = resolve(arch_name), 8, 4096
    layout = placed(MATRIX, arch)
    tile = engine(product_of(workloads.linear_op([(fmt, k)], k, m, layout), arch)).tile
    op = workloads.linear_op([(fmt, tile.rows)], k, m, layout)
    (inputs, x, rounded), (planes, w) = problem(layout, m, k), weights(fmt, tile.rows, k, 0)
    arrays = {"state": state(m), **inputs, "Y0": np.full((m, tile.rows), np.nan, np.float32)}
    arrays |= {f"W0_{p}": plane for p, plane in planes.items()}
    (result,) = emulate(compile_hsaco({"f": linear(op, arch, "f", tile)}, arch), "f", arrays)
    assert error(arrays["Y0"], x @ rounded(w).T) < tolerance(fmt, "-matrix")
    return result.total * 1000 / w.size


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("live", [1, 127, 129])
def test_linear_leaves_tiles_without_live_tokens(live):
    (got,), (expected,), _ = run_linear("gfx1100", "large-matrix", live, wave_order="rev")
    tokens = -(-live // 128) * 128
    assert error(got[:tokens], expected[:tokens]) < TOLERANCE
    assert np.isnan(got[tokens:]).all()


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch, name", [(arch, name) for arch, (_, names) in EMULATED.items() for name in names])
def test_gate_up_swiglu(arch, name):
    check_swiglu(arch, name)


def check_swiglu(arch, name, kernels=None):
    gate, up, f, m, layout_in, layout = SWIGLU[name]
    (gate_planes, g), (up_planes, u) = weights(gate, f, SWIGLU_K, 1), weights(up, f, SWIGLU_K, 2)
    # gates of a size at which the sigmoid bends
    layout_in, layout = (placed(of, resolve(arch)) for of in (layout_in, layout))
    inputs, x, rounded = problem(layout_in, m, SWIGLU_K, 3 / np.sqrt((g**2).sum(1).mean()))
    g, u = (x @ rounded(w).T for w in (g, u))
    expected = g / (1 + np.exp(-g)) * u
    outputs = {"A_out": np.zeros((m, f // 32, 32), np.int8), "S_out": np.full((m, f // 32, 4), np.nan, np.float32)}
    if layout != "rows":
        outputs = {"Y": in_layout(layout, np.full((m, f), np.nan))}
    arrays = {"state": state(m), **inputs, **outputs}
    arrays |= {prefix + p: a for prefix, planes in (("G_", gate_planes), ("U_", up_planes)) for p, a in planes.items()}
    module = library(arch, *map(tuple, kernels or EMULATED[arch]))
    emulate(module, kernel_name("swiglu", name), arrays, wave_order=2)
    if layout != "rows":
        got = read(layout, {"H": arrays["Y"]}, rows=np.arange(m))[:, :f]
        assert error(got, expected) < 2 * max(tolerance(gate, name), tolerance(up, name)) + (6e-4 if layout else 0)
        return
    A, S = arrays["A_out"], arrays["S_out"]
    blocks, d = expected.reshape(m, -1, 32), S[..., 0]
    np.testing.assert_allclose(d, np.abs(blocks).max(-1) / 127, rtol=1e-4)
    assert (np.abs(A * d[..., None] - blocks) < 0.502 * d[..., None]).all()
    np.testing.assert_allclose(S, sums(A, d), rtol=1e-6)


def test_all_formats_hold_everything_in_registers():
    """What the emulator runs on matrix units as gfx11 code: looked at, which needs no emulator."""
    linears = tuple(name for name in LINEAR if name.endswith("-matrix"))
    check_resources(library("gfx1100", linears, tuple(MATRIX_SWIGLU)), len(linears) + len(MATRIX_SWIGLU))


@pytest.mark.parametrize("arch_name", ["gfx1100", "gfx942"])
def test_float32_products_use_no_matrix_units(arch_name):
    """Rounded logits would choose other experts."""
    names = "exact-float", "gates-float"
    module = library(arch_name, names, ())
    assert not re.search(r"\sv_\w*(wmma|mfma|f16)", module.assembly)
    check_resources(module, len(names))


# ---- at a model's size: what the compiler makes of the default tiles

N, K = 4096, 4096
# by arch with matrix units, tokens of a step
MATRIX_ARCHS = {"gfx1100": (8, 32, 64, 512), "gfx1201": (8, 32, 512), "gfx942": (8, 32, 512), "gfx908": (16, 512)}
HEAVY = ("q4_k", "q6_k", "q2_k", "bf16", "f32")  # those that take most registers


def metadata(module, field):
    return [int(value) for value in re.findall(rf"\.{field}:\s+(\d+)", module.assembly)]


def check_resources(module, kernels):
    for field in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert metadata(module, field) == [0] * kernels
    assert max(metadata(module, "group_segment_fixed_size")) <= 65536


@pytest.mark.parametrize(
    ("arch_name", "fmt"),
    sample(itertools.product(MATRIX_ARCHS, HEAVY), [("gfx1100", "q6_k"), ("gfx1100", "bf16"), ("gfx942", "q2_k")]),
)
def test_matrix_kernels_hold_everything_in_registers(arch_name, fmt):
    arch, kernels = resolve(arch_name), {}
    for m in MATRIX_ARCHS[arch_name]:
        one, three, pair = (f"{kind}_{m}" for kind in ("linear", "segments", "swiglu"))
        layout, parts = placed(MATRIX, arch), [(fmt, N), (fmt, N // 4), (fmt, N // 4)]
        kernels[one] = linear(workloads.linear_op([(fmt, N)], K, m, layout, (True,)), arch, one)
        kernels[three] = linear(workloads.linear_op(parts, K, m, layout), arch, three)
        kernels[pair] = gate_up_swiglu(workloads.gate_up_op(fmt, fmt, N, K, m, layout, layout), arch, pair)
    module = compile_hsaco(kernels, arch)
    check_resources(module, len(kernels))
    assert len(re.findall("v_wmma_f32|v_mfma_f32", module.assembly)) >= 8 * len(kernels)


@pytest.mark.parametrize("arch_name", sample(DOT_MNEMONICS, ["gfx1030"]))
def test_dot_kernels_hold_everything_in_registers(arch_name):
    arch, kernels = resolve(arch_name), {}
    for fmt in HEAVY:
        layout, m = ("", 64) if FORMATS[fmt].kind == "float" else ("rows", 512)
        kernels[f"linear_{fmt}"] = linear(workloads.linear_op([(fmt, N)], K, m, layout, (True,)), arch, f"linear_{fmt}")
    pair = workloads.gate_up_op("q4_k", "q6_k", N, K, 512, "rows", "rows")
    kernels["swiglu"] = gate_up_swiglu(pair, arch, "swiglu")
    module = compile_hsaco(kernels, arch)
    check_resources(module, len(kernels))
    assert len(re.findall(DOT_MNEMONICS[arch_name], module.assembly)) >= 64 * (len(kernels) - 1)


@pytest.mark.parametrize(
    "arch, op",
    [
        ("gfx1100", workloads.linear_op([("q4_0", 32)], 48, 16, "lanes:2")),  # 48 columns
        ("gfx1100", workloads.linear_op([("q4_0", 32)] * 2, 256, 16, "lanes:2", residual=True)),  # a residual for two
        ("gfx1100", workloads.linear_op([("q4_0", 32)], 256, 16, "lanes:2", ())),  # no flag for the bias
        ("gfx1030", workloads.linear_op([("q4_0", 32)], 256, 16, "lanes:2")),  # no matrix units
        ("gfx1030", workloads.linear_op([("q4_0", 32), ("f16", 32)], 256, 16, "rows")),  # int8 and float
        ("gfx1100", workloads.linear_op([("q4_0", 32)], 256, 24, "rows")),
    ],
)
def test_what_has_no_tiles_is_refused(arch, op):
    with pytest.raises(ValueError, match=r"tiles|make|multiply|columns"):
        linear(op, resolve(arch), "f")


def test_rows_out_of_matrix_units_are_refused():
    with pytest.raises(ValueError, match="do not make one launch"):
        gate_up_swiglu(workloads.gate_up_op("q4_0", "q4_0", 64, 256, 16, "lanes:2", "rows"), resolve("gfx1100"), "f")


HEAD_LAYOUTS = [  # of activations of 16 tokens and a matrix of k columns for each head
    ("gfx1100", 256, "lanes:2"), ("gfx1100", 96, "rows"), ("gfx942", 256, "lanes:4"), ("gfx942", 192, "rows"),
]  # fmt: skip


def head_operator(heads: int, n: int, k: int, m: int, layout: str):
    return workloads.operator("head_linear", {"fmt": "q8_0", "heads": heads, "n": n, "k": k, "m": m, "layout": layout})


@pytest.mark.parametrize(("arch", "k", "layout"), HEAD_LAYOUTS)
def test_units_of_lanes_hold_columns_of_one_head(arch, k, layout):
    """Else the kernel takes int8 blocks, of which each is of one head."""
    assert make_target("rocm", arch).head_layout(16, "int8", k) == layout
    assert head_linear(head_operator(3, 48, k, 16, layout), resolve(arch), "f")


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize(("arch_name", "k", "layout"), HEAD_LAYOUTS)
def test_a_matrix_for_each_head(arch_name, k, layout):
    arch, m, heads, n = resolve(arch_name), 16, 3, 48
    inputs, x, rounded = problem(layout, m, heads * k)
    planes, w = weights("q8_0", heads * n, k, 4)
    arrays = {"state": state(m), **inputs, "Y": np.full((m, heads * n), np.nan, np.float32)}
    arrays |= {f"W_{p}": plane for p, plane in planes.items()}
    op = head_operator(heads, n, k, m, layout)
    emulate(compile_hsaco({"f": head_linear(op, arch, "f")}, arch), "f", arrays)
    parts = zip(x.reshape(m, heads, k).swapaxes(0, 1), rounded(w).reshape(heads, n, k), strict=True)
    assert error(arrays["Y"], np.concatenate([mine @ of.T for mine, of in parts], axis=1)) < TOLERANCE
