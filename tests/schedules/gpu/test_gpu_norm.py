"""RMS norm, activation layouts and embedding lookup on the GPU, run in the ISA emulator, against numpy and gguf-py."""

import math
import re

import gguf_blocks
import numpy as np
import pytest
from act_layouts import from_pairs
from samples import sample
from workloads import built

from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.quant import repack
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.arch import ARCHS, resolve
from mlc_amd.schedules.operators import Embed, LayerNorm, Operator, Quantize, RmsNorm
from mlc_amd.tools.reference.attention import multiplied
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
    return {"pairs": {"H": np.full((m, k), LEFT, np.float16)}, "": {name: np.full((m, k), LEFT, np.float32)}}[layout]


def check(out, expected, atol=1e-9):
    """The outputs against float64 rows [live, k]; rows beyond them untouched."""
    live, k = expected.shape
    assert all((a[live:] == LEFT).all() for a in out.values())
    if "Y" in out:
        np.testing.assert_allclose(out["Y"][:live], expected, rtol=3e-6, atol=atol)
    elif "H" in out:
        np.testing.assert_allclose(from_pairs(out["H"])[:live], np.clip(expected, -65504, 65504), rtol=6e-4, atol=6e-8)
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


def build(arch, **operators: Operator):
    gpu = resolve(arch)
    module = compile_hsaco({name: built(op, gpu, name) for name, op in operators.items()}, gpu)
    for what in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert set(re.findall(rf"\.{what}:\s+(\d+)", module.assembly)) == {"0"}, what
    return module


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize(("layout", "rotation"), [("rows", 0), ("pairs", 0), ("rows", 256), ("", 128)])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_quantize(arch, layout, rotation, chunk):
    m, k, live = chunk
    rotation = rotation and math.gcd(rotation, k)
    x, out = rows_of(m, k), outputs(m, k, layout)
    if rotation:  # sums of few digits
        x = np.rint(x * 10).clip(-999, 999)
    emulate(
        build(arch, quantize=Quantize(k=k, m=m, layout=layout, rotation=rotation)),
        "quantize",
        state(live) | {"X": x} | out,
    )
    check(out, multiplied(x[:live], rotation), atol=1e-4 if rotation else 1e-9)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("rows", ["all", "last"])
@pytest.mark.parametrize("layout", ["", "rows", "pairs"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_rms_norm(arch, rows, layout, chunk):
    m, k, live = chunk
    x, g = rows_of(m, k), np.random.default_rng(9).standard_normal(k).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * g)[:live]
    out = outputs(m if rows == "all" else 1, k, layout)
    module = build(arch, norm=RmsNorm(k=k, m=m, eps=EPS, layout=layout, rows=rows))
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
    module = build(arch, embed=Embed(fmt=fmt, vocab=VOCAB, k=COLUMNS, m=m))
    emulate(module, "embed", state(live) | {"tokens": tokens, "X": X} | weights)
    np.testing.assert_array_equal(X[:live], table[np.clip(tokens, 0, VOCAB - 1)[:live]])
    assert (X[live:] == LEFT).all()


@pytest.mark.full
@pytest.mark.emulator
def test_embed_of_a_float_table_takes_any_number_of_columns():
    table = np.random.default_rng(4).standard_normal((VOCAB, 100)).astype(np.float32)
    weights, X = repack("f32", table.view(np.uint8), 100, "rows"), np.zeros((1, 100), np.float32)
    module = build("gfx1100", embed=Embed(fmt="f32", vocab=VOCAB, k=100, m=1))
    emulate(module, "embed", state(1) | {"tokens": np.array([16], np.int32), "X": X} | weights)
    assert (X[0] == table[16]).all()


FAMILIES = list({arch.family: name for name, arch in ARCHS.items()}.values())


@pytest.mark.parametrize("arch", sample(FAMILIES, ("gfx906", "gfx1201")))  # waves of 64 lanes and of 32
def test_every_family_compiles(arch):
    """Also those without an emulator: no spills, no scratch."""
    build(
        arch,
        norm=RmsNorm(k=8192, m=1, eps=EPS, layout="rows", rows="all"),
        wide=RmsNorm(k=4096, m=512, eps=EPS, layout="pairs", rows="all"),
        quantize=Quantize(k=14336, m=16, layout="rows"),
        rotate=Quantize(k=4096, m=16, layout="rows", rotation=256),
        embed=Embed(fmt="iq4_xs", vocab=VOCAB, k=4096, m=512),
        layer_norm=LayerNorm(k=4096, m=16, eps=EPS, bias=True, layout="pairs", rows="all"),
    )


def test_what_does_not_fit_is_refused():
    arch = resolve("gfx1100")
    with pytest.raises(UserError, match="multiple of 32"):
        built(Quantize(k=40, m=1, layout="rows"), arch)
    with pytest.raises(UserError, match="multiple of 32"):
        built(RmsNorm(k=40, m=1, eps=EPS, layout="", rows="all"), arch)
    with pytest.raises(ValueError, match="convert"):
        built(Quantize(k=64, m=1, layout=""), arch)
