"""The beginning of every CPU kernel: its name and attributes, the parameter `state`, and the loop over live rows.

A kernel is built for m rows. `state` int32[4], its first parameter, is (single rows, live rows, rows of an image, 0).
The rows after the live rows are padding, and their results have no meaning.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.tir import Buffer, Expr


@contextmanager
def kernel(name: str) -> Iterator[Expr]:
    """Opens a PrimFunc of this name: `with kernel(name) as (builder, state)`. The block declares the parameters after
    `state` and emits the body; after it `builder.get()` returns the PrimFunc."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        yield builder, T.arg("state", T.buffer((4,), "int32"))


def live_rows(state: Buffer, m: int) -> Expr:
    """The number of live rows of a step of m rows: state[1], clamped to 1 .. m; for m = 1 always 1."""
    return T.int32(1) if m == 1 else T.Bind(T.max(T.min(state[1], T.int32(m)), T.int32(1)))


def row_loop(state: Buffer, m: int) -> Expr:
    """The loop over live rows; it is parallel if m > 1."""
    return T.serial(1) if m == 1 else T.parallel(live_rows(state, m))
