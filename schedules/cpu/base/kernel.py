"""What every CPU kernel begins with: its name and attributes, `state`, and the loop over the rows that a step computes.

`state` int32[4] is a kernel's first parameter: the position of the step's first row, the number of live rows, and two
reserved words. A kernel is built for m rows; those after the live ones are padding, whose results have no meaning.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.tir import Buffer, Expr


@contextmanager
def kernel(name: str) -> Iterator[Expr]:
    """Opens a PrimFunc of that name: `with kernel(name) as (builder, state)` declares the parameters after `state` and
    emits the body, then `builder.get()` gives the PrimFunc."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        yield builder, T.arg("state", T.buffer((4,), "int32"))


def live_rows(state: Buffer, m: int) -> Expr:
    """The number of live rows of a step of m: state[1], clamped to 1 .. m (m == 1: always 1)."""
    return T.int32(1) if m == 1 else T.Bind(T.max(T.min(state[1], T.int32(m)), T.int32(1)))


def row_loop(state: Buffer, m: int) -> Expr:
    """The loop over live rows, parallel if there can be more than one."""
    return T.serial(1) if m == 1 else T.parallel(live_rows(state, m))
