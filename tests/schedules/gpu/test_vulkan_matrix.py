"""The GEMM of AMD's matrix units (`gemm_matrix.py`) on Vulkan, in the SPIR-V emulator, whose matrices are distributed
over the lanes as Mesa's driver does it; and the check of that distribution."""

import itertools
from dataclasses import replace

import gguf_blocks
import numpy as np
import pytest
from act_layouts import in_lanes, lanes_shape
from samples import sample
from spirv_emulation import emulated
from workloads import gate_up_op, linear_op, operator

from mlc_amd.runtime.devices.vulkan.fragments import is_known
from mlc_amd.runtime.gpus import DEVICE_KINDS
from mlc_amd.runtime.matrix_lanes import DISTRIBUTIONS
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.probes import fragment_probe
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.gpu.linear import gemm, gemm_coop, gemm_matrix
from mlc_amd.schedules.gpu.linear.gemm_matrix import MatrixTile
from mlc_amd.schedules.gpu.linear.linear import head_linear
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.tools.reference import activations
from tests.schedules.gpu.test_gpu_experts import Case, assigned, stack
from tests.schedules.gpu.test_gpu_gemm import error, state, weights
from tests.schedules.gpu.test_vulkan_coop import tolerance

GROUP = 2  # blocks of a unit of activations
LANES = f"lanes:{GROUP}"
ARCHS = ("rdna3", "rdna4")
ONE = MatrixTile(16, 16, 1, 1, 1)
# name: (format, rows, columns, tokens, tile)
CASES = {fmt: (fmt, 16, 256, 16, ONE) for fmt in gguf_blocks.DISTINCT} | {
    "default": ("q4_0", 80, 256, 64, None),
    "padding": ("q4_0", 41, 128, 16, MatrixTile(16, 32, 1, 2, 1)),
    "eight": ("q4_0", 32, 256, 8, None),  # tokens, of half a tile
    "cut": ("q4_k", 16, 256, 40, MatrixTile(32, 16, 2, 1, 1)),
    "waves": ("q6_k", 64, 512, 32, MatrixTile(32, 32, 2, 1, 2)),
    "part": ("q4_0", 16, 160, 16, MatrixTile(16, 16, 1, 1, 2)),  # of a group of columns
    "columns": ("q4_k", 32, 768, 32, MatrixTile(32, 32, 1, 1, 8)),  # more waves than places, and some without a step
    "tokens": ("mxfp4", 32, 128, 128, MatrixTile(128, 32, 1, 1, 1)),  # more tiles than are loaded at once
    "floats": ("f16", 80, 192, 64, MatrixTile(64, 64, 2, 2, 2)),
}
QUICK = (
    "q4_0",
    "q4_k",
    "q6_k",
    "mxfp4",
    "q8_0",
    "bf16",
    "default",
    "padding",
    "cut",
    "waves",
    "part",
    "columns",
    "tokens",
)


def halves(shape, seed=3):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


def in_groups(x):
    """Activations in the layout; what nobody writes is no number."""
    rest = np.full((len(x), -x.shape[1] % (GROUP * BLOCK)), np.nan, np.float16)
    return in_lanes(np.hstack([x, rest]), GROUP)


def products(x, w):
    return x.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T


