"""RMS norm, activation quantization and embedding lookup on the CPU against numpy (and, for the table's bytes,
gguf-py)."""

import functools
import os

import gguf_blocks
import numpy as np
import pytest
import tvm
from workloads import tiled

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.compiler.quant.pack import repack
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.cpu.linear.planes import embed
from mlc_amd.schedules.cpu.linear.quantize import norm, quantize
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import Embed, LayerNorm, Quantize, RmsNorm
from mlc_amd.tools.reference.attention import multiplied

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call

# one of each instruction set that this machine runs
RUNNABLE = [name for name in ("x86-64-v2", "x86-64-v3", "native") if cpu_flags().issuperset(resolve(name).flags)]
ARCHS = list({resolve(name).isa: name for name in RUNNABLE}.values())
EPS, LEFT = 1e-5, 7.0  # LEFT: what outputs hold before a kernel runs
#        m, k, p, live
CHUNKS = ((1, 2048, 1, 1), (16, 256, 2, 16), (16, 96, 8, 5), (8, 64, 8, 8))
ANSWERS, SINGLE = 4, (0, 2, 3, 4)  # answers at most, and single rows of steps
VOCAB, COLUMNS, ODD_COLUMNS = 37, 512, 100
# Lookups are the same TensorIR everywhere: archs other than this machine's own compile those of a few formats.
SAMPLE = ("q4_0", "q6_k", "mxfp4", "bf16")
ONE_TOKEN = ("q4_0", "f16")  # formats whose lookups are tested for a single token
EMBEDS = [(arch, fmt) for arch in ARCHS for fmt in (FORMATS if arch == ARCHS[-1] else SAMPLE)]
EMBED_M, SCALE = 5, 45.25


@functools.cache
def kernels(arch):
    """All kernels of an architecture, by name."""
    native, funcs = resolve(arch), []
    for i, (m, k, p, _) in enumerate(CHUNKS):
        target, sizes = tiled(native, p), {"k": k, "m": m}
        funcs += [quantize(Quantize(**sizes, layout="tiles"), target, f"quantize{i}")]
        for layout in ("", "tiles"):
            op = Quantize(**sizes, layout=layout, rotation=k & -k)
            funcs += [quantize(op, target, f"rotate{i}_{layout}")]
        for q, layout in enumerate(("", "tiles")):
            common = {**sizes, "eps": EPS, "layout": layout}
            funcs += [
                norm(RmsNorm(**common, rows=row), target, f"norm{i}_{row.partition(':')[0]}_{q}")
                for row in ("all", "last", *([f"answers:{ANSWERS}"] if m > 1 else []))
            ]
            funcs += [norm(LayerNorm(**common, rows="all", bias=bool(q)), target, f"layer_norm{i}_{q}")]
    table = {"vocab": VOCAB, "k": COLUMNS, "m": EMBED_M}
    for fmt in (fmt for of, fmt in EMBEDS if of == arch):
        sizes = (1, EMBED_M) if fmt in ONE_TOKEN else (EMBED_M,)
        funcs += [embed(Embed(**table | {"fmt": fmt, "m": m}), native, f"embed_{fmt}_{m}") for m in sizes]
    if arch == ARCHS[-1]:
        funcs += [embed(Embed(**table | {"fmt": "f32", "k": ODD_COLUMNS}), native, "embed_odd")]
        funcs += [embed(Embed(**table, fmt="q4_k", scale=SCALE), native, "embed_scaled")]
    return build_module({f.attrs["global_symbol"]: f for f in funcs}, resolve(arch).target)


def tensor(x):
    return tvm.runtime.tensor(np.ascontiguousarray(x))


def state(live, single=0):
    return tensor(np.array([single, live, 0, 0], np.int32))


