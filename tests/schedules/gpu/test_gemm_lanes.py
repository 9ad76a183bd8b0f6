"""The GEMM on matrices of known lanes (`gemm_lanes.py`) against numpy.

It takes matrices of a shape and a distribution over lanes that only NVIDIA's driver has. Here its kernels run in the
SPIR-V emulator, which has them, too.
"""

import numpy as np
import pytest
from act_layouts import in_lanes, lanes_shape
from samples import sample
from spirv_emulation import emulated
from workloads import gate_up_op, linear_op, operator

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.gpu.linear import gemm, lane_tiles
from mlc_amd.schedules.gpu.linear.deferred_norm import MARGIN
from mlc_amd.schedules.gpu.linear.gemm import expert_linear, gate_up_swiglu
from mlc_amd.schedules.gpu.linear.gemm_tile import Product
from mlc_amd.schedules.gpu.linear.lane_results import GROUP, LaneTile
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.tools.reference import activations
from tests.schedules.gpu.test_gpu_experts import Case, assigned, stack
from tests.schedules.gpu.test_gpu_gemm import error, state, weights
from tests.schedules.gpu.test_vulkan_coop import tolerance

NVIDIA, LANES = resolve("nvidia"), f"lanes:{GROUP}"


def product(formats, m, rows, k=4096, **more):
    return Product(NVIDIA, LANES, tuple(map(lookup, formats)), m, k, rows, **more)


# name: (format, rows, columns, tokens, tile). Few and small ones. What decodes weights is tested in
# test_vulkan_coop.py for all formats.
CASES = {
    "padding": ("q4_0", 41, 128, 3, LaneTile(8, 16, 1, 1, 1)),
    "rows": ("q4_0", 41, 128, 3, LaneTile(8, 32, 1, 1, 1)),
    "waves": ("q4_0", 32, 256, 16, LaneTile(16, 32, 2, 2, 2, 1)),
    "part": ("q4_0", 16, 192, 8, LaneTile(8, 16, 1, 1, 2, 1)),  # of a group of columns
    "hidden": ("q4_0", 16, 192, 8, LaneTile(8, 16, 1, 1, 2, 1, 1)),
    "hidden fields": ("q5_0", 16, 128, 8, LaneTile(8, 16, 1, 1, 1, 0, 1)),
    "tiles": ("q4_0", 16, 128, 12, LaneTile(8, 16, 1, 1, 1)),
    "ahead": ("q4_0", 41, 640, 12, LaneTile(16, 32, 1, 2, 2, 2, 1)),  # activations, too; one wave has a step more
    "part ahead": ("q4_0", 16, 192, 8, LaneTile(8, 16, 1, 1, 2, 2)),
    "staged": ("q4_0", 90, 512, 20, LaneTile(16, 64, 1, 2, 1, 1, 1, staged=1)),
    "staged wide": ("q4_k", 300, 256, 64, LaneTile(64, 256, 1, 8, 1, 1, 1, staged=1)),
    "staged sub-scales": ("q4_k", 64, 512, 12, LaneTile(16, 64, 1, 2, 1, 1, staged=1)),
    "staged planes": ("q6_k", 90, 512, 20, LaneTile(16, 64, 1, 2, 1, 1, 1, staged=1)),
    "staged bytes": ("q8_0", 32, 256, 12, LaneTile(16, 32, 1, 1, 1, 1, 1, staged=1)),
    "staged table": ("iq4_nl", 32, 256, 12, LaneTile(16, 32, 1, 1, 1, 1, 1, staged=1)),
    "staged tiles of tokens": ("q5_k", 96, 256, 130, LaneTile(64, 96, 1, 3, 1, 1, 1, staged=1)),
    "staged mxfp4": ("mxfp4", 64, 320, 20, LaneTile(16, 64, 1, 2, 1, 1, 1, staged=1)),  # two groups and a half
    "staged parts": ("q4_0", 32, 384, 8, LaneTile(8, 32, 1, 1, 1, 1, 1, staged=1)),  # three groups
    "staged part": ("q8_0", 32, 96, 8, LaneTile(8, 32, 1, 1, 1, 1, 1, staged=1)),
    "many tokens": ("q5_0", 150, 512, 130, LaneTile(64, 64, 1, 2, 2, 2, 1)),
    "floats of many tokens": ("f16", 80, 256, 130, LaneTile(64, 64, 1, 2, 2, 2, 1)),
}


