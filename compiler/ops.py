"""The decoder's operators (schedules/operators) as Relax operators `mlc_amd.<name>`, with type inference.

The models emit the plain operators. The passes fuse them: into the same operators with more inputs or attributes, or
into others (such as gate_up). Each target replaces them by TensorIR kernels.

The first argument of every operator is `state`: int32[4] = (single rows, live rows, 0, 0). A step has m rows, of which
the first `live` are computed. Of the live rows, the first `single` are the newest tokens of as many sequences; the
remaining ones are a chunk: consecutive tokens of one sequence.

Other arguments:
    x          float32 [m, k], or in a layout of schedules/operators/layouts.py, which the target chooses
    weight     tuple of planes, the packed form of one GGUF tensor (`planes` of schedules)
    rows       int32 [m, 2]: the position of each row in its sequence, and its slot
    pages      int32 [SLOTS, ctx/64]: the page of each slot's block of 64 positions
    cache      the tensors of schedules.operators.attention.Attention.cache
    cells      int32 [SLOTS, COLUMNS]: for each slot, the cell of its state, and the cells for the states after its rows
    states     float32 [cells, ..]: a layer's states of all sequences, which live from step to step

A call's only attribute is its `Operator`, as JSON text.
"""

import json
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Op

from mlc_amd.schedules.operators import OPERATORS, Operator
from mlc_amd.schedules.operators.base import from_text

PREFIX = "mlc_amd."


def tensor_type(shape, dtype="float32"):
    """The Relax type of a tensor with a static shape."""
    sizes: list[Any] = [int(s) for s in shape]  # Any: TVM converts them to expressions
    return relax.TensorType(sizes, dtype)


def shape_of(value) -> list[int]:
    return [int(s) for s in value.ty.shape.values]


def dtype_of(value) -> str:
    return str(value.ty.dtype)


def _infer(call, bb):
    op = operator_of(call)
    assert op
    types = [tensor_type(*of) for of in op.results()]
    if op.written:
        types += [arg.ty for arg in call.args[-op.written :]]
    return types[0] if len(types) == 1 else relax.TupleType(types)


def _register(name: str, description: str):
    tvm_ffi.get_global_func("ir.RegisterOp")(PREFIX + name, description)
    op = Op.get(PREFIX + name)
    op.set_num_inputs(-1)
    op.set_attr("FInferType", _infer)
    op.set_attr("FPurity", True)
    return op


_registered = {name: _register(name, declared.__doc__ or "") for name, declared in OPERATORS.items()}


def call(op: Operator, args) -> relax.Call:
    """A Relax call of the operator. args: Relax expressions, `state` first."""
    text = json.dumps(op.attributes, separators=(",", ":"))
    return relax.Call(_registered[op.name], list(args), tvm.ir.make_node("ir.DictAttrs", operator=text))


def operator_of(value) -> Operator | None:
    """The operator that `value` calls. None if `value` is not a call of an operator of this project."""
    op = getattr(value, "op", None)
    name = getattr(op, "name", "") if isinstance(op, Op) else ""
    return from_text(name.removeprefix(PREFIX), str(value.attrs["operator"])) if name.startswith(PREFIX) else None
