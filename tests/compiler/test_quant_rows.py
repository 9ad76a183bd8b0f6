"""Weights repacked in the GPU's layout are the GGUF's: GGUF blocks -> planes -> `decode` compiled by TVM == gguf-py,
bit for bit."""

import functools

import gguf
import numpy as np
import pytest
import tvm
from tvm import te

from mlc_amd.compiler.quant import repack
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.gpu.base.planes import decode, planes

K = 512


def random_rows(name: str, rows: int, k: int = K, seed: int = 0) -> np.ndarray:
    """Random GGUF rows of k columns, uint8 [rows, bytes], without infinities and NaNs."""
    fmt, rng = FORMATS[name], np.random.default_rng(seed)
    if fmt.kind == "float":
        kind = gguf.GGMLQuantizationType(fmt.gguf_type)
        return gguf.quantize(rng.standard_normal((rows, k)).astype(np.float32), kind).view(np.uint8).reshape(rows, -1)
    raw = rng.integers(0, 256, (rows, k // fmt.block * fmt.block_bytes), np.uint8)
    raw.reshape(-1, 2)[:, 1] &= 0xBB  # no float16 with all exponent bits set, wherever scales lie
    return raw


def oracle(name: str, raw: np.ndarray) -> np.ndarray:
    """gguf-py's float32 weights."""
    with np.errstate(over="ignore"):  # mxfp4's largest scales
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(FORMATS[name].gguf_type)).reshape(len(raw), -1)


@functools.cache
def decoder(name: str, rows: int):
    """Compiled for the CPU, with the int64 indices that Relax uses."""
    bufs = {p: te.placeholder(shape, dtype, p) for p, (shape, dtype) in planes(name, rows, K).items()}
    shape = (tvm.tirx.const(rows, "int64"), tvm.tirx.const(K, "int64"))
    weights = te.compute(shape, lambda n, k: decode(name, bufs, n, k))
    return tvm.compile(te.create_prim_func([*bufs.values(), weights]), target="llvm")["main"]


def decoded(name: str, parts: dict[str, np.ndarray], rows: int) -> np.ndarray:
    out = tvm.runtime.tensor(np.full((rows, K), np.nan, np.float32))
    decoder(name, rows)(*(tvm.runtime.tensor(p) for p in parts.values()), out)
    return out.numpy()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [5, 259])
def test_decode_is_gguf_bit_for_bit(name, rows):
    raw = random_rows(name, rows, seed=rows)
    parts = repack(name, raw, K, "rows")
    assert {p: (a.shape, str(a.dtype)) for p, a in parts.items()} == planes(name, rows, K)
    assert list(parts) == list(planes(name, rows, K)), "kernels take the planes in this order"
    assert all(a.flags.c_contiguous for a in parts.values())
    ours, theirs = decoded(name, parts, rows), oracle(name, raw)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_padding_is_zero(name):
    parts = repack(name, random_rows(name, 37), K, "rows")
    assert all(a.shape[0] == 48 and not a[37:].any() and a[36].any() for a in parts.values())


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_concatenate(name, monkeypatch):
    raw = random_rows(name, 101)
    whole = repack(name, raw, K, "rows")
    chunks = [repack(name, raw[start : start + 32], K, "rows") for start in range(0, 101, 32)]
    monkeypatch.setattr("mlc_amd.compiler.quant.pack.PIECE", 1)  # pieces of one row tile inside a call
    pieces = repack(name, raw, K, "rows")
    for p, plane in whole.items():
        np.testing.assert_array_equal(plane, np.concatenate([c[p] for c in chunks]))
        np.testing.assert_array_equal(plane, pieces[p])


def test_bad_shapes():
    with pytest.raises(UserError, match="multiple of 256"):
        planes("q4_k", 16, 128)
    with pytest.raises(UserError, match="columns of q4_0"):
        repack("q4_0", np.zeros((16, 18), np.uint8), 64, "rows")
