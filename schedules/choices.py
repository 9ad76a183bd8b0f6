"""The number of blocks and keys that sparse attention chooses for a row (schedules/operators/indexer.py), as TensorIR
expressions."""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.operators.indexer import SelectedAttention, SelectKeys
from mlc_amd.schedules.tir import Expr


def choices(op: SelectKeys | SelectedAttention, position: Expr) -> Expr:
    """The number of blocks that a row at this position has, int32."""
    tail = op.tail if isinstance(op, SelectedAttention) else op.block > 1 and not op.by_head
    most = T.int32(op.used)
    if tail:
        most = most - T.Select((position + 1) % op.block == 0, T.int32(1), T.int32(0))
    return T.Bind(T.min(position // op.block + 1, most))


def keys_of(op: SelectedAttention, count: Expr, last: Expr, position: Expr) -> Expr:
    """The number of keys that a row at `position` attends to, int32. count: its number of blocks; last: the number of
    the last one, whose keys after the row's position do not count."""
    if op.block == 1:
        return count
    return T.Bind(count * op.block - T.max((last + 1) * op.block - 1 - position, T.int32(0)))
