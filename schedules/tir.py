"""Type names for values of TVM's TensorIR builder, and `declared`, which declares parameters of kernels. TVM has no
stubs for the builder, so the types are `Any`."""

from typing import Any

from tvm.tirx.script import builder as T

Expr = Any  # an expression, a variable, or a Python number where the builder takes one
Buffer = Any  # a buffer that is read by indices, and written by T.buffer_store
Frame = Any  # a context manager of the builder: a loop, a condition


def declared(dtype: str = "float32", /, **shapes: tuple[int, ...] | None) -> list[Buffer]:
    """Declares parameters of a kernel, in this order: name=shape. Returns a buffer for each; None where the shape is
    None, as the kernel has no such parameter."""
    return [T.arg(name, T.buffer(shape, dtype)) if shape else None for name, shape in shapes.items()]
