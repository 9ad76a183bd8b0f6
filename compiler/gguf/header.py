"""Parses the header of a GGUF file defensively: metadata and tensor directory.

In: the first bytes of a file. Out: `Header`: metadata as plain Python values, and the location of each tensor.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

`gguf.GGUFReader` is not used because it creates a NumPy view for every array element (7 s for a vocabulary of 150 000
tokens, 0.2 s here), and on damaged input raises arbitrary exceptions or allocates excessive memory. Here every length
is checked against the remaining bytes before anything is read, so damaged input always ends in a `UserError`.
"""

import struct
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUF_VERSION, GGUFValueType

from mlc_amd.compiler.gguf import foreign
from mlc_amd.runtime.errors import UserError, shorten

HEADER_LIMIT = 64 << 20  # bytes; the largest real headers (vocabularies of 262 144 tokens with merges) take 16 MiB
ARRAY_LIMIT = 1 << 22  # elements of a metadata array
NAME_LIMIT = 64  # bytes of a tensor name, GGML_MAX_NAME
KEY_LIMIT = 1 << 16  # bytes of a metadata key
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
FETCH_AGAIN = "the file is truncated or damaged: download or convert it again"

_SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorEntry:
    """An entry of a file's tensor directory."""

    name: str
    gguf_type: int  # GGMLQuantizationType, not checked here
    shape: tuple[int, ...]  # numpy order: GGUF's dimensions reversed
    offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class Header:
    metadata: dict[str, object]  # scalars, strings and lists of them
    tensors: tuple[TensorEntry, ...]
    alignment: int  # bytes; every tensor's offset is a multiple of it, counted from the end of the header


def parse_header(data: memoryview, path: str) -> Header:
    """The header at the start of `data`. Raises UserError (beginning with `path`) if it is invalid, or does not end
    within `data`."""
    cursor = _Cursor(data, path)
    if len(data) < 4 or cursor.u32("the magic number") != GGUF_MAGIC:
        raise UserError(f"{path}: {foreign.problem(bytes(data[:512]))}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise UserError(
            f"{path}: this GGUF file is big-endian; convert it for little-endian machines (gguf-convert-endian)"
        )
    if version not in (2, GGUF_VERSION):
        raise UserError(
            f"{path}: GGUF version {version} is not supported (2 and {GGUF_VERSION} are); convert the model again"
        )
    tensors, pairs = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    cursor.check_count(pairs, 8 + 4 + 1, "metadata entries")
    cursor.check_count(tensors, 8 + 4 + 8 + 4 + 8, "tensors")

    metadata: dict[str, object] = {}
    for _ in range(pairs):
        key = cursor.string("a metadata key", KEY_LIMIT)
        if key in metadata:
            cursor.fail(f"metadata key {shorten(key)} appears twice")
        metadata[key] = cursor.value(key)
    entries, seen = [], set()
    for _ in range(tensors):
        entry = _tensor_entry(cursor)
        if entry.name in seen:
            cursor.fail(f"tensor {entry.name!r} appears twice")
        seen.add(entry.name)
        entries.append(entry)

    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {shorten(alignment)}, not a power of two")
    for entry in entries:
        if entry.offset % alignment:
            cursor.fail(f"tensor {entry.name!r} is not aligned to {alignment} bytes")
    start = -(-cursor.position // alignment) * alignment
    return Header(metadata, tuple(replace(entry, offset=start + entry.offset) for entry in entries), alignment)


def _tensor_entry(cursor: "_Cursor") -> TensorEntry:
    """The next entry of the tensor directory. Its offset counts from the start of the tensor data."""
    name = cursor.string("a tensor name", NAME_LIMIT)
    n_dims = cursor.u32(f"tensor {name!r}")
    if not 1 <= n_dims <= MAX_DIMENSIONS:
        cursor.fail(f"tensor {name!r} has {n_dims} dimensions (1 to {MAX_DIMENSIONS} are possible)")
    dims = [cursor.u64(f"tensor {name!r}") for _ in range(n_dims)]
    if min(dims) < 1 or max(dims) >= 1 << 48:
        cursor.fail(f"tensor {name!r} has the impossible dimensions {dims}")
    gguf_type = cursor.u32(f"tensor {name!r}")
    return TensorEntry(name, gguf_type, tuple(reversed(dims)), cursor.u64(f"tensor {name!r}"))


class _Cursor:
    """A position in a header. Every read is checked against the remaining bytes; `fail` raises the UserError."""

    def __init__(self, data: memoryview, path: str):
        self.data, self.path, self.position = data, path, 0
        self.end = min(len(data), HEADER_LIMIT)

    def fail(self, problem: str) -> NoReturn:
        raise UserError(f"{self.path}: {problem}; {FETCH_AGAIN}")

    def check_count(self, count: int, minimum: int, what: str) -> None:
        """Fails if `count` items of at least `minimum` bytes each do not fit into the remaining bytes."""
        if count * minimum > self.end - self.position:
            self.fail(f"the header announces {count} {what}, more than it can hold")

    def skip(self, size: int, what: str) -> int:
        """Moves past `size` bytes and returns where they start."""
        start = self.position
        if size > self.end - start:
            self.fail(f"the header ends inside {what}")
        self.position = start + size
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.skip(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.skip(8, what))[0]

    def string(self, what: str, limit: int = HEADER_LIMIT) -> str:
        size = self.u64(what)
        if size > limit:
            self.fail(f"{what} is {size} bytes long")
        start = self.skip(size, what)
        try:
            return str(self.data[start : self.position], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")

    def value(self, key: str) -> object:
        what = f"metadata key {shorten(key)}"
        kind = self._kind(self.u32(what), what)
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1, what)[0]
        kind, count = self._kind(self.u32(what), what), self.u64(what)
        if kind == GGUFValueType.ARRAY:
            self.fail(f"{what} is an array of arrays")
        if count > ARRAY_LIMIT:
            self.fail(f"{what} is an array of {count} elements")
        return self._strings(count, what) if kind == GGUFValueType.STRING else self._scalars(kind, count, what)

    def _kind(self, number: int, what: str) -> GGUFValueType:
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{what} has the unknown value type {number}")

    def _scalars(self, kind: GGUFValueType, count: int, what: str) -> list:
        dtype = _SCALARS[kind]
        start = self.skip(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).tolist()

    def _strings(self, count: int, what: str) -> list[str]:
        # Most of the time to open a file is spent here, so `string` is inlined.
        self.check_count(count, 8, f"strings in {what}")
        data, end, position, unpack, strings = self.data, self.end, self.position, _U64.unpack_from, []
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    self.fail(f"the header ends inside {what}")
                position = start + unpack(data, position)[0]
                if position > end:
                    self.fail(f"the header ends inside {what}")
                strings.append(str(data[start:position], "utf-8"))
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8")
        self.position = position
        return strings
