"""Names of TensorIR's values for annotations: TVM's stubs do not cover its builder, so type checkers see `Any`."""

from typing import Any

Expr = Any  # an expression, a variable, or a Python number where the builder takes one
Buffer = Any  # a buffer that is read by indices, and written by T.buffer_store
Frame = Any  # a context manager of the builder: a loop, a condition
