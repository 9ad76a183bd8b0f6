"""Values in registers: local buffers, vectors and their elements."""

from collections.abc import Iterator, Sequence
from typing import Any

from tvm.tirx.script import builder as T

from mlc_amd.schedules.tir import Buffer, Expr


def local(size: int, dtype: str = "float32") -> Buffer:
    """A buffer in registers; after unrolling all its indices must be constants."""
    return T.alloc_buffer((size,), dtype, scope="local")


def filled(value: Expr, count: int = 1) -> Buffer:
    """So many registers of that value."""
    cells = local(count, str(value.ty))
    for i in range(count):
        put(cells, value, i)
    return cells


def put(buffer: Buffer, value: Expr, *index: Expr) -> None:
    """buffer[index] = value."""
    T.buffer_store(buffer, value, list(index))


def owned(first: Expr, mine: Expr, threads: int, count: int) -> tuple[Expr, Expr | None]:
    """What thread `mine` has of those from `first` on, one for each of `threads`: (its number, or after the last of all
    `count` that one, whether there is one; None: each thread has one)."""
    place = first + mine
    if first + threads <= count if isinstance(first, int) else count % threads == 0:
        return place, None
    return T.min(place, T.int32(count - 1)), place < count


def each_owned(mine: Expr, threads: int, count: int) -> Iterator[tuple[Expr, Expr | None]]:
    """What thread `mine` has of `count`, one after the other, each as of `owned`."""
    for first in range(0, count, threads):
        place, valid = owned(first, mine, threads, count)
        yield T.Bind(place), valid


def at(base: Expr, n: int) -> Expr:
    """The index vector base, ..., base+n-1 (a buffer's last index only)."""
    return T.ramp(base, 1, n) if n > 1 else base


def opaque(x: Expr) -> Expr:
    """The scalar `x` in a register that is opaque to TVM, which otherwise substitutes bound values into the expressions
    that use them: chains of them take minutes to compile."""
    return filled(x)[0]


def lane_of(x: Expr, i: int) -> Expr:
    """Element i of a vector."""
    return T.Shuffle([x], [T.int32(i)])


def elements(x: Expr) -> list[Expr]:
    """The elements of a vector or scalar."""
    count = x.ty.dtype.lanes
    return [lane_of(x, i) for i in range(count)] if count > 1 else [x]


def vector(values: Sequence[Expr]) -> Expr:
    """Scalars as one vector; a single one is none."""
    return T.Shuffle(values, [T.int32(i) for i in range(len(values))]) if len(values) > 1 else values[0]


def chosen(values: Sequence[Expr], number: Expr) -> Expr:
    """values[number], or the only one. number: an int or in a register."""
    if len(values) == 1:
        return values[0]
    if isinstance(number, int):
        return values[number]
    found = values[-1]
    for i, value in enumerate(values[:-1]):
        found = T.Select(number == i, value, found)
    return T.Bind(found)


class Held:
    """Registers that a loop hands on from one step to the next: scalars in nested lists, named tuples and dicts."""

    def __init__(self, first: Any):
        """first: what the first step finds."""
        self._like = first
        self._cells = [filled(x) for x in _leaves(first)]

    def keep(self, values: Any) -> None:
        """What the next step finds; nested as the first."""
        for cell, x in zip(self._cells, _leaves(values), strict=True):
            put(cell, x, 0)

    def values(self) -> Any:
        """What the step before kept."""
        return _rebuilt(self._like, iter([T.Bind(cell[0]) for cell in self._cells]))


def _leaves(values: Any) -> list[Expr]:
    if isinstance(values, dict):
        values = list(values.values())
    return [x for each in values for x in _leaves(each)] if isinstance(values, list | tuple) else [values]


def _rebuilt(like: Any, leaves: Iterator[Expr]) -> Any:
    if isinstance(like, dict):
        return {key: _rebuilt(value, leaves) for key, value in like.items()}
    if isinstance(like, list | tuple):
        values: Any = [_rebuilt(value, leaves) for value in like]
        return values if isinstance(like, list) else type(like)(*values)
    return next(leaves)
