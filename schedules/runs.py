"""What kernels of layers share that keep a state for each sequence: which rows of a step follow one another, and where
a state is.

A step's rows of one slot are consecutive tokens of one sequence: a *run*. Its first row finds the state behind the
token before it in the cell cells[slot, 0], its i-th row leaves one in cells[slot, 1 + i], those behind the first KEPT
rows in the last of these. So single rows whose tokens are guesses leave a state each. What a cell has that several rows
share is the last one's state; a chunk's rows share one. The cell that a run reads may be its last row's, too, but none
before. Position 0 begins with zeros. CPU and GPU kernels call these while an IRBuilder
prim_func is open.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.operators.attention import SLOTS, padded_columns

KEPT = 8  # rows of a run that may leave a state each: a token and the guesses behind it
COLUMNS = 1 + KEPT  # of a slot's row of cells
CELLS = SLOTS  # of a kernel's state buffers as it is declared: kernels do not depend on how many there are


def runs(m, single):
    """How many rows of a step of m, with up to `single` single ones at the front, may begin a run: the first ones."""
    return min(single + 1, m)


def run_args(m):
    """Declares rows int32 [m, 2] and cells int32 [SLOTS, COLUMNS] of a kernel of m rows."""
    return T.arg("rows", T.buffer((m, 2), "int32")), T.arg("cells", T.buffer((SLOTS, COLUMNS), "int32"))


def check_parts(channels, gated, bias, parts):
    """ValueError unless a convolution can have its columns from so many tensors."""
    if channels % parts or (parts > 1 and (gated or bias)):
        raise ValueError(
            f"a convolution of {channels} columns, gated {gated}, bias {bias}: {parts} parts are not possible"
        )


def part_args(name, parts, shape):
    """Declares a float32 parameter of each part: X, or of several X0, X1 and so on."""
    names = [name] if parts == 1 else [f"{name}{i}" for i in range(parts)]
    return [T.arg(own, T.buffer(shape, "float32")) for own in names]


class RunCells:
    """The cells of a run. row: its first; single: single rows of a step, at most.

    source  the cell that it reads
    """

    def __init__(self, rows, cells, row, single):
        self._cells, self._several = cells, single > 1
        self._slot = T.Bind(T.max(T.min(rows[row, 1], T.int32(SLOTS - 1)), T.int32(0)))
        self.source = T.Bind(cells[self._slot, 0])

    def behind(self, step):
        """The cell for the state behind row number `step` of the run."""
        column = T.min(step, T.int32(KEPT - 1)) + 1 if self._several else 1
        return T.Bind(self._cells[self._slot, column])

    def keep(self, step, store):
        """Emits the code behind each row of the run, of whose state `store(cell)` emits the stores: it is kept if the
        next row has another cell. The caller stores the last one's."""
        if self._several:
            cell = self.behind(step)
            with T.If(cell != self.behind(step + 1)), T.Then():
                store(cell)


def begins(rows, row):
    """Whether a live row begins a run."""
    before = T.max(row - 1, T.int32(0))
    return (row == 0) | (rows[row, 1] != rows[before, 1])


def run_length(state, rows, row, m, single, live):
    """Rows of the run that begins at `row`: the chunk, or as many single rows as have its slot. live: live rows of the
    step."""
    if m == 1:
        return T.int32(1)
    if single == 0:
        return live
    singles = T.Bind(T.min(state[0], live))
    count = T.alloc_buffer((1,), "int32", scope="local")
    T.buffer_store(count, T.Select(row < singles, T.int32(0), live - row), [0])
    with T.serial(T.Select(row < singles, singles, T.int32(0))) as other:
        T.buffer_store(count, count[0] + T.Select(rows[other, 1] == rows[row, 1], T.int32(1), T.int32(0)), [0])
    return T.Bind(count[0])


def key_head(head, key_heads, value_heads, grouped):
    """The key head of a value head. grouped: those of one key head follow one another."""
    return head // (value_heads // key_heads) if grouped else head % key_heads


class Decays:
    """The parameters of a delta net that say how the matrix of a head decays: Alpha, A and Dt, or by channel Decay.

    channels: the latter, float32 [m, heads * d], a factor on each row of the matrix, of which a head has d.
    """

    def __init__(self, m, heads, d, by_channel):
        self.channels = T.arg("Decay", T.buffer((m, heads * d), "float32")) if by_channel else None
        if not by_channel:
            padded = padded_columns(heads)
            self.Alpha = T.arg("Alpha", T.buffer((m, padded), "float32"))
            self.A, self.Dt = (T.arg(which, T.buffer((padded,), "float32")) for which in ("A", "Dt"))

    def of_head(self, row, head):
        """The factor on all rows of the head's matrix; 1 by channel."""
        if self.channels is not None:
            return T.float32(1)
        return T.Bind(T.exp(self.A[head] * softplus(self.Alpha[row, head] + self.Dt[head])))


def softplus(x):
    """ln(1 + e**x) of a float32, in a register."""
    x = T.Bind(x)
    return T.Bind(T.Select(x > T.float32(20), x, T.log(T.float32(1) + T.exp(T.min(x, T.float32(20))))))
