"""The prefill GEMM on cooperative matrices (`gemm_coop.py`), against numpy.

Decoding runs on any Vulkan device with float16; the kernels as a whole, as NVIDIA's and AMD's GPUs get them, in the
SPIR-V emulator. At a model's size they are compiled and looked at. The oracle: gguf-py's dequantized weights, rounded
to float16, times the activations in float64.
"""

from dataclasses import replace
from typing import NamedTuple

import gguf_blocks
import numpy as np
import pytest
import workloads
from act_layouts import from_pairs, in_pairs
from samples import sample
from spirv_emulation import emulated
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T
from vulkan_harness import run
from workloads import built

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.spirv_reader import read
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.planes import BLOCK, plane_args
from mlc_amd.schedules.gpu.base.profiles import resolve
from mlc_amd.schedules.gpu.base.quantize import RUN, RUNS
from mlc_amd.schedules.gpu.base.registers import at
from mlc_amd.schedules.gpu.linear import coop_load, load
from mlc_amd.schedules.gpu.linear.gemm import gate_up_swiglu, linear
from mlc_amd.schedules.gpu.linear.gemm_coop import CoopTile, choose
from mlc_amd.schedules.gpu.linear.gemm_tile import Product
from mlc_amd.schedules.operators import Quantize
from tests.schedules.gpu.test_gpu_gemm import error, state, weights

TOLERANCE = 2e-5  # of the largest result
# for formats that compute scales or have minimums: these are rounded to float16, before the product is
TOLERANCE_SCALED = 8e-4
DEVICES = ("nvidia", "rdna3", "rdna4")
NVIDIA = resolve("nvidia")


def tolerance(name):
    fmt = FORMATS[name]
    return TOLERANCE_SCALED if fmt.minimum or "S" in fmt.scales else TOLERANCE


def test_pairs_are_a_permutation_of_each_block():
    x = np.arange(3 * 64).reshape(3, 64)
    stored = in_pairs(x)
    assert (np.sort(stored.reshape(3, 2, 32), -1) == x.reshape(3, 2, 32)).all()
    assert (from_pairs(stored) == x).all()
    assert stored[0, :8].tolist() == [0, 2, 16, 18, 1, 3, 17, 19]


# ---- decoding, on any device


