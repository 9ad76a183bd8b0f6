"""Files of weights that are damaged, or that another program wrote: one line each, and nothing is mapped."""

import ctypes
import json
import mmap
import os
import struct

import numpy as np
import pytest

from mlc_amd.runtime.artifact.weight_block import TensorSpec
from mlc_amd.runtime.artifact.weights_file import Weights, WeightsWriter, header_digest
from mlc_amd.runtime.errors import UserError


@pytest.fixture
def file(tmp_path):
    writer = WeightsWriter(tmp_path / "w", [TensorSpec("a", "float16", (32,)), TensorSpec("b", "int32", (4, 4))])
    writer.write("b", 0, np.arange(16, dtype=np.int32))
    writer.close()
    return tmp_path / "w"


def header_of(file) -> dict:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def with_header(file, header, size=None) -> None:
    """The same tensors after another header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + bytes(128))


def test_what_was_written_is_read(file):
    assert np.array_equal(Weights(file)["b"], np.arange(16).reshape(4, 4))
    with_header(file, header_of(file))
    assert not Weights(file)["b"].any()


def test_a_part_is_read_and_a_file_that_is_cut_off_meanwhile_is_an_error(file):
    weights, found = Weights(file), np.zeros(98, np.uint8)
    weights.read(30, found, keep=False)
    assert found[34:].copy().view(np.int32).tolist() == list(range(16))
    os.truncate(file, file.stat().st_size - 20)
    with pytest.raises(UserError, match="was cut off after it was opened; compile the model again"):
        weights.read(30, found)


def test_a_file_that_is_not_to_be_kept_leaves_the_systems_cache(tmp_path):
    values = np.arange(1 << 20, dtype=np.int32)
    writer = WeightsWriter(tmp_path / "w", [TensorSpec("a", "int32", values.shape)])
    writer.write("a", 0, values)
    os.fsync(writer.file.fileno())
    writer.close()
    weights, found = Weights(tmp_path / "w"), np.zeros(values.nbytes, np.uint8)

    def is_cached() -> bool:  # mincore, as a read would have the system read ahead
        with open(tmp_path / "w", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            start, found = np.frombuffer(pages, np.uint8), (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
            assert (
                ctypes.CDLL(None).mincore(ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(len(pages)), found) == 0
            )
            del start
        return bool(found[len(found) // 2] & 1)

    # Where the system does not drop a file that was asked to be, it is memory.
    os.posix_fadvise(weights._file, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached():
        pytest.skip("this file system is memory")
    weights.read(0, found)
    assert is_cached() and np.array_equal(found.view(np.int32), values)
    weights.read(0, found, keep=False)
    assert not is_cached()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("a", "dtype"), "F64", r"key \['a'\].dtype: invalid enum value 'F64'"),
        (("a", "dtype"), "F32", "tensor 'a' has 64 bytes for F32"),
        (("a", "dtype"), 3, r"key \['a'\].dtype: expected str, got int"),
        (("b", "shape"), [4, -4], r"key \['b'\].shape\[1\]: expected int >= 0"),
        (("b", "shape"), [4, 5], "tensor 'b' has 64 bytes for I32"),
        (("b", "shape"), [1 << 40] * 8, "tensor 'b' has 64 bytes"),
        (("b", "data_offsets"), [0, 64], "begins at byte 0 instead of 64|begins at byte 64 instead of 0"),
        (("b", "data_offsets"), [65, 129], "begins at byte 65 instead of 64"),
        (("b", "data_offsets"), [64], "length"),
        (("b", "data_offsets"), [64, 10**30], "expected int <="),
        (("b",), None, r"key \['b'\]: expected object, got null"),
        (("c",), {"dtype": "U8", "shape": [1], "data_offsets": [128, 129]}, "take 129 bytes, the file has 128"),
    ],
)
def test_wrong_headers(file, place, value, message):
    header = header_of(file)
    inside = header
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with_header(file, header)
    with pytest.raises(UserError, match=message) as error:
        Weights(file)
    assert "\n" not in str(error.value) and str(file) in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"\0" * 8),
        lambda file: file.write_bytes(b"\xff" * 300),
        lambda file: with_header(file, b"[" * 100_000),
        lambda file: with_header(file, b"{}"),
        lambda file: with_header(file, b"\xff\xfe"),
        lambda file: with_header(file, b"{}", 1 << 60),
        lambda file: os.truncate(file, 100),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: (file.unlink(), file.mkdir()),
    ],
)
def test_damage(file, damage):
    damage(file)
    with pytest.raises(UserError, match=r"is damaged|is not a file") as error:
        Weights(file)
    assert "\n" not in str(error.value)


def test_the_header_has_a_checksum(file):
    before = header_digest(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert header_digest(file) == before
    data[data.index(b"F16")] ^= 1
    file.write_bytes(data)
    assert header_digest(file) != before
