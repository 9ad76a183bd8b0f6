"""A weight of a GGUF file, whose blocks are read on demand, and weights that are made of the rows of others.

In: a function that returns rows of blocks. Out: `Tensor`, with methods for the tensors that graphs use in place of the
file's: parts, transposed stacks, and rows and columns of zeros at the end.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import gguf
import numpy as np

from mlc_amd.schedules.formats import FORMATS

Ranges = Sequence[tuple[int, int]]  # first, count


def row_bytes(format: str, columns: int) -> int:
    """Bytes of one row of GGUF blocks; `columns` is a multiple of the format's block."""
    return columns // FORMATS[format].block * FORMATS[format].block_bytes


def _matrices(start: int, stop: int, rows: int) -> Iterator[tuple[int, int, int]]:
    """(number of the matrix, its first row, end) for each matrix that the rows start .. stop of a stack touch. rows: of
    a matrix."""
    for index in range(start // rows, -(-stop // rows)):
        yield index, max(start - index * rows, 0), min(stop - index * rows, rows)


class Tensor:
    """A vector, a matrix or a stack of matrices, as GGUF blocks that are read on demand.

    `shape` is (columns,), (rows, columns) or (matrices, rows, columns), in numpy order. Rows are numbered through all
    matrices; a vector is one row. A row is a whole number of blocks.
    """

    def __init__(self, name: str, format: str, shape: tuple[int, ...], fetch: Callable[[int, int], np.ndarray]):
        self.name, self.format, self.shape, self._fetch = name, format, shape, fetch

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.format!r}, {self.shape})"

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.format, self.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def blocks(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start..stop, as they are in the file: uint8 [stop - start, row_bytes], read-only."""
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"rows {start}..{stop} of {self!r}")
        return self._fetch(start, stop)

    def part(self, name: str, first: int, shape: tuple[int, ...]) -> "Tensor":
        """A tensor of this shape, made of the rows of each matrix from `first` on; or of all rows, if only the shape
        differs. Raises ValueError if the shape does not fit."""
        stacked = len(shape) == 3
        of_each, count = (shape[1], shape[0]) if stacked else (math.prod(shape[:-1]), 1)
        matrix = self.rows // count
        if shape[-1] != self.shape[-1] or matrix * count != self.rows or first + of_each > matrix:
            raise ValueError(f"{self!r} has no part of shape {shape} from row {first} on")

        def fetch(start: int, stop: int) -> np.ndarray:
            if count == 1:
                return self.blocks(first + start, first + stop)
            pieces = [
                self.blocks(index * matrix + first + row, index * matrix + first + end)
                for index, row, end in _matrices(start, stop, of_each)
            ]
            return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

        return Tensor(name, self.format, shape, fetch)

    def reshaped(self, shape: tuple[int, ...]) -> "Tensor":
        """The same numbers in another shape. Raises ValueError if the columns change and the format has blocks."""
        if shape[-1:] == self.shape[-1:]:
            return Tensor(self.name, self.format, shape, self._fetch)
        if FORMATS[self.format].kind != "float":
            raise ValueError(f"{self!r} cannot have the shape {shape}")
        return Tensor.made(self.name, shape, self.dequantize)

    def transposed(self, name: str, first: int, shape: tuple[int, ...]) -> "Tensor":
        """A stack of this shape: the rows of each matrix from `first` on, transposed. Blocks of columns cannot become
        rows: float formats are kept, other formats become f16."""
        count, columns, rows = shape
        matrix = self.rows // count
        float_format = FORMATS[self.format].kind == "float"

        def fetch(start: int, stop: int) -> np.ndarray:
            pieces = []
            for index, row, end in _matrices(start, stop, columns):
                begin = index * matrix + first
                if float_format:
                    dtype = FORMATS[self.format].dtype
                    source = np.ascontiguousarray(self.blocks(begin, begin + rows)).view(dtype)
                else:
                    source = self.dequantize(begin, begin + rows).astype(np.float16)
                pieces.append(np.ascontiguousarray(source[:, row:end].T).view(np.uint8))
            return np.concatenate(pieces)

        return Tensor(name, self.format if float_format else "f16", shape, fetch)

    def pieces(self, name: str, shape: tuple[int, ...], groups: int, pieces: Sequence[tuple[int, int]]) -> "Tensor":
        """A matrix of this shape, made of this tensor's rows, which are `groups` equal groups: for each piece (first,
        count), the rows first .. first + count - 1 of all groups, then those of the next piece. Raises ValueError if
        the shape does not fit."""
        size = self.rows // groups
        found = self.some_rows(name, [(at * size + first, count) for first, count in pieces for at in range(groups)])
        if shape != found.shape:
            raise ValueError(f"{self!r} has no pieces {pieces} of shape {shape}")
        return found

    def some_rows(self, name: str, ranges: Ranges, whole: int = 0) -> "Tensor":
        """The rows (first, count) of each matrix, one range after the other, then zeros up to `whole` rows. For a
        vector: its entries. Blocks are copies."""
        if len(self.shape) == 1:
            return self.some_columns(name, ranges, whole)
        stacked, matrix = len(self.shape) == 3, self.shape[-2]
        rows = np.concatenate([np.arange(first, first + count) for first, count in ranges])
        whole = max(whole, len(rows))
        if rows.size and rows.max() >= matrix:
            raise ValueError(f"{self!r} has no rows {ranges}")

        def fetch(start: int, stop: int) -> np.ndarray:
            found = np.zeros((stop - start, self.row_bytes), np.uint8)
            for index, begin, end in _matrices(start, stop, whole):
                wanted = rows[begin:end]
                if wanted.size:
                    low, at = int(wanted.min()), index * whole + begin - start
                    blocks = self.blocks(index * matrix + low, index * matrix + int(wanted.max()) + 1)
                    found[at : at + wanted.size] = blocks[wanted - low]
            return found

        return Tensor(name, self.format, (*self.shape[:1] * stacked, whole, self.shape[-1]), fetch)

    def some_columns(self, name: str, ranges: Ranges, whole: int = 0) -> "Tensor":
        """The columns (first, count) of each row, one range after the other, then zeros up to `whole`. Raises
        ValueError if a range divides a block. (In every format, a block of zero bytes decodes to zeros.)"""
        count = sum(count for _, count in ranges)
        whole = max(whole, count)
        block = FORMATS[self.format].block
        if any(number % block for one in ranges for number in one) or whole % block:
            raise ValueError(f"{self!r} has blocks of {block} columns, which {ranges} divide")
        spans = [(row_bytes(self.format, first), row_bytes(self.format, first + count)) for first, count in ranges]

        def fetch(start: int, stop: int) -> np.ndarray:
            blocks, found = self.blocks(start, stop), np.zeros((stop - start, row_bytes(self.format, whole)), np.uint8)
            at = 0
            for begin, end in spans:
                found[:, at : at + end - begin] = blocks[:, begin:end]
                at += end - begin
            return found

        return Tensor(name, self.format, (*self.shape[:-1], whole), fetch)

    def some_matrices(self, name: str, ranges: Ranges) -> "Tensor":
        """The matrices (first, count) of a stack, one range after the other."""
        count, rows, columns = self.shape
        flat = self.part(name, 0, (count * rows, columns))
        flat = flat.some_rows(name, [(first * rows, count * rows) for first, count in ranges])
        return flat.part(name, 0, (flat.rows // rows, rows, columns))

    def zeros(self, name: str) -> "Tensor":
        """A tensor of the same format and shape, all zeros."""
        return Tensor(
            name, self.format, self.shape, lambda start, stop: np.zeros((stop - start, self.row_bytes), np.uint8)
        )

    def filled(self, shape: tuple[int, ...]) -> "Tensor":
        """The same tensor with rows of zeros after each matrix, or columns of zeros, up to this shape. (In every
        format, a block of zero bytes decodes to zeros.) Raises ValueError for further columns in a format with
        blocks."""
        rows, whole, size = self.shape[-2], shape[-2], row_bytes(self.format, shape[-1])
        if self.shape[-1] != shape[-1] and FORMATS[self.format].kind != "float":
            raise ValueError(f"{self!r} cannot have {shape[-1]} columns")

        def fetch(start: int, stop: int) -> np.ndarray:
            found = np.zeros((stop - start, size), np.uint8)
            for index, begin, end in _matrices(start, stop, whole):
                if begin < (end := min(end, rows)):
                    place = index * whole + begin - start
                    own = self.blocks(index * rows + begin, index * rows + end)
                    found[place : place + end - begin, : self.row_bytes] = own
            return found

        return Tensor(self.name, self.format, shape, fetch)

    @staticmethod
    def made(name: str, shape: tuple[int, ...], values: Callable[[], np.ndarray], format: str = "f32") -> "Tensor":
        """A vector or matrix with the values of a function, which is called once. format: a float format of numpy's."""

        @cache
        def whole() -> np.ndarray:
            rows = values().reshape(math.prod(shape[:-1]), shape[-1])
            return np.ascontiguousarray(rows, FORMATS[format].dtype).view(np.uint8)

        return Tensor(name, format, shape, lambda start, stop: whole()[start:stop])

    def entries(self, name: str, first: int, count: int) -> "Tensor":
        """The vector of `count` entries of this vector, from `first` on, as f32."""
        return Tensor.made(name, (count,), lambda: self.dequantize()[first : first + count])

    def dequantize(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start..stop as float32 [stop - start, columns]; a whole vector as [columns]. Computed by gguf-py, which
        is the reference."""
        values = gguf.dequantize(self.blocks(start, stop), gguf.GGMLQuantizationType(FORMATS[self.format].gguf_type))
        return values.reshape(self.shape[-1:] if len(self.shape) == 1 else (-1, self.shape[-1])).astype(
            np.float32, copy=False
        )
