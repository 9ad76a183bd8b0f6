"""A mixture of experts on the GPU: its kernels on Mesa's CPU driver, against numpy; and what every GPU's compiler makes
of them. (Its router: test_gpu_route.py.)"""

import functools
from typing import NamedTuple

import numpy as np
import pytest
from act_layouts import lanes_shape
from vulkan_harness import PROFILES, gpu, on_both, run
from workloads import built, operator

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import resolve
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.schedules.operators.layouts import activations
from mlc_amd.tools.reference import experts as reference
from mlc_amd.tools.reference.activations import read
from tests.dev.gfxemu import emulate
from tests.schedules.gpu import test_gpu_gemm as gemm_cases
from tests.schedules.gpu.test_gpu_gemm import error

TOLERANCE = 2e-5  # of the largest result
LEFT = 7  # what outputs hold before a kernel runs


@pytest.fixture
def profile(profile_name):
    gpu()
    return PROFILES[profile_name]


def execute(kernel, arrays, profile):
    """Runs the kernel on the arrays of its parameters' names; they hold what it wrote afterwards."""
    names = [param.name for param in kernel.params]
    results = run(kernel, [arrays[name] for name in names], profile)
    for name, result in zip(names, results, strict=True):
        arrays[name][...] = result


def emulated(kernel, arrays, arch):
    """The same in the ISA emulator, for AMD's own API."""
    name = str(kernel.attrs["global_symbol"])
    emulate(compile_hsaco({name: kernel}, arch), name, {p.name: arrays[p.name] for p in kernel.params}, wave_order=3)


def build(op, arch, **args):
    return built(operator(op, args), arch, op)


def of(experts: Experts):
    return {"experts": experts.count, "used": experts.used, "tile": experts.tile}


def state(live):
    return {"state": np.array([5, live, 0, 0], np.int32)}


def left(shape, dtype):
    return np.full(shape, LEFT, dtype)


# ---- rows in slots


def choices(m, experts, seed=0):
    """Ids [m, used]: distinct in a row, some experts much more often than others."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, experts.count + 1)
    rows = [rng.choice(experts.count, experts.used, replace=False, p=p / p.sum()) for _ in range(m)]
    return np.array(rows, np.int32)


def ordered(ids, live, experts):
    """(Slots, Pairs, Groups)"""
    found, pairs, *groups = reference.order(ids[:live], experts.count, experts.tile, experts.tiles(len(ids)))
    slots = np.zeros(ids.shape, np.int32)
    slots[:live] = found
    return slots, pairs.astype(np.int32), np.concatenate(groups).astype(np.int32)


ORDERS = (  # rows, live ones, experts
    (16, 13, Experts(9, 3, 8)), (200, 200, Experts(40, 6, 32)), (3, 3, Experts(300, 2, 4)), (8, 8, Experts(4, 1, 16)),
)  # fmt: skip


@pytest.mark.parametrize(("profile_name", "case"), on_both(ORDERS, ORDERS[:2]))
def test_expert_order(profile, case):
    check_order(*case, profile, execute)


def check_order(m, live, experts, arch, run_kernel):
    ids = choices(m, experts)
    arrays = state(live) | {"Ids": ids, "Slots": left(ids.shape, np.int32), "Pairs": left(experts.slots(m), np.int32)}
    arrays["Groups"] = left(experts.groups(m), np.int32)
    run_kernel(build("expert_order", arch, m=m, **of(experts)), arrays, arch)
    for name, expected in zip(("Slots", "Pairs", "Groups"), ordered(ids, live, experts), strict=True):
        np.testing.assert_array_equal(arrays[name], expected, err_msg=name)


GATHERS = (("rows", False), ("rows", True), ("lanes:2", False), ("", True))  # layout, whether weighted


@pytest.mark.parametrize(("profile_name", "case"), on_both(GATHERS, GATHERS[1:2]))
def test_gather(profile, case):
    layout, weighted = case
    experts, m, k, live = Experts(9, 3, 8), 16, 96, 13
    rng, ids = np.random.default_rng(2), choices(16, Experts(9, 3, 8))
    _, pairs, _ = ordered(ids, live, experts)
    x, weights = rng.standard_normal((m, k), np.float32), rng.random((m, 3), np.float32)
    x[live:] = np.nan
    slots = experts.slots(m)
    out = {"H": left(lanes_shape(slots, k, 2), np.float16)} if layout else {"Y": left((slots, k), np.float32)}
    if layout == "rows":
        out = {"A": left((slots, k // 32, 32), np.int8), "S": left((slots, k // 32, 4), np.float32)}
    arrays = state(live) | {"X": x, "Pairs": pairs, "Weights": weights} | out
    kernel = build("gather", profile, k=k, m=m, **of(experts), weighted=weighted, layout=layout)
    execute(kernel, arrays, profile)
    expected = x[pairs // 3] * (weights.ravel()[pairs, None] if weighted else 1)
    used = pairs >= 0
    got = next(iter(out.values()))
    if layout == "lanes:2":
        got = read(layout, {"H": got}, rows=np.arange(slots))[:, :k]
    unused = got[~used]
    if layout == "rows":
        got = (out["A"] * out["S"][..., :1]).reshape(slots, k)
        np.testing.assert_allclose(out["S"][used], gemm_cases.sums(out["A"], out["S"][..., 0])[used], rtol=1e-6)
    limit = {"rows": 0.02, "lanes:2": 2e-3, "": 0}[layout]
    assert np.abs(got[used] - expected[used]).max() <= limit
    assert (unused == LEFT).all()


@pytest.mark.parametrize(("profile_name", "weighted"), on_both((False, True), (True,)))
def test_combine(profile, weighted):
    experts, m, n, live = Experts(9, 3, 8), 5, 144, 4
    rng, ids = np.random.default_rng(2), choices(5, Experts(9, 3, 8))
    slots, _, _ = ordered(ids, live, experts)
    x, weights = rng.standard_normal((experts.slots(m), n), np.float32), rng.random((m, 3), np.float32)
    r = rng.standard_normal((m, n), np.float32)
    arrays = state(live) | {"X": x, "Slots": slots, "Weights": weights, "R": r, "Y": left((m, n), np.float32)}
    execute(build("combine", profile, n=n, m=m, **of(experts), weighted=weighted, residual=weighted), arrays, profile)
    expected = (x[slots] * (weights[..., None] if weighted else 1)).sum(1) + (r if weighted else 0)
    assert error(arrays["Y"][:live], expected[:live]) < 1e-6 and (arrays["Y"][live:] == LEFT).all()


# ---- products with experts' weights


class Case(NamedTuple):
    """m rows, sorted by expert where its tiles have several slots; n: rows of an expert's matrix."""

    fmt: str
    m: int = 1
    experts: Experts = Experts(5, 3)
    n: int = 64
    k: int = 256
    biases: bool = False
    act: str = "silu"
    shared: bool = True
    layout: str = "rows"

    @property
    def sorted(self) -> bool:
        return self.experts.tile > 1


