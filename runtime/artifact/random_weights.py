"""Random weights for artifacts without weights. Benchmarks need right shapes and finite numbers, no trained model.

In: the manifest's `tensors`, {name: {"dtype", "shape", "draw"}}, and the file with the vectors (norms, biases). Out:
`RandomWeights`, which devices use like the weights file. A draw is the distribution of a plane:

    ["bits"]                      every bit at random
    ["integers", low, count]      low .. low + count - 1 evenly; count is a power of two
    ["either", low, share]        low + 1 with probability `share`, otherwise low
    ["signs", factor]             factor * +-(0.75 .. 1.25)
    ["normal", deviation]         a normal distribution around 0

Filling gigabytes must not take longer than copying them. So one block of each draw is made, and each plane repeats it
from its own offset. The number of 64-byte lines of a block is prime, so that the repetitions in codes and in scales
never coincide, nor coincide with the rows of a matrix. Only the "signs" planes of one tensor have the same offset,
because minimums must correspond to scales value by value.
"""

import functools
import mmap
import threading
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from mlc_amd.runtime.artifact.weight_block import ALIGN, WeightBlock, header_entry
from mlc_amd.runtime.errors import shorten

# primes; lines of a block of random bits (64 MiB), and of other blocks (4 MiB)
BITS_LINES, VALUE_LINES = 1_048_573, 65_521


class RandomWeights(WeightBlock):
    """The weights. In the block, the vectors come first, then the matrices."""

    def __init__(self, vectors: WeightBlock, matrices: Mapping[str, Mapping]):
        header, position = dict(vectors.header), vectors.total
        for name, entry in matrices.items():
            header[name] = header_entry(entry["dtype"], entry["shape"], position + -position % ALIGN)
            position = header[name]["data_offsets"][1]
        super().__init__(header)
        self._vectors, self._matrices = vectors, [*matrices.items()]
        self._ends = [header[name]["data_offsets"][1] for name in matrices]  # ascending
        self._filled: mmap.mmap | None = None
        self._drawn, self._lock = functools.cache(draw), threading.Lock()

    def read(self, at: int, target: np.ndarray, keep: bool = True) -> None:
        if at < self._vectors.total:
            self._vectors.read(at, target[: self._vectors.total - at], keep)
        for i in range(bisect_right(self._ends, at), len(self._ends)):
            name, entry = self._matrices[i]
            begin, end = self.header[name]["data_offsets"]
            first, last = max(at, begin), min(at + target.nbytes, end)
            if first >= last:
                break
            self._fill(name, entry, first - begin, target[first - at : last - at])

    def _fill(self, name: str, entry: Mapping, begin: int, target: np.ndarray) -> None:
        """Fills `target` with the bytes of a matrix from `begin` on."""
        with self._lock:  # so that threads do not make the same block several times
            pattern = self._drawn(entry["dtype"], *entry["draw"])
        place = name.split("/")[0] if entry["draw"][0] == "signs" else name
        source, done = (zlib.crc32(place.encode()) * ALIGN + begin) % pattern.nbytes, 0
        while done < target.nbytes:
            count = min(target.nbytes - done, pattern.nbytes - source)
            target[done : done + count] = pattern[source : source + count]
            done, source = done + count, 0

    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor, for devices that use this memory. The first call fills the whole block."""
        if self._filled is None:
            self._filled = mmap.mmap(-1, max(self.total, 1))
            self.read(0, np.frombuffer(self._filled, np.uint8))
        return self._view(self._filled, 0, name)


def draw(dtype: str, kind: str, *parameters: float) -> np.ndarray:
    """uint8 [bytes], read-only: the block that planes with this draw repeat."""
    # The seed is the kind: kinds are independent, but draws of one kind that differ in the factor are proportional.
    rng = np.random.Generator(np.random.SFC64(zlib.crc32(kind.encode())))
    pattern = _DRAWS[kind](rng, np.dtype(dtype), *parameters).view(np.uint8)
    pattern.flags.writeable = False
    return pattern


def _bits(rng: np.random.Generator, dtype: np.dtype) -> np.ndarray:
    return rng.integers(0, 1 << 64, BITS_LINES * ALIGN // 8, np.uint64, endpoint=False)


def _integers(rng: np.random.Generator, dtype: np.dtype, low: int, count: int) -> np.ndarray:
    return (rng.integers(0, count, VALUE_LINES * ALIGN // dtype.itemsize) + low).astype(dtype)


def _either(rng: np.random.Generator, dtype: np.dtype, low: int, share: float) -> np.ndarray:
    return (rng.random(VALUE_LINES * ALIGN // dtype.itemsize, np.float32) < share).astype(dtype) + dtype.type(low)


def _signs(rng: np.random.Generator, dtype: np.dtype, factor: float) -> np.ndarray:
    values = rng.random(VALUE_LINES * ALIGN // dtype.itemsize, np.float32) - np.float32(0.5)
    return (np.copysign(0.75 + np.abs(values), values) * np.float32(factor)).astype(dtype)


def _normal(rng: np.random.Generator, dtype: np.dtype, deviation: float) -> np.ndarray:
    values = rng.standard_normal(VALUE_LINES * ALIGN // dtype.itemsize, np.float32) * np.float32(deviation)
    # bfloat16 is the upper half of a float32
    return (values.view(np.uint32) >> 16 if dtype == np.uint16 else values).astype(dtype)


_DRAWS = {"bits": _bits, "integers": _integers, "either": _either, "signs": _signs, "normal": _normal}
_PARAMETERS = {"bits": 0, "integers": 2, "either": 2, "signs": 1, "normal": 1}
_LARGEST = 1 << 16  # largest parameter of a draw: float16 must hold it


def draw_fault(dtype: str, draw: Sequence) -> str:
    """The error of an untrusted draw for tensors of that dtype; "" if there is none."""
    kind, *parameters = draw
    if kind not in _DRAWS or len(parameters) != _PARAMETERS[kind]:
        return f"{shorten(draw)} is none of {', '.join(_DRAWS)} with its parameters"
    if not all(isinstance(number, int | float) and abs(number) <= _LARGEST for number in parameters):
        return f"{shorten(draw)} has parameters that are no numbers up to {_LARGEST}"
    if kind == "integers" and not (all(type(number) is int for number in parameters) and parameters[1] >= 1):
        return f"{shorten(draw)} has no range of integers"
    if kind in ("integers", "either") and np.dtype(dtype).kind in "ui":
        limits, low = np.iinfo(dtype), parameters[0]
        last = low + (parameters[1] - 1 if kind == "integers" else 1)
        if type(low) is not int or not limits.min <= low <= last <= limits.max:
            return f"{shorten(draw)} is out of the range of {dtype}"
    return ""
