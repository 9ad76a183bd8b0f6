"""Writes and reads packed weights: safetensors, with every tensor at a multiple of 64 bytes (dist/README.md)."""

import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypedDict

import numpy as np
from msgspec import Meta

from mlc_amd.runtime.artifact import json_files
from mlc_amd.runtime.artifact.weight_block import ALIGN, NUMPY, PAD, TensorSpec, WeightBlock, header_entry
from mlc_amd.runtime.errors import UserError, shorten

ADVICE = "compile the model again"


class WeightsWriter:
    """Writes a safetensors file. The layout is fixed first; then pieces are written in any order. Safetensors allows no
    holes, so alignment gaps are tensors named `__pad_<n>`."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec]):
        self.offsets, header, position = {}, {}, 0
        for spec in specs:
            if gap := -position % ALIGN:
                header[f"{PAD}{len(header)}"] = header_entry("uint8", [gap], position)
                position += gap
            header[spec.name] = header_entry(spec.dtype, spec.shape, position)
            self.offsets[spec.name] = position
            position += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        self.start, self.total = 8 + len(text), position
        self.file = open(path, "w+b")  # noqa: SIM115 (closed by close())
        self.file.write(struct.pack("<Q", len(text)) + text)
        # Allocated now, so that a full disk is reported before minutes of work.
        if position:
            os.posix_fallocate(self.file.fileno(), self.start, position)

    def write(self, name: str, offset: int, data: np.ndarray) -> None:
        """Writes `data` at offset `offset`, in bytes, of tensor `name`. Thread-safe."""
        at = self.start + self.offsets[name] + offset
        os.pwrite(self.file.fileno(), np.ascontiguousarray(data).data.cast("B"), at)

    def close(self) -> None:
        self.file.close()


class Weights(WeightBlock):
    """The weights file. Indexing returns a tensor as a numpy array in the mapped file, without a copy, for devices that
    compute in host memory; `read` is for devices with their own memory. The mapping is private: arrays are writable,
    but the file does not change. Raises UserError for a damaged file."""

    def __init__(self, path: Path):
        with json_files.open_file(path) as f:
            data = _header(f, path)
            self.start = 8 + len(data)
            header = json_files.decode(data, dict[str, _Entry], path, ADVICE)
            if wrong := _fault(header, os.fstat(f.fileno()).st_size - self.start):
                raise UserError(f"{path} is damaged ({wrong}); {ADVICE}")
            self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            self._path, self._file = path, os.dup(f.fileno())
        weakref.finalize(self, os.close, self._file)
        super().__init__({name: dict(entry) for name, entry in header.items()})

    def read(self, at: int, target: np.ndarray, keep: bool = True) -> None:
        begin, done = self.start + at, 0
        while done < target.nbytes:
            try:
                count = os.preadv(self._file, [target[done:].data], begin + done)
            except OSError as e:
                raise UserError(f"cannot read {self._path} ({e.strerror}); {ADVICE}") from e
            if not count:
                raise UserError(f"{self._path} was cut off after it was opened; {ADVICE}")
            done += count
        if not keep:
            # From the file's beginning: pages at the borders of pieces stay while a neighbour is being read.
            os.posix_fadvise(self._file, 0, begin + done, os.POSIX_FADV_DONTNEED)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._view(self.map, self.start, name)


def header_digest(path: Path) -> str:
    """SHA-256 of a file's header. Raises UserError if the header is incomplete."""
    with json_files.open_file(path) as file:
        return hashlib.sha256(_header(file, path)).hexdigest()


def _header(file: BinaryIO, path: Path) -> bytes:
    size, end = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if not 0 < size <= min(end - 8, json_files.LARGEST):
        raise UserError(f"{path} is damaged (it ends within its header); {ADVICE}")
    return file.read(size)


class _Entry(TypedDict):
    dtype: Literal["U8", "I8", "F16", "U16", "F32", "I32", "U32"]
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 40)]], Meta(max_length=8)]
    data_offsets: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 50)]], Meta(min_length=2, max_length=2)]


def _fault(header: Mapping[str, _Entry], nbytes: int) -> str:
    """The error of a header for `nbytes` bytes of tensors, which must be contiguous; "" if there is none."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        where = f"tensor {shorten(name)}"
        if begin != end:
            return f"{where} begins at byte {begin} instead of {end}"
        if stop - begin != prod(entry["shape"]) * NUMPY[entry["dtype"]].itemsize:
            return f"{where} has {stop - begin} bytes for {entry['dtype']} {shorten(entry['shape'])}"
        if begin % ALIGN and not name.startswith(PAD):
            return f"{where} begins at byte {begin}, which is no multiple of {ALIGN}"
        end = stop
    return "" if end == nbytes else f"its tensors take {end} bytes, the file has {nbytes} for them"
