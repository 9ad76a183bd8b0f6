"""How many blocks of keys a row of sparse attention takes (schedules/operators/indexer.py)."""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.operators.indexer import SelectedAttention, SelectKeys
from mlc_amd.schedules.tir import Expr


def choices(op: SelectKeys | SelectedAttention, position: Expr) -> Expr:
    """Of a row at that position."""
    tail = op.tail if isinstance(op, SelectedAttention) else op.block > 1 and not op.by_head
    most = T.int32(op.used)
    if tail:
        most = most - T.Select((position + 1) % op.block == 0, T.int32(1), T.int32(0))
    return T.Bind(T.min(position // op.block + 1, most))


def keys_of(op: SelectedAttention, count: Expr, last: Expr, position: Expr) -> Expr:
    """Keys of that many blocks, the last of which has number `last`, up to the row's own."""
    if op.block == 1:
        return count
    return T.Bind(count * op.block - T.max((last + 1) * op.block - 1 - position, T.int32(0)))
