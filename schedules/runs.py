"""What kernels of layers share that keep a state for each sequence: which rows of a step follow one another, and where
a state is.

A step's rows of one slot are consecutive tokens of one sequence: a *run*. Its first row finds the state after the
token before it in the cell cells[slot, 0], its i-th row leaves one in cells[slot, 1 + i], those after the first KEPT
rows in the last of these. So single rows whose tokens are guesses leave a state each. What a cell has that several rows
share is the last one's state; a chunk's rows share one. The cell that a run reads may be its last row's, too, but none
before. Position 0 begins with zeros. CPU and GPU kernels call these while an IRBuilder
prim_func is open. Parameters are those of schedules/operators/recurrent.py.
"""

from collections.abc import Callable

from tvm.tirx.script import builder as T

from mlc_amd.schedules.operators import CausalConv, ChannelDecay, DeltaNet, SsmScan
from mlc_amd.schedules.operators.attention import SLOTS, padded_columns
from mlc_amd.schedules.tir import Buffer, Expr, declared

RunOperator = CausalConv | DeltaNet | SsmScan

KEPT = 8  # rows of a run that may leave a state each: a token and the guesses after it
COLUMNS = 1 + KEPT  # of a slot's row of cells
CELLS = SLOTS  # of a kernel's state buffers as it is declared: kernels do not depend on how many there are


def runs(m: int, single: int) -> int:
    """How many rows of a step of m, with up to `single` single ones at the front, may begin a run: the first ones."""
    return min(single + 1, m)


def run_args(m: int) -> tuple[Buffer, Buffer]:
    """Declares rows int32 [m, 2] and cells int32 [SLOTS, COLUMNS] of a kernel of m rows."""
    return T.arg("rows", T.buffer((m, 2), "int32")), T.arg("cells", T.buffer((SLOTS, COLUMNS), "int32"))


def conv_args(op: CausalConv) -> tuple[Buffer, Buffer, list[Buffer], list[Buffer], Buffer, Buffer, Buffer]:
    """Declares rows, cells, X and W of each part (several: X0, X1 .., W0, W1 ..), B (None: there is none), States, Y.
    ValueError unless a convolution can have its columns from so many tensors."""
    m, channels, parts, own = op.m, op.channels, op.parts, op.channels // op.parts
    if channels % parts or (parts > 1 and (op.gated or op.bias)):
        raise ValueError(f"{op}: {parts} parts are not possible")
    rows, cells = run_args(m)
    numbers = [""] if parts == 1 else list(range(parts))
    inputs = declared(**{f"X{i}": (m, own * (3 if op.gated else 1)) for i in numbers})
    weights = declared(**{f"W{i}": (padded_columns(own * op.taps),) for i in numbers})
    states = (CELLS, op.taps - 1, channels)
    return rows, cells, inputs, weights, *declared(B=(channels,) if op.bias else None, States=states, Y=(m, channels))


def ssm_args(op: SsmScan) -> list[Buffer]:
    """Declares rows, cells, X, Z, Dt, A, D, Bias, States, Y; None in the place of those that the operator has not."""
    m, inner, each = op.m, op.heads * op.d, padded_columns(op.d if op.by_state else op.heads)
    inputs = {"X": (m, inner + 2 * op.groups * op.size), "Z": (m, padded_columns(inner)), "Dt": (m, each)}
    weights: dict = {which: (each,) for which in ("A", "D", "Bias")} | {"States": (CELLS, op.heads, op.d * op.size)}
    absent = ["Z", "D"] * (not op.gated) + ["Bias"] * op.given
    weights |= {"A": (padded_columns(op.d * op.size),)} if op.by_state else {}
    return [*run_args(m), *declared(**(inputs | weights | dict.fromkeys(absent)), Y=(m, inner))]


def delta_args(op: DeltaNet) -> tuple[Buffer, Buffer, Buffer, Buffer, "Decays", Buffer, Buffer]:
    """Declares rows, cells, X, Beta, Alpha, A, Dt or Decay, States, Y."""
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
    """The cells of a run. row: its first; single: single rows of a step, at most.

    source  the cell that it reads
    """

    def __init__(self, rows: Buffer, cells: Buffer, row: Expr, single: int):
        self._cells, self._several = cells, single > 1
        self._slot = T.Bind(T.max(T.min(rows[row, 1], T.int32(SLOTS - 1)), T.int32(0)))
        self.source = T.Bind(cells[self._slot, 0])

    def after(self, step: Expr) -> Expr:
        """The cell for the state after row number `step` of the run."""
        column = T.min(step, T.int32(KEPT - 1)) + 1 if self._several else 1
        return T.Bind(self._cells[self._slot, column])

    def keep(self, step: Expr, store: Callable[[Expr], None]) -> None:
        """Emits the code after each row of the run, of whose state `store(cell)` emits the stores: it is kept if the
        next row has another cell. The caller stores the last one's."""
        if self._several:
            cell = self.after(step)
            with T.If(cell != self.after(step + 1)), T.Then():
                store(cell)


def begins(rows: Buffer, row: Expr) -> Expr:
    """Whether a live row begins a run."""
    before = T.max(row - 1, T.int32(0))
    return (row == 0) | (rows[row, 1] != rows[before, 1])


def run_length(op: RunOperator, state: Buffer, rows: Buffer, row: Expr, live: Expr) -> Expr:
    """Rows of the run that begins at `row`: the chunk, or as many single rows as have its slot. live: live rows of the
    step."""
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
    """The key head of a value head. op.grouped: those of one key head follow one another."""
    return head // (op.value_heads // op.key_heads) if op.grouped else head % op.key_heads


class Decays:
    """The parameters of a delta net that say how the matrix of a head decays: Alpha, A and Dt, or by channel Decay.

    channels: the latter, float32 [m, heads * d], a factor on each row of the matrix, of which a head has d.
    """

    def __init__(self, op: DeltaNet):
        self.channels: Buffer = None
        if op.by_channel:
            (self.channels,) = declared(Decay=(op.m, op.value_heads * op.d))
        else:
            padded = padded_columns(op.value_heads)
            self.Alpha, self.A, self.Dt = declared(Alpha=(op.m, padded), A=(padded,), Dt=(padded,))

    def of_head(self, row: Expr, head: Expr) -> Expr:
        """The factor on all rows of the head's matrix; 1 by channel."""
        if self.channels is not None:
            return T.float32(1)
        return T.Bind(T.exp(self.A[head] * softplus(self.Alpha[row, head] + self.Dt[head])))


def softplus(x: Expr) -> Expr:
    """ln(1 + e**x) of a float32, in a register."""
    x = T.Bind(x)
    return T.Bind(T.Select(x > T.float32(20), x, T.log(T.float32(1) + T.exp(T.min(x, T.float32(20))))))
