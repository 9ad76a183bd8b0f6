"""Weights as one block of bytes, from a file or random. Devices take weights in this form."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

ALIGN = 64  # bytes: alignment for vector loads
PAD = "__pad_"  # prefix of the names of tensors that only fill gaps
# numpy dtype to its name in safetensors
DTYPES = {"uint8": "U8", "int8": "I8", "float16": "F16", "uint16": "U16", "float32": "F32"}
DTYPES |= {"int32": "I32", "uint32": "U32"}
NUMPY = {name: np.dtype(dtype) for dtype, name in DTYPES.items()}


def byte_count(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return prod(shape) * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)


def header_entry(dtype: str, shape: Sequence[int], begin: int) -> dict[str, Any]:
    """The entry of a tensor in a safetensors header."""
    return {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, begin + byte_count(dtype, shape)]}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the weights file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return byte_count(self.dtype, self.shape)


class WeightBlock(ABC):
    """All weights as one block of bytes, which devices map or copy. header: as in safetensors, {name: {"dtype",
    "shape", "data_offsets": [begin, end]}}, with offsets into the block. Every tensor begins at a multiple of 64 bytes.
    total: size of the block in bytes."""

    def __init__(self, header: dict[str, dict]):
        self.header = header
        self.total: int = max((entry["data_offsets"][1] for entry in header.values()), default=0)

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Tensor name to (offset in the block, bytes), without padding."""
        spans = {name: entry["data_offsets"] for name, entry in self.header.items() if not name.startswith(PAD)}
        return {name: (begin, end - begin) for name, (begin, end) in spans.items()}

    @abstractmethod
    def read(self, at: int, target: np.ndarray, keep: bool = True) -> None:
        """Fills `target`, uint8, with the bytes of the block from offset `at` on. Bytes of gaps between tensors may be
        left unchanged. Thread-safe. keep: whether the system may keep in memory what it reads from a file. Raises
        UserError if a file cannot be read."""

    @abstractmethod
    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor as an array in this memory, for devices that compute in host memory."""

    def _view(self, memory: mmap.mmap, start: int, name: str) -> np.ndarray:
        """A tensor as an array in `memory`, where the block begins at `start`."""
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(memory, np.uint8, end - begin, start + begin)
        return raw.view(NUMPY[entry["dtype"]]).reshape(entry["shape"])


class JoinedBlocks(WeightBlock):
    """Several blocks, one after the other."""

    def __init__(self, parts: Sequence[WeightBlock]):
        header, starts, end = {}, [], 0
        for part in parts:
            start = -(-end // ALIGN) * ALIGN
            starts.append(start)
            for name, entry in part.header.items():
                begin, stop = entry["data_offsets"]
                if not name.startswith(PAD):
                    header[name] = entry | {"data_offsets": [start + begin, start + stop]}
            end = start + part.total
        super().__init__(header)
        self._parts = list(zip(starts, parts, strict=True))

    def read(self, at: int, target: np.ndarray, keep: bool = True) -> None:
        for start, part in self._parts:
            first, last = max(at, start), min(at + target.nbytes, start + part.total)
            if first < last:
                part.read(first - start, target[first - at : last - at], keep)

    def __getitem__(self, name: str) -> np.ndarray:
        return next(part for _, part in self._parts if name in part.header)[name]
