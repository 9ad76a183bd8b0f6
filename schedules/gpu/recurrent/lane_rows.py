"""Matrices of recurrent layers in registers: how a head's matrix is divided among waves and lanes, and the loop over
the rows of a sequence, one by one. A group of LANES adjacent lanes holds one row of a matrix.
"""

from collections.abc import Iterator, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, filled, lane_of, vector
from mlc_amd.schedules.gpu.base.step import live_rows
from mlc_amd.schedules.operators import DeltaNet, SsmScan
from mlc_amd.schedules.runs import RunCells, begins, run_length
from mlc_amd.schedules.tir import Buffer, Expr

LANES = 8  # lanes of a group
WAVES = 4  # largest number of waves of a workgroup
WIDTHS = 4, 2, 1  # possible numbers of float32 in a load


def waves_of(rows: int, size: int, arch: Device) -> tuple[int, int]:
    """(rows of a wave, waves of a workgroup) for a matrix [rows, size]. Raises ValueError for matrices that do not fill
    waves."""
    own = arch.wave // LANES
    waves = next(
        (n for n in (4, 2, 1) if own and n <= min(WAVES, arch.threads // arch.wave) and rows % (n * own) == 0), 0
    )
    if size % LANES or not waves:
        raise ValueError(f"matrices of {rows} x {size} do not fill waves of {arch.wave} lanes")
    return own, waves


def width_of(count: int) -> int:
    """The largest number of float32 in a load that divides `count`."""
    return next(width for width in WIDTHS if count % width == 0)


def load_row(buffer: Buffer, place: tuple[Expr, ...], first: Expr, count: int) -> list[Expr]:
    """Loads `count` float32 from buffer[place], from index `first` on, to registers."""
    width, found = width_of(count), []
    for start in range(0, count, width):
        x = T.Bind(buffer[(*place, at(first + start, width))])
        found += [T.Bind(lane_of(x, i)) for i in range(width)] if width > 1 else [x]
    return found


def store_row(buffer: Buffer, place: tuple[Expr, ...], first: Expr, values: Sequence[Expr]) -> None:
    """Stores values to buffer[place], from index `first` on."""
    width = width_of(len(values))
    for start in range(0, len(values), width):
        T.buffer_store(buffer, vector(values[start : start + width]), [*place, at(first + start, width)])


def each_row(
    op: DeltaNet | SsmScan, step: tuple[Buffer, Buffer, Buffer], first: Expr, States: Buffer, place: tuple[Expr, ...],
    begin: Expr, count: int,
) -> Iterator[tuple[Expr, list[Buffer]]]:  # fmt: skip
    """The loop over the rows of the run that begins at row `first`, if a run begins there: yields (row, registers). The
    registers hold `count` elements of the state, States[cell, *place] from index `begin` on. They are loaded before the
    first row, and stored where the run keeps a state (schedules/runs.py). step: (state, rows, cells)."""
    state, rows, cells = step
    live = live_rows(state, op.m)
    with T.If(first < live), T.Then(), T.If(begins(rows, first)), T.Then():
        cell, length = RunCells(rows, cells, first, op.single), run_length(op, state, rows, first, live)
        stored = load_row(States, (cell.source, *place), begin, count)
        matrix = [filled(T.Select(rows[first, 0] > 0, x, T.float32(0))) for x in stored]

        def keep(target: Expr) -> None:
            store_row(States, (target, *place), begin, [T.Bind(number[0]) for number in matrix])

        with T.serial(length) as i:
            yield T.Bind(first + i), matrix
            cell.keep(i, keep)
        keep(cell.after(length - 1))
