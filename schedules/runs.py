"""Shared code of the kernels that keep a state for each sequence (schedules/operators/recurrent.py), on CPU and GPU:
their parameters, the runs of a step, and the cells of states. It is called while an IRBuilder prim_func is open.

- run: the rows of a step that have the same slot. They are consecutive rows, and consecutive tokens of one sequence.
- cell: a place for the state of a sequence: one element of the first dimension of a state buffer.

A run reads the state before its first row from cell cells[slot, 0]; a run that begins at position 0 starts with zeros
instead. Row i of a run writes the state after it to cell cells[slot, 1 + min(i, KEPT - 1)]. So single rows whose tokens
are guesses can each keep a state. If several rows have the same cell, as the rows of a chunk do, the state of the last
one remains. A run may read a cell that its last row writes, but none that another of its rows writes.
"""

from collections.abc import Callable

from tvm.tirx.script import builder as T

from mlc_amd.schedules.operators import CausalConv, ChannelDecay, DeltaNet, SsmScan
from mlc_amd.schedules.operators.attention import SLOTS, padded_columns
from mlc_amd.schedules.tir import Buffer, Expr, declared

RunOperator = CausalConv | DeltaNet | SsmScan

KEPT = 8  # largest number of states that a run keeps: after a token, and after each of the guesses that follow it
COLUMNS = 1 + KEPT  # columns of the parameter `cells`
CELLS = SLOTS  # declared extent of state buffers; kernels do not depend on the actual number of cells


def runs(m: int, single: int) -> int:
    """The number of rows, at the front of a step of m rows, that may begin a run. single: the largest number of single
    rows."""
    return min(single + 1, m)


def run_args(m: int) -> tuple[Buffer, Buffer]:
    """Declares the parameters rows int32 [m, 2] and cells int32 [SLOTS, COLUMNS]."""
    return T.arg("rows", T.buffer((m, 2), "int32")), T.arg("cells", T.buffer((SLOTS, COLUMNS), "int32"))


def conv_args(op: CausalConv) -> tuple[Buffer, Buffer, list[Buffer], list[Buffer], Buffer, Buffer, Buffer]:
    """Declares rows, cells, X and W of each part (with several parts X0, X1 .., W0, W1 ..), B (None if the operator has
    no bias), States, Y. Raises ValueError if channels are not divisible by parts, or for several parts with a gate or a
    bias."""
    m, channels, parts, own = op.m, op.channels, op.parts, op.channels // op.parts
    if channels % parts or (parts > 1 and (op.gated or op.bias)):
        raise ValueError(f"{op}: channels must be a multiple of parts, and several parts have no gate and no bias")
    rows, cells = run_args(m)
    numbers = [""] if parts == 1 else list(range(parts))
    inputs = declared(**{f"X{i}": (m, own * (3 if op.gated else 1)) for i in numbers})
    weights = declared(**{f"W{i}": (padded_columns(own * op.taps),) for i in numbers})
    states = (CELLS, op.taps - 1, channels)
    return rows, cells, inputs, weights, *declared(B=(channels,) if op.bias else None, States=states, Y=(m, channels))


def ssm_args(op: SsmScan) -> list[Buffer]:
    """Declares rows, cells, X, Z, Dt, A, D, Bias, States, Y; None for parameters that the operator does not have."""
    m, inner, each = op.m, op.heads * op.d, padded_columns(op.d if op.by_state else op.heads)
    inputs = {"X": (m, inner + 2 * op.groups * op.size), "Z": (m, padded_columns(inner)), "Dt": (m, each)}
    weights: dict = {which: (each,) for which in ("A", "D", "Bias")} | {"States": (CELLS, op.heads, op.d * op.size)}
    absent = ["Z", "D"] * (not op.gated) + ["Bias"] * op.given
    weights |= {"A": (padded_columns(op.d * op.size),)} if op.by_state else {}
    return [*run_args(m), *declared(**(inputs | weights | dict.fromkeys(absent)), Y=(m, inner))]


