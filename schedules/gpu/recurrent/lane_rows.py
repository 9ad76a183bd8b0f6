"""Rows of a matrix that a few neighbouring lanes have in their registers: how kernels of recurrent layers share out the
matrix of a head.
"""

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, lane_of, vector
from mlc_amd.schedules.tir import Buffer, Expr

LANES = 8  # of a row
WAVES = 4  # of a workgroup, at most
WIDTHS = 4, 2, 1  # numbers of a load


def waves_of(rows: int, size: int, arch: Device) -> tuple[int, int]:
    """(rows of a wave, waves of a workgroup) for a matrix of so many rows of `size` numbers. ValueError for one that
    does not fill waves."""
    own = arch.wave // LANES
    waves = next(
        (n for n in (4, 2, 1) if own and n <= min(WAVES, arch.threads // arch.wave) and rows % (n * own) == 0), 0
    )
    if size % LANES or not waves:
        raise ValueError(f"matrices of {rows} x {size} do not fill waves of {arch.wave} lanes")
    return own, waves


def width_of(count: int) -> int:
    """Numbers of a load of `count`."""
    return next(width for width in WIDTHS if count % width == 0)


def load_row(buffer: Buffer, place: tuple[Expr, ...], first: Expr, count: int) -> list[Expr]:
    """`count` numbers of buffer[place] from index `first` on, in registers."""
    width, found = width_of(count), []
    for start in range(0, count, width):
        x = T.Bind(buffer[(*place, at(first + start, width))])
        found += [T.Bind(lane_of(x, i)) for i in range(width)] if width > 1 else [x]
    return found


def store_row(buffer: Buffer, place: tuple[Expr, ...], first: Expr, values: Sequence[Expr]) -> None:
    """The inverse."""
    width = width_of(len(values))
    for start in range(0, len(values), width):
        group = values[start : start + width]
        value = vector(group) if width > 1 else group[0]
        T.buffer_store(buffer, value, [*place, at(first + start, width)])
