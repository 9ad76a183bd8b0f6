"""What the kernels of a mixture of experts share: how they find the rows of an expert in a stack of matrices.

A stack of `count` matrices of n rows is packed as one matrix of count * n rows: row e * n + i is row i of expert e.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.base.planes import ROWS
from mlc_amd.schedules.operators.experts import Experts


def check_rows(n, multiple=ROWS):
    """UserError unless the matrix of each expert begins where rows of packed weights may begin."""
    if n % multiple:
        raise UserError(f"experts with {n} rows are not supported: it must be a multiple of {multiple}")


def expert_at(ids, index, experts: Experts):
    """The expert in ids[index], in a register. The limits keep reads inside the stack, and tell code generators that
    indices made of it are not negative."""
    return T.Bind(T.max(T.min(ids[tuple(index)], T.int32(experts.count - 1)), T.int32(0)))


def flat(buffer):
    """A view of a parameter with one index. To be called after the last parameter."""
    size = 1
    for extent in buffer.shape:
        size *= int(extent)
    return T.decl_buffer((size,), buffer.dtype, data=buffer.data)


class Slots(NamedTuple):
    """What a kernel for the slots of `m` rows must know besides sizes. shared: the slots of one row read the same row
    of activations. biases: whether experts have them."""

    experts: Experts
    m: int
    shared: bool
    biases: bool

    @property
    def x_rows(self) -> int:
        """Rows of the activations."""
        return self.m if self.shared else self.experts.slots(self.m)


def bias_args(of: Slots | None, n, names):
    """Declares parameters of that name: a float32 for each row of a stack; [] if there are none."""
    if of is None or not of.biases:
        return []
    return [T.arg(name, T.buffer((of.experts.count * n,), "float32")) for name in names]


def ids_arg(experts: Experts, m):
    """Declares the parameter Groups: the experts of the rows' slots [m, used], or of the tiles of sorted ones (see
    schedules/operators/experts.py)."""
    shape = (m, experts.used) if experts.tile == 1 else (experts.groups(m),)
    return T.arg("Groups", T.buffer(shape, "int32"))


def weights_arg(experts: Experts, m):
    """Declares the parameter Weights: of each row's experts."""
    return T.arg("Weights", T.buffer((m, experts.used), "float32"))
