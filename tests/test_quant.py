"""Repacked weights are the GGUF's weights: for every format, GGUF blocks -> planes -> `decode` compiled by TVM ==
gguf-py, bit for bit."""

import functools

import gguf
import numpy as np
import pytest
import tvm
from tvm import te

from mlc_amd.compiler.quant import repack
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.planes import decode, dequantize, plane_bytes, planes
from mlc_amd.schedules.formats import FORMATS, by_gguf_type

# Byte offsets of the float16 numbers of a block. Random bits there would give NaNs and infinities, which no model
# holds.
HALVES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
    "iq4_nl": (0,),
    "iq4_xs": (0,),
}
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
    for offset in HALVES.get(name, ()):
        bits = raw[..., offset : offset + 2].view(np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] ^= np.uint16(0x4000)
    return raw.view(np.uint8).reshape(rows, -1)


def oracle(name: str, raw: np.ndarray) -> np.ndarray:
    """gguf-py's float32 [rows, K]."""
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


def test_unknown_type():
    assert by_gguf_type(gguf.GGMLQuantizationType.IQ1_S) is None
    with pytest.raises(UserError, match="q4_k"):
        planes("q9_z", 16, 256)


def test_bad_shapes():
    with pytest.raises(UserError, match="multiple of 256"):
        planes("q4_k", 16, 128)
    with pytest.raises(UserError, match="columns of q4_0"):
        repack("q4_0", np.zeros((16, 18), np.uint8), 64)
