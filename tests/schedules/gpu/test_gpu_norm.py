"""RMS norm, activation layouts and embedding lookup on the GPU, run in the ISA emulator, against numpy and gguf-py."""

import re

import gguf_blocks
import numpy as np
import pytest

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.quant import repack
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import ARCHS, resolve
from mlc_amd.schedules.gpu.base.embed import embed
from mlc_amd.schedules.gpu.base.norm import layer_norm, quantize, rms_norm
from tests.dev.gfxemu import emulate

ARCH_NAMES = ("gfx1100", "gfx1201", "gfx942")
EPS, LEFT = 1e-5, 7  # LEFT: what outputs hold before a kernel runs
#        m, k, live
CHUNKS = ((1, 2048, 1), (4, 96, 3), (2, 1056, 2), (3, 1024, 1))
VOCAB, COLUMNS = 37, 512


def state(live):
    return {"state": np.array([3, live, 0, 0], np.int32)}


def outputs(m, k, layout, name="Y"):
    """Parameters of a token vector in that layout."""
    if layout == "rows":
        return {"A": np.full((m, k // 32, 32), LEFT, np.int8), "S": np.full((m, k // 32, 4), LEFT, np.float32)}
    return {"half": {"H": np.full((m, k), LEFT, np.float16)}, "": {name: np.full((m, k), LEFT, np.float32)}}[layout]


def check(out, expected):
    """The outputs against float64 rows [live, k]; rows beyond them untouched."""
    live, k = expected.shape
    assert all((a[live:] == LEFT).all() for a in out.values())
    if "Y" in out:
        np.testing.assert_allclose(out["Y"][:live], expected, rtol=3e-6, atol=1e-9)
    elif "H" in out:
        np.testing.assert_allclose(out["H"][:live], np.clip(expected, -65504, 65504), rtol=6e-4, atol=6e-8)
    else:
        q, s, x = out["A"][:live].astype(np.int64), out["S"][:live], expected.reshape(live, k // 32, 32)
        np.testing.assert_allclose(s[..., 0], np.abs(x).max(-1) / 127, rtol=2e-6)
        assert (np.abs(q * s[..., :1] - x) <= s[..., :1] * 0.5001).all()
        sums = np.stack([q.sum(-1), q[..., :16].sum(-1), q[..., 16:].sum(-1)], -1)
        np.testing.assert_allclose(s[..., 1:], s[..., :1] * sums, rtol=1e-6)


def rows_of(m, k):
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    x[0, :32] = 0  # a block of zeros
    x[:, -32:] *= 1e5  # beyond float16
    return x


def build(arch, **kernels):
    module = compile_hsaco(kernels, resolve(arch))
    for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert set(re.findall(rf"\.{what}:\s+(\d+)", module.assembly)) == {"0"}, what
    return module


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("layout", ["rows", "half"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_quantize(arch, layout, chunk):
    m, k, live = chunk
    x, out = rows_of(m, k), outputs(m, k, layout)
    emulate(
        build(arch, quantize=quantize(k, m, layout, resolve(arch), "quantize")),
        "quantize",
        state(live) | {"X": x} | out,
    )
    check(out, x[:live].astype(np.float64))


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("rows", ["all", "last"])
@pytest.mark.parametrize("layout", ["", "rows", "half"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_rms_norm(arch, rows, layout, chunk):
    m, k, live = chunk
    x, g = rows_of(m, k), np.random.default_rng(9).standard_normal(k).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * g)[:live]
    out = outputs(m if rows == "all" else 1, k, layout)
    module = build(arch, norm=rms_norm(k, m, EPS, layout, rows, resolve(arch), "norm"))
    emulate(module, "norm", state(live) | {"X": x, "G": g} | out, wave_order=2)
    check(out, expected if rows == "all" else expected[-1:])


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_embed(arch, fmt):
    weights, table = gguf_blocks.weights(fmt, VOCAB, COLUMNS, 3, "rows")
    m, live, tokens = 5, 4, np.array([-1, VOCAB, 17, 36, 5], np.int32)
    X = np.full((m, COLUMNS), LEFT, np.float32)
    module = build(arch, embed=embed(fmt, VOCAB, COLUMNS, m, resolve(arch), "embed"))
    emulate(module, "embed", state(live) | {"tokens": tokens, "X": X} | weights)
    np.testing.assert_array_equal(X[:live], table[np.clip(tokens, 0, VOCAB - 1)[:live]])
    assert (X[live:] == LEFT).all()


@pytest.mark.full
@pytest.mark.emulator
def test_embed_of_a_float_table_takes_any_number_of_columns():
    table = np.random.default_rng(4).standard_normal((VOCAB, 100)).astype(np.float32)
    weights, X = repack("f32", table.view(np.uint8), 100, "rows"), np.zeros((1, 100), np.float32)
    module = build("gfx1100", embed=embed("f32", VOCAB, 100, 1, resolve("gfx1100"), "embed"))
    emulate(module, "embed", state(1) | {"tokens": np.array([16], np.int32), "X": X} | weights)
    assert (X[0] == table[16]).all()


@pytest.mark.parametrize("arch", {arch.family: name for name, arch in ARCHS.items()}.values())
def test_every_family_compiles(arch):
    """Also those without an emulator: no spills, no scratch."""
    target = resolve(arch)
    build(
        arch,
        norm=rms_norm(8192, 1, EPS, "rows", "all", target, "norm"),
        wide=rms_norm(4096, 512, EPS, "half", "all", target, "wide"),
        quantize=quantize(14336, 16, "rows", target, "quantize"),
        embed=embed("iq4_xs", VOCAB, 4096, 512, target, "embed"),
        layer_norm=layer_norm(4096, 16, EPS, True, "half", "all", target, "layer_norm"),
    )


def test_what_does_not_fit_is_refused():
    arch = resolve("gfx1100")
    with pytest.raises(UserError, match="multiple of 32"):
        quantize(40, 1, "rows", arch, "quantize")
    with pytest.raises(UserError, match="multiple of 32"):
        rms_norm(40, 1, EPS, "", "all", arch, "norm")
    with pytest.raises(ValueError, match="convert"):
        quantize(64, 1, "", arch, "quantize")