def delta_args(op: DeltaNet) -> tuple[Buffer, Buffer, Buffer, Buffer, "Decays", Buffer, Buffer]:
    """Declares rows, cells, X, Beta, then Alpha, A and Dt, or Decay (`Decays`), then States, Y."""
    m, heads, d, values = op.m, op.value_heads, op.d, op.value_heads * op.d
    rows, cells = run_args(m)
    X, Beta = declared(X=(m, 2 * op.key_heads * d + values), Beta=(m, padded_columns(heads)))
    return rows, cells, X, Beta, Decays(op), *declared(States=(CELLS, heads, d, d), Y=(m, values))


def decay_args(op: ChannelDecay) -> list[Buffer]:
    """Declares X, A, Dt, Y."""
    m, columns = op.m, op.heads * op.d
    own = padded_columns(columns)
    return declared(X=(m, own), A=(padded_columns(op.heads),), Dt=(own,), Y=(m, columns))


class RunCells:
    """The cells of a run. row: the first row of the run. single: the largest number of single rows of a step. source:
    the cell from which the run reads its state."""

    def __init__(self, rows: Buffer, cells: Buffer, row: Expr, single: int):
        self._cells, self._several = cells, single > 1
        self._slot = T.Bind(T.max(T.min(rows[row, 1], T.int32(SLOTS - 1)), T.int32(0)))
        self.source = T.Bind(cells[self._slot, 0])

    def after(self, step: Expr) -> Expr:
        """The cell to which the state after row number `step` of the run is written."""
        column = T.min(step, T.int32(KEPT - 1)) + 1 if self._several else 1
        return T.Bind(self._cells[self._slot, column])

    def keep(self, step: Expr, store: Callable[[Expr], None]) -> None:
        """Emits the code after row number `step` of a run: it stores the row's state if the next row has another cell.
        store(cell): emits the stores. The caller must store the state of the last row."""
        if self._several:
            cell = self.after(step)
            with T.If(cell != self.after(step + 1)), T.Then():
                store(cell)


def begins(rows: Buffer, row: Expr) -> Expr:
    """Whether a live row is the first of a run."""
    before = T.max(row - 1, T.int32(0))
    return (row == 0) | (rows[row, 1] != rows[before, 1])


def run_length(op: RunOperator, state: Buffer, rows: Buffer, row: Expr, live: Expr) -> Expr:
    """The number of rows of the run that begins at `row`: the rows of the chunk, or the single rows that have its slot.
    live: number of live rows of the step."""
    if op.m == 1:
        return T.int32(1)
    if op.single == 0:
        return live
    singles = T.Bind(T.min(state[0], live))
    count = T.alloc_buffer((1,), "int32", scope="local")
    T.buffer_store(count, T.Select(row < singles, T.int32(0), live - row), [0])
    with T.serial(T.Select(row < singles, singles, T.int32(0))) as other:
        T.buffer_store(count, count[0] + T.Select(rows[other, 1] == rows[row, 1], T.int32(1), T.int32(0)), [0])
    return T.Bind(count[0])


def key_head(head: Expr, op: DeltaNet) -> Expr:
    """The number of the key head that a value head uses, see `DeltaNet.grouped`."""
    return head // (op.value_heads // op.key_heads) if op.grouped else head % op.key_heads


class Decays:
    """The parameters of a delta net that determine how a head's matrix decays: Alpha, A and Dt, or with by_channel
    Decay. channels: the parameter Decay, float32 [m, heads * d], a factor for each of the d rows of a head's matrix;
    None without by_channel."""

    def __init__(self, op: DeltaNet):
        self.channels: Buffer = None
        if op.by_channel:
            (self.channels,) = declared(Decay=(op.m, op.value_heads * op.d))
        else:
            padded = padded_columns(op.value_heads)
            self.Alpha, self.A, self.Dt = declared(Alpha=(op.m, padded), A=(padded,), Dt=(padded,))

    def of_head(self, row: Expr, head: Expr) -> Expr:
        """The factor of the whole matrix of a head, after a row of the step; 1 with by_channel."""
        if self.channels is not None:
            return T.float32(1)
        return T.Bind(T.exp(self.A[head] * softplus(self.Alpha[row, head] + self.Dt[head])))


def softplus(x: Expr) -> Expr:
    """ln(1 + e**x) of a float32, bound to a variable."""
    x = T.Bind(x)
    return T.Bind(T.Select(x > T.float32(20), x, T.log(T.float32(1) + T.exp(T.min(x, T.float32(20))))))
