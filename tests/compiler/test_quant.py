"""Repacked weights are the GGUF's weights: for every format, GGUF blocks -> planes -> `decode` compiled by TVM ==
gguf-py, bit for bit."""

import functools

import gguf
import gguf_blocks
import numpy as np
import pytest
import tvm
from tvm import te

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.quant import repack
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.linear.planes import decode, dequantize, plane_bytes, planes
from mlc_amd.schedules.formats import FORMATS, by_gguf_type

K = 512


def random_rows(name: str, rows: int, seed: int = 0) -> np.ndarray:
    """Random GGUF rows of K columns, uint8 [rows, bytes]: every bit random, but float exponents that would mean NaN or
    infinity."""
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, K // fmt.block, fmt.block_bytes), np.uint8)
    if name == "f32":
        raw = rng.standard_normal((rows, K), np.float32)
    elif fmt.kind == "float":
        exponent = {"f16": 0x7C00, "bf16": 0x7F80}[name]
        bits = raw.view(np.uint16)
        bits[(bits & exponent) == exponent] ^= np.uint16(0x4000)
    gguf_blocks.set_halves(name, raw, lambda: finite(rng.integers(0, 1 << 16, (*raw.shape[:2], 1), np.uint16)))
    return raw.view(np.uint8).reshape(rows, -1)


def finite(bits: np.ndarray) -> np.ndarray:
    """Bits of float16 without those of NaNs and infinities, which no model holds."""
    return np.where((bits & 0x7C00) == 0x7C00, bits ^ np.uint16(0x4000), bits)


def edge_rows(name: str) -> np.ndarray:
    """Five GGUF rows of blocks of equal bytes, with zeros, the smallest and the largest float16 as scales."""
    fmt = FORMATS[name]
    raw = np.repeat(np.uint8([0x00, 0xFF, 0x80, 0x7F, 0x55]), K // fmt.block * fmt.block_bytes)
    raw = raw.reshape(5, -1, fmt.block_bytes)
    extremes = np.uint16([0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF])
    gguf_blocks.set_halves(name, raw, lambda: np.resize(extremes, (*raw.shape[:2], 1)))
    return raw.reshape(5, -1)


def oracle(name: str, raw: np.ndarray) -> np.ndarray:
    """gguf-py's float32 [rows, K]."""
    with np.errstate(over="ignore"):  # mxfp4's largest scales
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(FORMATS[name].gguf_type)).reshape(len(raw), K)


@functools.cache
def decoder(name: str, rows: int):
    return tvm.compile(dequantize(name, rows, K), target="llvm")["dequantize"]


def decoded(name: str, parts: dict[str, np.ndarray], rows: int) -> np.ndarray:
    out = tvm.runtime.tensor(np.full((rows, K), np.nan, np.float32))
    decoder(name, rows)(*(tvm.runtime.tensor(p) for p in parts.values()), out)
    return out.numpy()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [5, 1003])
def test_decode_is_gguf_bit_for_bit(name, rows):
    raw = random_rows(name, rows, seed=rows)
    parts = repack(name, raw, K)
    assert {p: (a.shape, str(a.dtype)) for p, a in parts.items()} == planes(name, rows, K)
    assert list(parts) == list(planes(name, rows, K)), "kernels take the planes in this order"
    assert sum(a.nbytes for a in parts.values()) == plane_bytes(name, rows, K)
    ours, theirs = decoded(name, parts, rows), oracle(name, raw)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.kind == "int8"])
def test_extreme_blocks(name):
    raw = edge_rows(name)
    ours = decoded(name, repack(name, raw, K), 5)
    np.testing.assert_array_equal(ours.view(np.uint32), oracle(name, raw).view(np.uint32))