TILED = Experts(5, 3, 32)
CASES = {
    "q8_0": Case("q8_0"),
    "q4_k": Case("q4_k", biases=True, act="swiglu_oai", layout=""),
    "f16": Case("f16", shared=False, k=96),
    "mxfp4": Case("mxfp4", biases=True, act="swiglu_oai", k=96),
    "few q4_k": Case("q4_k", 4, biases=True, act="swiglu_oai", k=512),
    "few f16": Case("f16", 16, shared=False, k=96),
    "seven": Case("q4_0", experts=Experts(9, 7), n=32, biases=True),
    "rows q8_0": Case("q8_0", 16, TILED, biases=True, act="swiglu_oai", layout=""),
    "rows q4_k": Case("q4_k", 16, TILED, n=96),
    "rows mxfp4": Case("mxfp4", 16, TILED, n=96, k=96, biases=True, act="swiglu_oai"),
    "rows f16": Case("f16", 16, TILED, n=32, k=96, layout=""),
}


@functools.cache
def stack(fmt, count, n, k, seed):
    """(planes, weights float32 [count, n, k])"""
    planes, w = gemm_cases.weights(fmt, count * n, k, seed)
    return planes, w.reshape(count, n, k)


def problem(case, arch, rows, scale=1.0):
    """(layout of activations, parameters, values [rows, k], what rounds weights, error that is allowed)"""
    matrix = bool(case.sorted and arch.matrix)
    layout = "rows" if FORMATS[case.fmt].kind == "int8" else ""
    if matrix:
        layout = "pairs" if arch.matrix == "coop" else gemm_cases.placed(gemm_cases.MATRIX, arch)
    inputs, x, rounded = gemm_cases.problem(layout, rows, case.k, scale)
    limit = gemm_cases.tolerance(case.fmt, "-matrix") if matrix else TOLERANCE
    return layout, inputs, x, rounded, limit


def assigned(case):
    """(Groups, the expert of each slot or -1)"""
    ids = choices(case.m, case.experts)
    if not case.sorted:
        return ids, ids.ravel()
    _, _, groups = ordered(ids, case.m, case.experts)
    return groups, np.repeat(groups[: case.experts.tiles(case.m)], case.experts.tile)


def by_slot(function, x, ids, *parts):
    """function(a slot's row of x, what its expert has of each of the parts), slots one below the other."""
    rows = [function(x[i : i + 1], *(part[expert] for part in parts)) for i, expert in enumerate(ids)]
    return np.concatenate(rows)