def planes(m, k, p):
    tiles = -(-m // p)
    return tensor(np.zeros((tiles, k // 32, p, 32), np.int8)), tensor(np.full((tiles, k // 32, 8, p), LEFT, np.float32))


def check_planes(A, S, expected, live):
    """A and S against float64 rows [live, k]; rows beyond them untouched."""
    k = expected.shape[1]
    q = A.numpy().transpose(0, 2, 1, 3).reshape(-1, k // 32, 32)
    fields = S.numpy().transpose(0, 3, 1, 2).reshape(-1, k // 32, 8)
    assert (q[live:] == 0).all() and (fields[live:] == LEFT).all()
    q, fields, x = q[:live].astype(np.int64), fields[:live], expected.reshape(live, k // 32, 32)
    amax = np.abs(x).max(-1)
    np.testing.assert_allclose(fields[..., 0], amax / 127, rtol=2e-6)
    assert (np.abs(q * fields[..., :1] - x) <= fields[..., :1] * 0.5001).all()
    sums = [q.sum(-1), q[..., :16].sum(-1), q[..., 16:].sum(-1)]
    for row, total in zip((1, 3, 4), sums, strict=True):
        np.testing.assert_allclose(fields[..., row], fields[..., 0] * total, rtol=1e-6)
    for row, total in zip((2, 5, 6), sums, strict=True):
        assert (np.ascontiguousarray(fields[..., row]).view(np.int32) == -total).all()


def rows_of(m, k):
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    x[-1, :32] = 0  # a block of zeros
    x[:, -32:] *= 1000
    return x


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("chunk", range(len(CHUNKS)))
def test_quantize(arch, chunk):
    m, k, p, live = CHUNKS[chunk]
    x, (A, S) = rows_of(m, k), planes(m, k, p)
    kernels(arch)[f"quantize{chunk}"](state(live), tensor(x), A, S)
    check_planes(A, S, x[:live].astype(np.float64), live)
    y, (A, S), expected = tensor(np.full((m, k), LEFT, np.float32)), planes(m, k, p), multiplied(x[:live], k & -k)
    kernels(arch)[f"rotate{chunk}_tiles"](state(live), tensor(x), A, S)
    check_planes(A, S, expected, live)
    kernels(arch)[f"rotate{chunk}_"](state(live), tensor(x), y)
    np.testing.assert_allclose(y.numpy()[:live], expected, rtol=2e-6, atol=1e-6 * np.abs(expected).max())
    assert (y.numpy()[live:] == LEFT).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("row", ["all", "last"])
@pytest.mark.parametrize("chunk", range(len(CHUNKS)))
def test_rms_norm(arch, chunk, row):
    m, k, p, live = CHUNKS[chunk]
    x, g = rows_of(m, k), np.random.default_rng(9).standard_normal(k).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * g)[:live]
    out_m, out_p, out_live = m, p, live
    if row == "last":
        expected, out_m, out_p, out_live = expected[-1:], 1, 1, 1
    Y = tensor(np.full((out_m, k), LEFT, np.float32))
    kernels(arch)[f"norm{chunk}_{row}_0"](state(live), tensor(x), tensor(g), Y)
    np.testing.assert_allclose(Y.numpy()[:out_live], expected, rtol=3e-6, atol=1e-9)
    assert (Y.numpy()[out_live:] == LEFT).all()
    A, S = planes(out_m, k, out_p)
    kernels(arch)[f"norm{chunk}_{row}_1"](state(live), tensor(x), tensor(g), A, S)
    check_planes(A, S, expected, out_live)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("single", SINGLE)
@pytest.mark.parametrize("chunk", range(1, len(CHUNKS)))
def test_norm_of_answers(arch, chunk, single):
    """The single rows, and the last row of the chunk after them, as far as there is room."""
    m, k, p, most = CHUNKS[chunk]
    x, g = rows_of(m, k), np.random.default_rng(9).standard_normal(k).astype(np.float32)
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS) * g
    for live in (single + 1, most):
        expected = normed[[*range(single), live - 1]][:ANSWERS]
        Y = tensor(np.full((ANSWERS, k), LEFT, np.float32))
        kernels(arch)[f"norm{chunk}_answers_0"](state(live, single), tensor(x), tensor(g), Y)
        np.testing.assert_allclose(Y.numpy()[: len(expected)], expected, rtol=3e-6, atol=1e-9)
        assert (Y.numpy()[len(expected) :] == LEFT).all()
        A, S = planes(ANSWERS, k, min(ANSWERS, p))
        kernels(arch)[f"norm{chunk}_answers_1"](state(live, single), tensor(x), tensor(g), A, S)
        check_planes(A, S, expected, len(expected))


@pytest.mark.parametrize("arch", ARCHS)
def test_single_rows_without_a_chunk(arch):
    x, g, single = rows_of(16, 256), np.ones(256, np.float32), 3
    Y = tensor(np.full((ANSWERS, 256), LEFT, np.float32))
    kernels(arch)["norm1_answers_0"](state(single, single), tensor(x), tensor(g), Y)
    wide = x[:single].astype(np.float64)
    expected = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + EPS)
    np.testing.assert_allclose(Y.numpy()[:single], expected, rtol=3e-6, atol=1e-9)
    assert (Y.numpy()[single:] == LEFT).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("chunk", range(len(CHUNKS)))
def test_layer_norm(arch, chunk, quantized):
    """With a mean beside which the deviation is small; with a bias where results are quantized."""
    m, k, p, live = CHUNKS[chunk]
    rng = np.random.default_rng(m)
    x, g, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), k, k))
    x += 5
    z = x.astype(np.float64)
    z -= z.mean(-1, keepdims=True)
    expected = (z / np.sqrt((z * z).mean(-1, keepdims=True) + EPS) * g)[:live]
    if quantized:
        A, S = planes(m, k, p)
        kernels(arch)[f"layer_norm{chunk}_1"](state(live), tensor(x), tensor(g), tensor(b), A, S)
        check_planes(A, S, expected + b, live)
        return
    Y = tensor(np.full((m, k), LEFT, np.float32))
    kernels(arch)[f"layer_norm{chunk}_0"](state(live), tensor(x), tensor(g), Y)
    np.testing.assert_allclose(Y.numpy()[:live], expected, rtol=1e-5, atol=2e-5)
    assert (Y.numpy()[live:] == LEFT).all()


@pytest.mark.parametrize(("arch", "fmt"), EMBEDS)
def test_embed(arch, fmt):
    planes, table = gguf_blocks.weights(fmt, VOCAB, COLUMNS, 3, "tile16")
    weights = [tensor(plane) for plane in planes.values()]
    chunks = [(EMBED_M, 4, [0, 17, 36, 16, 5]), (EMBED_M, 5, [-1, VOCAB, 2**31 - 1, -(2**31), 20])]
    for m, live, tokens in [(1, 1, [36])] * (fmt in ONE_TOKEN) + chunks:
        X = tensor(np.full((m, COLUMNS), LEFT, np.float32))
        kernels(arch)[f"embed_{fmt}_{m}"](state(live), tensor(np.array(tokens, np.int32)), *weights, X)
        assert (X.numpy()[:live] == table[np.clip(tokens, 0, VOCAB - 1)[:live]]).all()
        assert (X.numpy()[live:] == LEFT).all()


def test_embed_of_a_float_table_takes_any_number_of_columns():
    table = np.random.default_rng(4).standard_normal((VOCAB, ODD_COLUMNS)).astype(np.float32)
    weights = [tensor(plane) for plane in repack("f32", table.view(np.uint8), ODD_COLUMNS).values()]
    X, tokens = tensor(np.zeros((EMBED_M, ODD_COLUMNS), np.float32)), np.array([3, 36, 0, 17, 16], np.int32)
    kernels(ARCHS[-1])["embed_odd"](state(EMBED_M), tensor(tokens), *weights, X)
    assert (X.numpy() == table[tokens]).all()


def test_embed_scales_rows():
    planes, table = gguf_blocks.weights("q4_k", VOCAB, COLUMNS, 5, "tile16")
    weights = [tensor(plane) for plane in planes.values()]
    X, tokens = tensor(np.zeros((EMBED_M, COLUMNS), np.float32)), np.array([3, 36, 0, 17, 16], np.int32)
    kernels(ARCHS[-1])["embed_scaled"](state(EMBED_M), tensor(tokens), *weights, X)
    np.testing.assert_allclose(X.numpy(), table[tokens] * np.float32(SCALE), rtol=1e-6)


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="multiple of 32"):
        quantize(Quantize(k=40, m=1, layout="tiles"), resolve("native"), "quantize")
    with pytest.raises(UserError, match="multiple of 32"):
        norm(RmsNorm(k=40, m=1, eps=EPS, layout="", rows="all"), resolve("native"), "norm")