@pytest.mark.parametrize(
    ("name", "arch"), sample([*itertools.product(CASES, ARCHS)], [*itertools.product(QUICK, ARCHS)])
)
def test_linear(name, arch):
    fmt, n, k, m, tile = CASES[name]
    profile, (planes, w), x = resolve(arch), weights(fmt, n, k, 0), halves((m, k))
    op = linear_op([(fmt, n)], k, m, LANES)
    assert isinstance(gemm.engine(gemm.product_of(op, profile), tile), gemm_matrix.MatrixGemm)
    out = np.full((m, -(-n // 16) * 16), np.nan, np.float32)
    kernel = gemm.linear(op, profile, "k", tile)
    got = emulated(kernel, [state(m), in_groups(x), *planes.values(), out], profile)[-1]
    assert error(got[:, :n], products(x, w)) < tolerance(fmt)


@pytest.mark.parametrize("arch", ARCHS)
def test_segments_and_dead_tiles(arch):
    """Bias and residual; tiles without live tokens are left alone."""
    m, k, rng, profile = 32, 256, np.random.default_rng(3), resolve(arch)
    (p, v), (q, w), x = weights("q4_k", 32, k, 0), weights("q6_k", 41, k, 1), halves((m, k))
    bias = rng.standard_normal(41).astype(np.float32)
    out = [np.full((m, n), np.nan, np.float32) for n in (32, 48)]
    kernel = gemm.linear(linear_op([("q4_k", 32), ("q6_k", 41)], k, m, LANES, (False, True)), profile, "k", ONE)
    names = [param.name for param in kernel.params]
    given = {"state": state(9), "H": in_groups(x), "bias1": bias, "Y0": out[0], "Y1": out[1]}
    given |= {f"W0_{name}": plane for name, plane in p.items()} | {f"W1_{name}": plane for name, plane in q.items()}
    got = dict(zip(names, emulated(kernel, [given[name] for name in names], profile), strict=True))
    for y, expected in ((got["Y0"], products(x, v)), (got["Y1"][:, :41], products(x, w) + bias)):
        assert error(y[:16], expected[:16]) < tolerance("q4_k") and np.isnan(y[16:]).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tile", [MatrixTile(16, 32, 1, 2, 1), MatrixTile(32, 32, 1, 1, 4)])
def test_gate_and_up(arch, tile):
    m, n, k, profile = 32, 96, 256, resolve(arch)
    (gate, up), w = zip(*(weights("q4_0", n, k, seed) for seed in (1, 2)), strict=True)
    x = halves((m, k))
    kernel = gemm.gate_up_swiglu(gate_up_op("q4_0", "q4_0", n, k, m, LANES, LANES), profile, "k", tile)
    out = np.full(lanes_shape(m, n, GROUP), np.nan, np.float16)
    got = emulated(kernel, [state(m), in_groups(x), *gate.values(), *up.values(), out], profile)[-1]
    g, u = (products(x, each) for each in w)
    got = activations.read(LANES, {"H": got}, rows=np.arange(m))[:, :n]
    assert error(got, g / (1 + np.exp(-g)) * u) < tolerance("q4_0") + 6e-4  # float16


@pytest.mark.parametrize("arch", ARCHS)
def test_experts(arch):
    """Slots of tiles without an expert are left alone."""
    m, n, k, profile, experts = 40, 32, 256, resolve(arch), Experts(7, 2, 16)
    groups, ids = assigned(Case("q4_k", m, experts))
    slots, (planes, w) = experts.slots(m), stack("q4_k", experts.count, n, k, 1)
    x, used = halves((slots, k)), ids >= 0
    sizes = {"experts": experts.count, "used": experts.used, "tile": experts.tile, "m": m, "n": n, "k": k}
    op = operator("expert_linear", sizes | {"fmt": "q4_k", "bias": False, "layout": LANES})
    out = np.full((slots, n), np.nan, np.float32)
    kernel = gemm.expert_linear(op, profile, "k")
    got = emulated(kernel, [state(m), in_groups(x), groups, *planes.values(), out], profile)[-1]
    w = w.astype(np.float16).astype(np.float64)
    expected = (x.astype(np.float64)[:, None] @ w[ids].transpose(0, 2, 1))[:, 0]
    assert error(got[used], expected[used]) < tolerance("q4_k") and np.isnan(got[~used]).all() and not used.all()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_matrix_for_each_head(arch):
    m, n, k, heads, profile = 16, 32, 128, 3, resolve(arch)
    planes, w = weights("q8_0", heads * n, k, 0)
    x = halves((m, heads, k))
    op = operator("head_linear", {"fmt": "q8_0", "n": n, "k": k, "m": m, "heads": heads, "layout": LANES})
    out = np.full((m, heads * n), np.nan, np.float32)
    kernel = head_linear(op, profile, "k")
    got = emulated(kernel, [state(m), in_groups(x.reshape(m, -1)), *planes.values(), out], profile)[-1]
    w = w.astype(np.float16).astype(np.float64).reshape(heads, n, k)
    expected = np.einsum("mhk,hnk->mhn", x.astype(np.float64), w).reshape(m, -1)
    assert error(got, expected) < tolerance("q8_0")


# ---- which lane has what


def probed(name, arch):
    """What the probe of kind `name` finds on matrices that are distributed as those of `arch`."""
    profile = resolve(name)
    (m, n, k), expected = profile.lane_matrix, DISTRIBUTIONS[profile.lane_unit]
    shapes = [(32, 1 + part.shape[1]) for part in (expected.a_row, expected.b_column)] + [(m, n)]
    device = replace(profile, lane_unit=DEVICE_KINDS[arch].lane_unit)
    arrays = [np.arange(m * k).astype(np.float16), *(np.zeros(shape, np.float32) for shape in shapes)]
    return [found.astype(int) for found in emulated(fragment_probe(profile, "probe"), arrays, device)[1:]]


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("other", ["rdna3", "rdna4", "vangogh"])
def test_probe_of_other_distributions(name, other):
    assert is_known(DEVICE_KINDS[name], *probed(name, other)) == (name == other)


@pytest.mark.parametrize("name", ["nvidia", *ARCHS])
def test_known_orders(name):
    """Columns may have any order, as long as both operands have the same one; rows, tokens and sums may not."""
    kind, (a, b, sums) = DEVICE_KINDS[name], probed(name, name)
    order, n, one = np.random.default_rng(0).permutation(16), kind.lane_matrix[1], np.arange(32)[:, None] == 5
    moved_a = np.hstack([a[:, :1], a[:, 1:] // 16 * 16 + order[a[:, 1:] % 16]])
    moved_b = np.hstack([b[:, :1], order[b[:, 1:] // n] * n + b[:, 1:] % n])
    assert is_known(kind, a, b, sums) and is_known(kind, moved_a, moved_b, sums)
    changes = [
        (moved_a, b, sums),
        (a, moved_b, sums),
        (a[::-1], b, sums),
        (a, b[::-1], sums),
        (a + (np.arange(a.shape[1]) == 0), b, sums),  # more components
        (np.where(one, moved_a, a), np.where(one, moved_b, b), sums),  # a lane with columns of its own
    ]
    if name in ARCHS:
        changes += [(a, b, sums.T), (a, b, sums[[1, 0, *range(2, 16)]])]
    else:
        changes.append((a[:, [0, 1, 2, 5, 6, 3, 4, 7, 8]], b, sums))  # rows of a lane
    assert not any(is_known(kind, *changed) for changed in changes)


@pytest.mark.parametrize("name", ARCHS)
def test_without_known_lanes(name):
    """The kernels that depend on no distribution."""
    profile = resolve(f"{name}:lane_matrix=none")
    of = gemm.product_of(linear_op([("q4_0", 64)], 256, 64, "pairs"), profile)
    assert not profile.lane_blocks and isinstance(gemm.engine(of), gemm_coop.CoopGemm)
    with pytest.raises(ValueError, match="cannot multiply"):
        gemm.linear(linear_op([("q4_0", 64)], 256, 64, LANES), profile, "k")