@pytest.mark.parametrize(
    "name",
    sample(
        CASES,
        [
            "padding",
            "waves",
            "part",
            "hidden fields",
            "ahead",
            "part ahead",
            "staged",
            "staged wide",
            "staged planes",
            "staged mxfp4",
            "staged parts",
            "staged table",
            "staged tiles of tokens",
            "many tokens",
        ],
    ),
)
def test_linear(name):
    fmt, n, k, m, tile = CASES[name]
    planes, w = weights(fmt, n, k, 0)
    x = np.random.default_rng(3).standard_normal((m, k), np.float32).astype(np.float16)
    expected = x.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T
    out = np.full((m, -(-n // 16) * 16), np.nan, np.float32)
    kernel = gemm.linear(linear_op([(fmt, n)], k, m, LANES), NVIDIA, "k", tile)
    # nobody writes what is after the columns
    rest = np.full((m, -k % (GROUP * BLOCK)), np.nan, np.float16)
    got = emulated(kernel, [state(m), in_lanes(np.hstack([x, rest]), GROUP), *planes.values(), out], NVIDIA)[-1]
    assert error(got[:, :n], expected) < tolerance(fmt)


# one result of a thread in one and in two passes, two results
@pytest.mark.parametrize("tile", [LaneTile(8, 16, 1, 1, 1), LaneTile(32, 32, 1, 1, 8), LaneTile(64, 32, 1, 1, 8)])
def test_early_loads(tile):
    """Bias and residual are loaded before the sums meet."""
    m, n, k, rng = tile.tokens, tile.rows, 1024, np.random.default_rng(3)
    planes, w = weights("q4_0", n, k, 0)
    x = rng.standard_normal((m, k), np.float32).astype(np.float16)
    bias, residual = (100 * rng.standard_normal(shape, np.float32) for shape in (n, (m, n)))
    kernel = gemm.linear(linear_op([("q4_0", n)], k, m, LANES, (True,), residual=True), NVIDIA, "k", tile)
    out = np.full((m, n), np.nan, np.float32)
    got = emulated(kernel, [state(m), in_lanes(x, GROUP), *planes.values(), bias, residual, out], NVIDIA)[-1]
    expected = x.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T
    assert error(got - bias - residual, expected) < tolerance("q4_0")


def test_dead_tiles_are_left_alone():
    """Of a kernel whose workgroups are all resident at once, with an `if` for a loop of one step."""
    m, n, k, tile = 16, 16, 128, LaneTile(8, 16, 1, 1, 1)
    planes, _ = weights("q4_0", n, k, 0)
    kernel = gemm.linear(linear_op([("q4_0", n)], k, m, LANES), NVIDIA, "k", tile)
    out = np.full((m, n), np.nan, np.float32)
    x = in_lanes(np.ones((m, k), np.float16), GROUP)
    got = emulated(kernel, [state(8), x, *planes.values(), out], NVIDIA)[-1]
    assert np.isfinite(got[:8]).all() and np.isnan(got[8:]).all()


@pytest.mark.parametrize("columns", sample([32, 192], [192]))
@pytest.mark.parametrize("tile", [LaneTile(8, 16, 1, 1, 2), LaneTile(8, 48, 1, 3, 1)])  # 8 and 12 lanes for each token
def test_deferred_norm(columns, tile):
    """A layer prepares the norm of its result, and the next one completes it; both kernels against numpy."""
    m, k, n, eps, rng = 3, 128, tile.rows, 1e-5, np.random.default_rng(5)
    x, residual = (rng.standard_normal((m, size), np.float32) for size in (k, columns))
    residual *= 1000  # float16 would hold its square, if at all, badly
    x, g = x.astype(np.float16), 1 + 0.1 * rng.standard_normal(columns).astype(np.float32)
    before = (1 / np.sqrt((residual**2).mean(-1) + eps)).astype(np.float32)  # of the residual stream's norm before
    planes, w = weights("q4_0", columns, k, 0)
    lanes = lanes_shape(m, columns, GROUP)
    made = (
        np.full((m, columns), np.nan, np.float32),
        np.zeros(lanes, np.float16),
        np.zeros((m, columns // 16), np.float32),
    )
    op = linear_op([("q4_0", columns)], k, m, LANES, residual=True, norm_out=LANES)
    first = gemm.linear(op, NVIDIA, "k", LaneTile(8, 16, 1, 1, 1))
    inputs = [state(m), in_lanes(x, GROUP), *planes.values(), residual, g, before]
    y, h, squares = emulated(first, [*inputs, *made], NVIDIA)[-3:]
    expected = x.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T + residual
    assert error(y, expected) < tolerance("q4_0")
    assert np.allclose(squares, (y.astype(np.float64) ** 2).reshape(m, -1, 16).sum(-1), rtol=1e-5)

    planes, w = weights("q4_0", n, columns, 1)
    second = gemm.linear(linear_op([("q4_0", n)], columns, m, LANES, norm_in=eps), NVIDIA, "k", tile)
    out = np.full((m, n), np.nan, np.float32), np.full(m, np.nan, np.float32)
    got, scale = emulated(second, [state(m), h, squares, before, *planes.values(), *out], NVIDIA)[-2:]
    own = 1 / np.sqrt((y.astype(np.float64) ** 2).mean(-1) + eps)
    assert np.allclose(scale, own, rtol=1e-5)
    prepared = activations.read(LANES, {"H": h}, rows=np.arange(m))[:, :columns]
    assert error(prepared, y * g * before[:, None] * MARGIN) < 2**-11  # float16
    normed = prepared.astype(np.float64) / before[:, None] / MARGIN * own[:, None]
    assert error(got, normed @ w.astype(np.float16).astype(np.float64).T) < tolerance("q4_0")


@pytest.mark.parametrize(
    ("fmt", "k"),
    sample([("q4_0", 4096), ("q4_0", 3072), ("q8_0", 2048), ("q6_k", 2048)], [("q4_0", 4096), ("q6_k", 2048)]),
)
def test_prepared_norm_of_64_tokens(fmt, k):
    """Bodies of two steps, and of one."""
    m, n, rng = 64, 64, np.random.default_rng(5)
    tile = lane_tiles.choose(product([fmt], m, 4096, k))
    x, residual = (rng.standard_normal((m, size), np.float32) for size in (k, n))
    x, g, before = x.astype(np.float16), rng.standard_normal(n, np.float32), rng.random(m, np.float32)
    planes, w = weights(fmt, n, k, 0)
    kernel = gemm.linear(linear_op([(fmt, n)], k, m, LANES, (True,), residual=True, norm_out=LANES), NVIDIA, "k", tile)
    bias = rng.standard_normal(n, np.float32)
    made = np.zeros(lanes_shape(m, n, GROUP), np.float16), np.zeros((m, n // 16), np.float32)
    inputs = [state(m), in_lanes(x, GROUP), *planes.values(), bias, residual, g, before]
    y, h, squares = emulated(kernel, [*inputs, np.full((m, n), np.nan, np.float32), *made], NVIDIA)[-3:]
    expected = x.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T + residual + bias
    assert error(y, expected) < tolerance(fmt)
    assert np.allclose(squares, (y.astype(np.float64) ** 2).reshape(m, -1, 16).sum(-1), rtol=1e-5)
    prepared = activations.read(LANES, {"H": h}, rows=np.arange(m))[:, :n]
    assert error(prepared, y * g * before[:, None] * MARGIN) < 2**-11  # float16


# the rows of a tile: whole blocks, or some and a half
@pytest.mark.parametrize(
    ("fmt", "hidden", "rows"), [("q4_0", 0, 64), ("q4_0", 1, 48), ("q4_k", 1, 64), ("q8_0", 1, 48), ("q3_k", 1, 64)]
)
@pytest.mark.parametrize("layout", sample([LANES, "pairs"], [LANES]))
def test_staged_activations(layout, fmt, hidden, rows):
    """Gate and up; the last tile of rows and that of tokens are parts of one."""
    m, n, k, tile = 20, 160, 512, LaneTile(16, rows, 1, rows // 16, 1, 1, hidden, staged=1)
    (gate, up), w = zip(*(weights(fmt, n, k, seed) for seed in (1, 2)), strict=True)
    x = np.random.default_rng(3).standard_normal((m, k), np.float32).astype(np.float16)
    kernel = gate_up_swiglu(gate_up_op(fmt, fmt, n, k, m, LANES, layout), NVIDIA, "k", tile)
    shape = lanes_shape(m, n, GROUP) if layout == LANES else (m, n)
    out = np.full(shape, np.nan, np.float16)
    got = emulated(kernel, [state(m), in_lanes(x, GROUP), *gate.values(), *up.values(), out], NVIDIA)[-1]
    got = activations.read(layout, {"H": got}, rows=np.arange(m))[:, :n]
    products = [x.astype(np.float64) @ each.astype(np.float16).astype(np.float64).T for each in w]
    expected = products[0] / (1 + np.exp(-products[0])) * products[1]
    assert error(got, expected) < tolerance(fmt) + 6e-4  # float16


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (20, 96, 512, LaneTile(16, 64, 1, 4, 1, 1, 1, staged=1)),
        (20, 32, 448, LaneTile(16, 32, 1, 2, 1, 1, 1, staged=1)),  # part of a group
        (61, 224, 512, LaneTile(64, 112, 1, 7, 1, 1, 1, staged=1)),
    ],
)
def test_staged_activations_of_a_deferred_norm(m, n, k, tile):
    eps = 1e-5
    (gate, up), w = zip(*(weights("q4_0", n, k, seed) for seed in (1, 2)), strict=True)
    x = (
        np.random.default_rng(3).standard_normal((m, k), np.float32)
        * np.linspace(0.2, 300, m, dtype=np.float32)[:, None]
    )
    before = (1.5 / np.sqrt((x**2).mean(-1) + eps)).astype(np.float32)
    h = (x * before[:, None] * MARGIN).astype(np.float16)
    squares = (x**2).reshape(m, -1, 16).sum(-1)
    op = gate_up_op("q4_0", "q4_0", n, k, m, LANES, LANES, norm_in=eps)
    kernel = gate_up_swiglu(op, NVIDIA, "k", tile)
    out = np.full(lanes_shape(m, n, GROUP), np.nan, np.float16), np.full(m, np.nan, np.float32)
    arrays = [state(m), in_lanes(h, GROUP), squares, before, *gate.values(), *up.values(), *out]
    got, scale = emulated(kernel, arrays, NVIDIA)[-2:]
    own = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1) + eps)
    assert np.allclose(scale, own, rtol=1e-5)
    normed = h.astype(np.float64) / before[:, None] / MARGIN * own[:, None]
    products = [normed @ each.astype(np.float16).astype(np.float64).T for each in w]
    got = activations.read(LANES, {"H": got}, rows=np.arange(m))[:, :n]
    assert error(got, products[0] / (1 + np.exp(-products[0])) * products[1]) < tolerance("q4_0") + 6e-4  # float16


def test_a_deferred_norm_of_many_columns():
    """A thread that adds up all squares of a token, in a kernel that compiles nevertheless."""
    tile = LaneTile(64, 32, 1, 1, 2)
    op = gate_up_op("q4_0", "q4_0", 32, 8192, 64, LANES, LANES, norm_in=1e-5)
    kernel = gate_up_swiglu(op, NVIDIA, "k", tile)
    assert compile_spirv({"k": kernel}, NVIDIA).modules


def test_deferred_norms_are_of_the_layout_lanes():
    with pytest.raises(ValueError, match="layout 'lanes'"):
        gemm.linear(linear_op([("q4_0", 16)], 128, 64, "pairs", norm_in=1e-5), NVIDIA, "k")


EXPERTS = [(8, 5, 32, LaneTile(8, 16, 1, 1, 2)), (64, 40, 160, None)]  # slots of a tile, of steps and of chunks


@pytest.mark.parametrize(("slots", "m", "n", "tile"), sample(EXPERTS, EXPERTS[:1]))
def test_experts(slots, m, n, tile):
    """Slots of experts, both halves of a feed-forward layer; slots of tiles without an expert are left alone."""
    experts, k = Experts(7, 2, slots), 256
    groups, ids = assigned(Case("q4_k", m, experts))
    slots = experts.slots(m)
    sizes = {"experts": experts.count, "used": experts.used, "tile": experts.tile, "m": m, "n": n, "k": k}
    planes, w = ([*x] for x in zip(*(stack("q4_k", experts.count, n, k, seed) for seed in (1, 2)), strict=True))
    w = [x.astype(np.float16).astype(np.float64) for x in w]
    rng = np.random.default_rng(3)
    x = (0.3 * rng.standard_normal((slots, k), np.float32)).astype(np.float16)  # so that float16 holds all results
    biases = [rng.standard_normal(experts.count * n).astype(np.float32) for _ in range(2)]
    shared = [state(m), in_lanes(x, GROUP), groups]
    rows = x.astype(np.float64)[:, None]
    products = [
        (rows @ each[ids].transpose(0, 2, 1))[:, 0] + bias.reshape(-1, n)[ids]
        for each, bias in zip(w, biases, strict=True)
    ]
    used = ids >= 0
    op = operator("expert_linear", sizes | {"fmt": "q4_k", "bias": True, "layout": LANES})
    kernel = expert_linear(op, NVIDIA, "k", tile)
    out = np.full((slots, n), np.nan, np.float32)
    got = emulated(kernel, [*shared, *planes[0].values(), biases[0], out], NVIDIA)[-1]
    assert error(got[used], products[0][used]) < tolerance("q4_k") and np.isnan(got[~used]).all() and not used.all()
    own = {"gate": "q4_k", "up": "q4_k", "biases": True, "act": "silu", "layout_in": LANES, "layout": LANES}
    op = operator("expert_gate_up", sizes | own | {"shared": False})
    kernel = gate_up_swiglu(op, NVIDIA, "k", tile)
    out = np.full(lanes_shape(slots, n, GROUP), np.nan, np.float16)
    weights = [array for each in planes for array in each.values()]
    got = emulated(kernel, [*shared, *weights, *biases, out], NVIDIA)[-1]
    got = activations.read(LANES, {"H": got}, rows=np.arange(slots))[:, :n]
    expected = products[0] / (1 + np.exp(-products[0])) * products[1]
    assert error(got[used], expected[used]) < tolerance("q4_k") + 6e-4  # float16


# ---- default tiles


@pytest.mark.parametrize(
    ("m", "rows", "tile"),
    [
        (5, 4096, LaneTile(8, 16, 1, 1, 16)),  # two workgroups of each compute unit, 32 subgroups
        (8, 6144, LaneTile(8, 16, 1, 1, 8)),
        (16, 128256, LaneTile(16, 16, 1, 1, 4)),
        (17, 4096, LaneTile(32, 16, 1, 1, 8, 1, 1)),
        (32, 128256, LaneTile(32, 32, 1, 1, 4)),
    ],
)
@pytest.mark.parametrize("fmt", ["q4_0", "f16", "iq4_nl"])
def test_tiles_of_few_tokens(m, rows, tile, fmt):
    assert lane_tiles.choose(product([fmt], m, rows)) == tile


@pytest.mark.parametrize(("m", "tile"), [(8, LaneTile(8, 16, 1, 1, 4)), (32, LaneTile(32, 32, 1, 1, 4, 0, 1))])
def test_tiles_of_gate_and_up(m, tile):
    assert lane_tiles.choose(product(["q4_0"] * 2, m, 14336, weights=2)) == tile


def test_segments_load_nothing_ahead():
    """q, k and v have code of their own each."""
    tile = lane_tiles.choose(product(["q4_0"] * 3, 32, 6144))
    assert tile == LaneTile(32, 16, 1, 1, 4, 0, 1)


STAGED, STAGED_PAIR = LaneTile(64, 128, 1, 4, 1, 1, 1, 1), LaneTile(64, 64, 1, 4, 1, 1, 1, 1)
WIDE, WIDE_PAIR = LaneTile(64, 256, 1, 8, 1, 1, 1, 1), LaneTile(64, 128, 1, 8, 1, 1, 1, 1)  # they fill the units


@pytest.mark.parametrize(
    ("m", "fmt", "rows", "tile"),
    [
        (64, "q4_0", 4096, LaneTile(64, 32, 1, 1, 8, 2, 1)),  # half the rows: else half of the units have no work
        (64, "iq4_nl", 4096, LaneTile(64, 32, 1, 1, 8, 1, 1)),  # tables take registers
        (64, "f16", 4096, LaneTile(64, 32, 1, 1, 8, 2, 1)),
        (64, "q4_k", 6144, LaneTile(64, 64, 1, 2, 4, 2, 1)),  # a workgroup for each unit
        (128, "q4_k", 6144, LaneTile(64, 64, 1, 2, 2, 2, 1)),  # more
        (512, "q4_0", 6144, LaneTile(64, 64, 1, 2, 2, 2, 1)),
        (512, "q4_0", 4096, WIDE),
        (64, "q4_0", 128256, WIDE),  # many
        (64, "q6_k", 128256, WIDE),
        (512, "q8_0", 14336, STAGED),
        (64, "f16", 128256, LaneTile(64, 64, 1, 2, 2, 2, 1)),  # registers hold no float weights beside
        (64, "iq4_nl", 128256, LaneTile(64, 64, 1, 2, 2, 1, 1)),
    ],
)
def test_tiles_of_many_tokens(m, fmt, rows, tile):
    assert lane_tiles.choose(product([fmt], m, rows)) == tile


@pytest.mark.parametrize(
    ("m", "fmt", "rows", "tile"),
    [
        (64, "q4_0", 14336, STAGED_PAIR),
        (512, "q8_0", 14336, WIDE_PAIR),
        (512, "q5_k", 14336, STAGED_PAIR),  # two weights of several planes take too many registers
        (128, "q5_k", 14336, STAGED_PAIR),
        (64, "mxfp4", 8448, STAGED_PAIR),  # as many as compute units
        (64, "q4_0", 8192, LaneTile(64, 32, 1, 2, 2, 1, 1)),
        (64, "q4_0", 2048, LaneTile(64, 16, 1, 1, 8, 1, 1)),
        (512, "f16", 14336, LaneTile(64, 32, 1, 2, 2, 1, 1)),
        (512, "iq4_nl", 14336, LaneTile(64, 32, 1, 2, 2, 1, 1)),
    ],
)
def test_tiles_of_gate_and_up_of_many_tokens(m, fmt, rows, tile):
    assert lane_tiles.choose(product([fmt] * 2, m, rows, weights=2)) == tile


@pytest.mark.parametrize(
    ("tokens", "k", "weights", "tile"),
    [
        (8, 2048, 2, LaneTile(8, 16, 1, 1, 4)),
        (8, 768, 1, LaneTile(8, 16, 1, 1, 2)),  # few groups of columns
        (64, 768, 1, STAGED),
        (64, 2048, 2, LaneTile(64, 128, 1, 8, 1, 1, 1, 1)),
    ],
)
def test_tiles_of_experts(tokens, k, weights, tile):
    assert lane_tiles.choose(product(["q4_0"] * weights, 4096, 2048, k, weights=weights, expert_slots=tokens)) == tile
