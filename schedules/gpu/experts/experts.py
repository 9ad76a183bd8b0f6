"""What the kernels of a mixture of experts share: how they find the rows of an expert in a stack of matrices.

A stack of `count` matrices of n rows is packed as one matrix of count * n rows: row e * n + i is row i of expert e.
"""

from collections.abc import Sequence
from math import prod

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.planes import ROWS
from mlc_amd.schedules.operators.experts import Experts
from mlc_amd.schedules.tir import Buffer, Expr


def check_rows(n: int, multiple: int = ROWS) -> None:
    """UserError unless the matrix of each expert begins where rows of packed weights may begin."""
    if n % multiple:
        raise UserError(f"experts with {n} rows are not supported: it must be a multiple of {multiple}")


def expert_at(ids: Buffer, index: Sequence[Expr], experts: Experts) -> Expr:
    """The expert in ids[index], in a register. The limits keep reads inside the stack, and show code generators that
    indices made of it are not negative."""
    return T.Bind(T.max(T.min(ids[tuple(index)], T.int32(experts.count - 1)), T.int32(0)))


def flat(buffer: Buffer) -> Buffer:
    """A view of a parameter with one index. To be called after the last parameter."""
    return T.decl_buffer((prod(int(extent) for extent in buffer.shape),), buffer.dtype, data=buffer.data)


def bias_args(rows: int, *names: str) -> list[Buffer]:
    """Declares parameters of these names: a float32 for each row of a stack."""
    return [T.arg(name, T.buffer((rows,), "float32")) for name in names]


def ids_arg(experts: Experts, m: int) -> Buffer:
    """Declares the parameter Groups: the experts of the rows' slots [m, used], or of the tiles of sorted ones (see
    schedules/operators/experts.py)."""
    shape = (m, experts.used) if experts.tile == 1 else (experts.groups(m),)
    return T.arg("Groups", T.buffer(shape, "int32"))


def weights_arg(experts: Experts, m: int) -> Buffer:
    """Declares the parameter Weights: of each row's experts."""
    return T.arg("Weights", T.buffer((m, experts.used), "float32"))