def decoder(name, n, k, span, profile):
    """A kernel (planes, H float16 [n, k]): weights as the tile routine puts them into shared memory."""
    fmt = FORMATS[name]
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name("k")
        T.func_attr({"tirx.noalias": True, "global_symbol": "k"})
        bufs = plane_args(fmt, n, k, "W_")
        out = T.arg("H", T.buffer((n, k), "float16"))
        views = load.views(fmt, bufs, span)
        with launch((k // (span * BLOCK),), (n,)) as (unit, row):
            found = coop_load.runs(profile, fmt, coop_load.fetch(fmt, views, row, unit, span), span)
            for i, run_ in enumerate(found):
                T.buffer_store(out, run_, [row, at(unit * (span * BLOCK) + i * RUN, RUN)])
            assert len(found) == span * RUNS
    return ir.get()


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("name", gguf_blocks.DISTINCT)
def test_decoded_weights(name, span):
    n, k = 16, 512
    planes, expected = weights(name, n, k, 0)
    profile = replace(resolve("lavapipe"), threads=32)
    got = run(decoder(name, n, k, span, profile), [*planes.values(), np.zeros((n, k), np.float16)], profile)[-1]
    got, nearest = from_pairs(got).astype(np.float32), expected.astype(np.float16).astype(np.float32)
    if tolerance(name) == TOLERANCE:
        np.testing.assert_array_equal(got, nearest)
    else:
        step = np.abs(expected).reshape(n, -1, 256).max(-1).repeat(256, -1) * 2.0**-10
        assert (np.abs(got - expected) <= step).all()


def test_producers_store_pairs():
    m, k = 5, 96
    x = np.random.default_rng(1).standard_normal((m, k), np.float32)
    x[0, :3] = 1e6, -1e6, 0  # more than float16 holds
    kernel = built(Quantize(k=k, m=m, layout="pairs"), resolve("lavapipe"))
    got = run(kernel, [state(m), x, np.zeros((m, k), np.float16)])[-1]
    np.testing.assert_array_equal(got, in_pairs(np.clip(x, -65504, 65504).astype(np.float16)))


# ---- whole kernels


class Case(NamedTuple):
    """One linear kernel: attributes, and its tile."""

    segments: tuple
    k: int = 256
    m: int = 16
    layout: str = "pairs"
    biases: tuple = (False,)
    residual: bool = False
    tile: object = None


# Subgroups along tokens, rows, columns
WIDE, SPLIT = CoopTile(16, 32, 32, 1, 2), CoopTile(16, 16, 64, 1, 1, 2)
LINEAR = {name: Case(((name, 48),), tile=SPLIT if i % 2 else WIDE) for i, name in enumerate(gguf_blocks.DISTINCT)} | {
    "segments": Case((("q4_k", 96), ("q6_k", 37), ("q8_0", 16)), 256, 32, "pairs", (True, True, False), tile=WIDE),
    "residual": Case((("q4_0", 41),), 96, 16, "pairs", (True,), True, tile=WIDE),
    "tokens": Case((("q4_0", 32),), 96, 96, tile=CoopTile(32, 16, 32, 2, 1)),
    "default": Case((("q4_0", 80),), 192, 64),
}


def run_linear(name, profile=NVIDIA, live=None):
    """Results of a linear kernel and what they should be: lists of [m, n]. Results start as NaN."""
    case, rng = LINEAR[name], np.random.default_rng(3)
    x = rng.standard_normal((case.m, case.k), np.float32)
    half = x.astype(np.float16)
    arrays, expected = [state(case.m if live is None else live), in_pairs(half)], []
    for i, ((fmt, n), bias) in enumerate(zip(case.segments, case.biases, strict=True)):
        planes, w = weights(fmt, n, case.k, i)
        arrays += planes.values()
        y = half.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T
        if bias:
            arrays.append(rng.standard_normal(n, np.float32))
            y = y + arrays[-1]
        expected.append(y)
    outputs = [np.full((case.m, -(-n // 16) * 16), np.nan, np.float32) for _, n in case.segments]
    if case.residual:
        arrays.append(rng.standard_normal(outputs[0].shape, np.float32))
        expected[0] = expected[0] + arrays[-1][:, : expected[0].shape[1]]
    op = workloads.linear_op(*case[:5], residual=case.residual)
    kernel = linear(op, profile, "k", case.tile)
    results = emulated(kernel, [*arrays, *outputs], profile)[-len(outputs) :]
    return [y[:, : e.shape[1]] for y, e in zip(results, expected, strict=True)], expected


ON = [(name, arch) for name in LINEAR for arch in DEVICES]


@pytest.mark.parametrize(
    ("name", "arch"), sample(ON, [*((name, "nvidia") for name in LINEAR), ("default", "rdna3"), ("default", "rdna4")])
)
def test_linear(name, arch):
    got, expected = run_linear(name, resolve(arch))
    for y, e, (fmt, _) in zip(got, expected, LINEAR[name].segments, strict=True):
        assert error(y, e) < tolerance(fmt)


@pytest.mark.parametrize("live", [1, 33])
def test_linear_leaves_tiles_without_live_tokens(live):
    (got,), (expected,) = run_linear("tokens", live=live)
    tokens = -(-live // 32) * 32
    assert error(got[:tokens], expected[:tokens]) < TOLERANCE
    assert np.isnan(got[tokens:]).all()


@pytest.mark.parametrize("layout", ["pairs", ""])
@pytest.mark.parametrize("gate, up, tile", [("q4_k", "q6_k", WIDE), ("q4_0", "q4_0", SPLIT)])
def test_gate_up_swiglu(gate, up, tile, layout):
    f, k, m, profile = 96, 256, 16, NVIDIA
    (gate_planes, g), (up_planes, u) = weights(gate, f, k, 1), weights(up, f, k, 2)
    # gates of a size at which the sigmoid bends
    x = np.random.default_rng(1).standard_normal((m, k), np.float32) * np.float32(3 / np.sqrt((g**2).sum(1).mean()))
    half = x.astype(np.float16)
    g, u = (half.astype(np.float64) @ w.astype(np.float16).astype(np.float64).T for w in (g, u))
    expected = g / (1 + np.exp(-g)) * u
    out = np.full((m, f), np.nan, np.float16 if layout else np.float32)
    kernel = gate_up_swiglu(workloads.gate_up_op(gate, up, f, k, m, "pairs", layout), profile, "k", tile)
    got = emulated(kernel, [state(m), in_pairs(half), *gate_planes.values(), *up_planes.values(), out], profile)[-1]
    # both factors have that error, and the result may be float16
    assert error(from_pairs(got) if layout else got, expected) < 2 * max(tolerance(gate), tolerance(up)) + (
        6e-4 if layout else 0
    )


# ---- at a model's size: default tiles, compiled for real devices


SIZES = (16, 64, 512)  # tokens
SAMPLE = ("q4_0", "q4_k", "q6_k", "f32")  # on each device for each size, all others on one device for one size
FITS = [(arch, fmt, SIZES) for arch in DEVICES for fmt in SAMPLE]
FITS += [(DEVICES[i % 3], fmt, (64,)) for i, fmt in enumerate(gguf_blocks.DISTINCT) if fmt not in SAMPLE]


@pytest.mark.parametrize(("arch", "fmt", "sizes"), sample(FITS, [(DEVICES[0], fmt, SIZES) for fmt in ("q6_k", "f32")]))
def test_default_tiles_fit(arch, fmt, sizes):
    profile, kernels = resolve(arch), {}
    for m in sizes:
        op = workloads.linear_op([(fmt, 4096)], 4096, m, "pairs", (True,))
        pair = workloads.gate_up_op(fmt, fmt, 4096, 4096, m, "pairs", "pairs")
        kernels[f"linear_{m}"] = linear(op, profile, f"linear_{m}")
        kernels[f"swiglu_{m}"] = gate_up_swiglu(pair, profile, f"swiglu_{m}")
    for kernel in compile_spirv(kernels, profile).modules.values():
        facts = read(kernel.binary)
        assert facts.matrix and "CooperativeMatrixKHR" in kernel.capabilities
        assert facts.lds == kernel.lds <= profile.lds
        assert len(kernel.binary) < 240_000


def test_few_rows_get_small_tiles():
    """So that workgroups fill the GPU."""
    fmt = FORMATS["q4_0"]
    large, small = (choose(Product(NVIDIA, "pairs", (fmt,), 512, 4096, rows)) for rows in (16384, 1024))
    assert large.rows * large.tokens > small.rows * small.tokens


@pytest.mark.parametrize(
    "arch, arguments",
    [
        ("rdna3", (256, 24, "pairs")),  # 24 tokens
        ("nvidia", (48, 16, "pairs")),  # 48 columns
        ("gfx1100", (256, 16, "pairs")),
    ],
)
def test_what_has_no_tiles_is_refused(arch, arguments):
    from mlc_amd.schedules.gpu.base.arch import resolve as resolve_amd

    profile = resolve_amd(arch) if arch.startswith("gfx") else resolve(arch)
    with pytest.raises(ValueError, match=r"tiles|multiply|columns"):
        linear(workloads.linear_op([("q4_0", 32)], *arguments), profile, "f")


@pytest.mark.parametrize(
    "tile, text",
    [
        (CoopTile(128, 128, 128, 2, 2), "bytes of shared memory"),
        (CoopTile(128, 128, 64, 4, 4), "threads"),
        (CoopTile(24, 32, 64, 1, 1), "does not divide"),
        (CoopTile(16, 16, 32, 1, 1, 4), "columns"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(tile, text):
    with pytest.raises(ValueError, match=text):
        linear(workloads.linear_op([("q4_0", 128)], 256, 384, "pairs"), NVIDIA, "f", tile)
