"""Names of TensorIR's values for annotations, as TVM's stubs do not cover its builder (type checkers see `Any`), and
parameters of kernels."""

from typing import Any

from tvm.tirx.script import builder as T

Expr = Any  # an expression, a variable, or a Python number where the builder takes one
Buffer = Any  # a buffer that is read by indices, and written by T.buffer_store
Frame = Any  # a context manager of the builder: a loop, a condition


def declared(dtype: str = "float32", /, **shapes: tuple[int, ...] | None) -> list[Buffer]:
    """Declares parameters of a kernel by name, in this order. None for a shape: there is no such parameter."""
    return [T.arg(name, T.buffer(shape, dtype)) if shape else None for name, shape in shapes.items()]
