"""Values in registers: local buffers, vectors and their elements."""

from collections.abc import Iterator, Sequence
from typing import Any

from tvm.tirx.script import builder as T

from mlc_amd.schedules.tir import Buffer, Expr


def local(size: int, dtype: str = "float32") -> Buffer:
    """A buffer in registers. After unrolling, all its indices must be constants."""
    return T.alloc_buffer((size,), dtype, scope="local")


def filled(value: Expr, count: int = 1) -> Buffer:
    """A buffer of `count` registers, all with this value."""
    cells = local(count, str(value.ty))
    for i in range(count):
        put(cells, value, i)
    return cells


def put(buffer: Buffer, value: Expr, *index: Expr) -> None:
    """buffer[index] = value."""
    T.buffer_store(buffer, value, list(index))


def owned(first: Expr, mine: Expr, threads: int, count: int) -> tuple[Expr, Expr | None]:
    """The item of thread `mine`, if items first, first + 1, .. go to the threads 0, 1, .. Returns (number of the item,
    whether it exists; None if it does for all threads). A number beyond the last of `count` items becomes the last
    one."""
    place = first + mine
    if first + threads <= count if isinstance(first, int) else count % threads == 0:
        return place, None
    return T.min(place, T.int32(count - 1)), place < count


def each_owned(mine: Expr, threads: int, count: int) -> Iterator[tuple[Expr, Expr | None]]:
    """The items of thread `mine`, if `count` items go to the threads round robin; each as `owned` returns it."""
    for first in range(0, count, threads):
        place, valid = owned(first, mine, threads, count)
        yield T.Bind(place), valid


def at(base: Expr, n: int) -> Expr:
    """The index vector base, ..., base+n-1. It may only be the last index of a buffer."""
    return T.ramp(base, 1, n) if n > 1 else base


def opaque(x: Expr) -> Expr:
    """The scalar x in a register whose value is opaque to TVM. TVM otherwise substitutes bound values into the
    expressions that use them, and then takes minutes to compile chains of them."""
    return filled(x)[0]


def lane_of(x: Expr, i: int) -> Expr:
    """Element i of a vector."""
    return T.Shuffle([x], [T.int32(i)])


def elements(x: Expr) -> list[Expr]:
    """The elements of a vector or scalar."""
    count = x.ty.dtype.lanes
    return [lane_of(x, i) for i in range(count)] if count > 1 else [x]


def vector(values: Sequence[Expr]) -> Expr:
    """Scalars as one vector; a single scalar stays a scalar."""
    return T.Shuffle(values, [T.int32(i) for i in range(len(values))]) if len(values) > 1 else values[0]


def chosen(values: Sequence[Expr], number: Expr) -> Expr:
    """values[number], by selects if `number` is a register. If there is only one value, `number` is ignored."""
    if len(values) == 1:
        return values[0]
    if isinstance(number, int):
        return values[number]
    found = values[-1]
    for i, value in enumerate(values[:-1]):
        found = T.Select(number == i, value, found)
    return T.Bind(found)


class Held:
    """Registers that keep values from one step of a loop to the next: scalars in nested lists, named tuples and
    dicts."""

    def __init__(self, first: Any):
        """first: the values for the first step."""
        self._like = first
        self._cells = [filled(x) for x in _leaves(first)]

    def keep(self, values: Any) -> None:
        """Sets the values for the next step. They must be nested like `first`."""
        for cell, x in zip(self._cells, _leaves(values), strict=True):
            put(cell, x, 0)

    def values(self) -> Any:
        """The values that the step before kept."""
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