def test_experts_are_one_matrix():
    """A stack of matrices, in the type that mixtures of experts have, is packed as its rows one after the other."""
    experts = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": K}
    model = synthetic("tiny:mxfp4", keys={"general.architecture": "qwen3moe"} | experts)
    tensor = model.tensors["blk.0.ffn_down_exps.weight"]
    assert (tensor.format, tensor.shape, model.tensors["blk.0.attn_q.weight"].format) == ("mxfp4", (2, 256, K), "q8_0")
    ours = decoded("mxfp4", repack("mxfp4", tensor.blocks(), K), 512)
    np.testing.assert_array_equal(ours.view(np.uint32), tensor.dequantize().view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_decode_in_tensor_expressions(name):
    """The same expression in te.compute, with the int64 indices that Relax uses."""
    raw = random_rows(name, 32)
    bufs = {p: te.placeholder(shape, dtype, p) for p, (shape, dtype) in planes(name, 32, K).items()}
    shape = (tvm.tirx.const(32, "int64"), tvm.tirx.const(K, "int64"))
    weights = te.compute(shape, lambda n, k: decode(name, bufs, n, k))
    built = tvm.compile(te.create_prim_func([*bufs.values(), weights]), target="llvm")
    out = tvm.runtime.tensor(np.empty((32, K), np.float32))
    built["main"](*(tvm.runtime.tensor(p) for p in repack(name, raw, K).values()), out)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), oracle(name, raw).view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_padding_is_zero(name):
    parts = repack(name, random_rows(name, 37), K)
    weights = decoded(name, parts, 48)
    assert np.all(weights[37:] == 0)
    assert np.any(weights[36] != 0)
    for p in set(parts) - set(FORMATS[name].codes):
        lanes = parts[p][-1].reshape(-1, 16)
        assert not lanes[:, 5:].any(), f"plane {p}"
    for p in FORMATS[name].codes:
        groups = parts[p][-1].reshape(-1, 16, 4)
        assert not groups[:, 5:].any(), f"plane {p}"


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_concatenate(name, monkeypatch):
    raw = random_rows(name, 101)
    whole = repack(name, raw, K)
    chunks = [repack(name, raw[start : start + 32], K) for start in range(0, 101, 32)]
    monkeypatch.setattr("mlc_amd.compiler.quant.pack.PIECE", 1)  # pieces of one row tile inside a call
    pieces = repack(name, raw, K)
    for p, plane in whole.items():
        np.testing.assert_array_equal(plane.view(np.uint8), np.concatenate([c[p] for c in chunks]).view(np.uint8))
        np.testing.assert_array_equal(plane.view(np.uint8), pieces[p].view(np.uint8))


def test_input_may_be_a_readonly_view():
    """GGUF tensors are slices of a mapped file."""
    raw = random_rows("q6_k", 64)
    raw.flags.writeable = False
    wide = np.concatenate([raw, raw], axis=1)[:, : raw.shape[1]]
    for p, plane in repack("q6_k", wide, K).items():
        np.testing.assert_array_equal(plane, repack("q6_k", raw, K)[p])


@pytest.mark.parametrize("name", FORMATS)
def test_table_agrees_with_gguf(name):
    fmt = FORMATS[name]
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert fmt.gguf_type == kind
    assert (fmt.block, fmt.block_bytes) == gguf.constants.GGML_QUANT_SIZES[kind]
    assert by_gguf_type(kind) is fmt


def test_every_type_that_gguf_decodes_is_supported():
    decoded = {kind for kind in gguf.GGMLQuantizationType if gguf_decodes(kind)}
    assert decoded == {fmt.gguf_type for fmt in FORMATS.values()}


def gguf_decodes(kind: gguf.GGMLQuantizationType) -> bool:
    _, size = gguf.constants.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def test_unknown_type():
    assert by_gguf_type(gguf.GGMLQuantizationType.Q8_K) is None
    with pytest.raises(UserError, match="q4_k"):
        planes("q9_z", 16, 256)


def test_bad_shapes():
    with pytest.raises(UserError, match="multiple of 256"):
        planes("q4_k", 16, 128)
    with pytest.raises(UserError, match="columns of q4_0"):
        repack("q4_0", np.zeros((16, 18), np.uint8), 64)