def check_gate_up(case, arch, run_kernel):
    experts, n, k = case.experts, case.n, case.k
    (g_planes, g), (u_planes, u) = (stack(case.fmt, experts.count, n, k, seed) for seed in (1, 2))
    slots = experts.slots(case.m)
    shared = case.shared and not case.sorted
    rows = case.m if shared else slots
    # gates of a size at which the activation bends
    layout_in, inputs, x, rounded, limit = problem(
        case, arch, rows, 3 / np.sqrt((g.astype(np.float64) ** 2).sum(-1).mean())
    )
    groups, ids = assigned(case)
    rng = np.random.default_rng(4)
    biases = {name: rng.standard_normal(experts.count * n).astype(np.float32) for name in ("GB", "UB")}
    layout = layout_in if case.sorted and arch.matrix and case.layout else case.layout
    out = {"A_out": left((slots, n // 32, 32), np.int8), "S_out": left((slots, n // 32, 4), np.float32)}
    if layout != "rows":
        (of_out,) = activations(slots, n, layout)
        out = {"Y": left(*of_out)}
    arrays = state(case.m) | inputs | {"Groups": groups} | biases | out
    arrays |= {prefix + p: a for prefix, planes in (("G_", g_planes), ("U_", u_planes)) for p, a in planes.items()}
    kernel = build(
        "expert_gate_up", arch, gate=case.fmt, up=case.fmt, n=n, k=k, m=case.m, **of(experts), biases=case.biases,
        act=case.act, layout_in=layout_in, layout=layout, shared=shared,
    )  # fmt: skip
    run_kernel(kernel, arrays, arch)
    b = [biases[name].reshape(-1, n) for name in ("GB", "UB") if case.biases]
    x = x.repeat(slots // rows, axis=0)

    def one(x, gate, up, *biases):
        return reference.gate_up(x, gate, up, case.act, biases or (None, None))

    expected = by_slot(one, x, ids, rounded(g), rounded(u), *b)
    used = ids >= 0
    if layout != "rows":
        got = read(layout, {"Y": out["Y"]}, rows=np.arange(slots))[:, :n]
        assert error(got[used], expected[used]) < 2 * limit + (6e-4 if layout else 0)
    else:
        A, S = out["A_out"], out["S_out"]
        blocks, d = expected.reshape(slots, -1, 32), S[..., 0]
        np.testing.assert_allclose(d[used], (np.abs(blocks).max(-1) / 127)[used], rtol=1e-4)
        assert (np.abs(A * d[..., None] - blocks) < 0.502 * d[..., None])[used].all()
        np.testing.assert_allclose(S[used], gemm_cases.sums(A, d)[used], rtol=1e-6)
        got = S
    if case.sorted:
        assert not used.all() and (got[~used] == LEFT).all()


def check_down(case, arch, run_kernel):
    """`expert_linear` of sorted rows, else `expert_down`."""
    experts, n, k, slots = case.experts, case.n, case.k, case.experts.slots(case.m)
    planes, w = stack(case.fmt, experts.count, n, k, 3)
    layout, inputs, x, rounded, limit = problem(case, arch, slots)
    groups, ids = assigned(case)
    rng = np.random.default_rng(4)
    bias, r = rng.standard_normal(experts.count * n).astype(np.float32), rng.standard_normal((case.m, n), np.float32)
    weights = rng.random((case.m, experts.used), np.float32)
    arrays = state(case.m) | inputs | {"Groups": groups, "WB": bias, "Weights": weights, "R": r}
    arrays |= {f"W_{p}": a for p, a in planes.items()}
    args = {"fmt": case.fmt, "n": n, "k": k, "m": case.m, **of(experts), "bias": case.biases, "layout": layout}
    expected = by_slot(reference.linear, x, ids, rounded(w), *([bias.reshape(-1, n)] if case.biases else []))
    if not case.sorted:
        arrays["Y"] = left((case.m, n), np.float32)
        weighted = residual = case.biases
        run_kernel(build("expert_down", arch, **args, weighted=weighted, residual=residual), arrays, arch)
        expected = expected.reshape(case.m, -1, n) * (weights[..., None] if weighted else 1)
        assert error(arrays["Y"], expected.sum(1) + (r if residual else 0)) < limit
        return
    arrays["Y"], used = left((slots, n), np.float32), ids >= 0
    run_kernel(build("expert_linear", arch, **args), arrays, arch)
    assert error(arrays["Y"][used], expected[used]) < limit
    assert not used.all() and (arrays["Y"][~used] == LEFT).all()


SMALL = ("q4_k", "f16", "rows f16")  # the driver takes long over barriers in much code


@pytest.mark.parametrize(("profile_name", "name"), on_both(CASES, SMALL))
def test_expert_gate_up(profile, name):
    check_gate_up(CASES[name], profile, execute)


@pytest.mark.parametrize(("profile_name", "name"), on_both(CASES, (*SMALL, "rows q4_k")))
def test_expert_down_and_linear(profile, name):
    check_down(CASES[name], profile, execute)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
def test_order_of_amd_code(arch):
    check_order(16, 13, Experts(9, 3, 8), resolve(arch), emulated)


def test_experts_whose_matrices_do_not_begin_at_a_tile_are_refused():
    case = {"n": 24, "k": 256, "m": 1, **of(Experts(5, 3)), "bias": False, "layout": "rows"}
    with pytest.raises(UserError, match="multiple of 16"):
        build("expert_down", PROFILES["generic"], fmt="q4_0", **case, weighted=False, residual=False)
