"""What all GEMM kernels have in common: the product, a workgroup's tile of it, and the interface of tile routines.

A kernel launches `token_tiles` by `row_tiles` workgroups of `threads` threads, calls `allocate` there, and then `emit`
for any number of tiles, of which each workgroup computes one (`gemm.py`).
The routines are those of `gemm_matrix.py` (AMD's matrix units), `gemm_lanes.py` and `lane_tiles.py` (cooperative
matrices of few tokens whose lanes are known), `gemm_coop.py` (cooperative matrices of any lanes) and `gemm_dot.py`
(without matrices).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, NamedTuple, TypeVar

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.device import barrier
from mlc_amd.schedules.gpu.base.planes import Planes, padded
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import each_owned
from mlc_amd.schedules.gpu.base.step import live_rows
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.deferred_norm import CompletedNorm, RowFactors, Units
from mlc_amd.schedules.operators import ExpertGateUp, ExpertLinear, GateUp, Linear
from mlc_amd.schedules.tir import Buffer, Expr

Multiplied = Linear | GateUp | ExpertLinear | ExpertGateUp


@dataclass(frozen=True)
class Product:
    """What a kernel multiplies."""

    arch: Device
    layout: str  # of the activations
    formats: tuple[Format, ...]  # of the weights
    m: int  # tokens; slots, where there are experts
    k: int  # columns
    rows: int  # of all segments
    weights: int = 1  # of one shape that share a tile (gate and up: 2)
    expert_slots: int = 0  # slots of a tile of one expert; 0: there are no experts

    @property
    def tokens(self) -> int:
        """Those that tiles divide: of one expert, or all."""
        return self.expert_slots or self.m

    @property
    def has_floats(self) -> bool:
        return any(fmt.kind == "float" for fmt in self.formats)


def product_of(op: Multiplied, arch: Device) -> Product:
    """What the operator's kernel multiplies."""
    weights = 2 if isinstance(op, GateUp | ExpertGateUp) else 1
    m, expert_slots = (op.of.slots(op.m), op.tile) if isinstance(op, ExpertLinear | ExpertGateUp) else (op.m, 0)
    rows = sum(padded(n) for _, n in op.weights) // weights
    return Product(arch, op.layout_read, tuple(f for f, _ in op.weights), m, op.k, rows, weights, expert_slots)


@dataclass(frozen=True)
class Tile:
    """A workgroup's tile: tokens, and rows of each weight."""

    tokens: int
    rows: int


class Weight(NamedTuple):
    """A weight of `rows` rows, padding included."""

    fmt: Format
    planes: Planes
    rows: int


@dataclass(frozen=True)
class TileWork:
    """What a workgroup does to one tile, which begins at token0 and row0."""

    acts: Sequence[Buffer]  # the activations
    weights: Sequence[Weight]  # that share the tile
    token0: Expr
    row0: Expr
    # Called with (token, row, values): per weight the float32 results of the token for the rows from `row` on, one or a
    # vector of consecutive ones, all of them below the weight's rows.
    store: Callable[..., None]
    first: Expr = None  # the row of a stack of weights that is row 0 of these
    factors: RowFactors | None = None  # those of a norm that the kernel completes
    zero: Expr = None  # an int32 that is 0, which the compiler does not know
    # called with (token, row) as early as possible: what `store` gets after the values, or None: it gets no more
    early: Callable[[Expr, Expr], tuple] | None = None

    @property
    def rows(self) -> int:
        return self.weights[0].rows

    @property
    def has_floats(self) -> bool:
        return any(weight.fmt.kind == "float" for weight in self.weights)

    def viewed(self, span: int = 1) -> "TileWork":
        """The same with planes of `load.views`."""
        weights = [weight._replace(planes=load.views(weight.fmt, weight.planes, span)) for weight in self.weights]
        return replace(self, weights=weights)

    def weight_row(self, row: Expr, weight: Weight, height: int) -> Expr:
        """The row to load for `row` by tiles of that height: for one after the weight's last row, that."""
        row = T.min(row, weight.rows - 1) if weight.rows % height else row
        return T.Bind(row if self.first is None else self.first + row)

    def if_row(self, row: Expr, height: int) -> Expr | None:
        """Whether the row exists; None: all rows of tiles of that height do."""
        return row < self.rows if self.rows % height else None

    @staticmethod
    def if_token(token: Expr, m: int, width: int) -> Expr | None:
        """Whether the token exists; None: all tokens of tiles of that width do."""
        return token < m if m % width else None


TileT = TypeVar("TileT", bound=Tile)


class Gemm(ABC, Generic[TileT]):
    """The tile routine of one kernel. ValueError for a tile that does not fit."""

    choices: ClassVar[dict[str, tuple[int, ...]]]  # values of each field of the tile that are worth measuring
    rows_side_by_side = 1  # rows that neighbouring lanes hold when `store` is called
    row_stride = 1  # how far apart lanes are that hold a token's next rows then, where it prepares norms
    completes_norms = False  # whether it completes and prepares norms (`deferred_norm.py`)
    cuts_tiles = False  # whether tokens may be no multiple of a tile's
    factor_units: Units | None = None  # where in shared memory that it has the factors of a norm go
    threads: int  # of a workgroup
    thread: Expr  # as of `allocate`

    def __init__(self, of: Product, tile: TileT):
        self.of, self.tile, self.arch, self.k, self.weights = of, tile, of.arch, of.k, of.weights
        self.token_tiles = -(-of.m // tile.tokens)

    def prepared(self, state: Buffer, acts: list[Buffer]) -> list[Buffer]:
        """`TileWork.acts` of the activations' parameters. To be called after the last parameter: it may declare views,
        or emit a launch that makes them."""
        return acts

    @abstractmethod
    def allocate(self, thread: Expr) -> None:
        """Declares shared memory and registers inside the launch; `thread`: threadIdx.x."""

    @abstractmethod
    def emit(self, work: TileWork) -> None:
        """Emits the code of one tile."""

    @abstractmethod
    def loads(self) -> float:
        """Bytes that a thread has in flight. ValueError for a tile that is not worth measuring: a thread would hold or
        unroll too much."""

    def _staged(self, total: int) -> Iterator[Expr]:
        """Numbers of what this thread stages, of `total`; surplus threads repeat the last one."""
        return (number for number, _ in each_owned(self.thread, self.threads, total))

    def row_tiles(self, rows: int) -> int:
        return -(-rows // self.tile.rows)

    def is_quick(self, workgroups: int) -> bool:
        """Whether what a workgroup waits for decides how long the kernel takes: all of them are resident at once."""
        return False

    def live_and_zero(self, state: Buffer, token0: Expr, quick: bool) -> tuple[Expr, Expr]:
        """(whether a tile has live tokens, `TileWork.zero`)."""
        return token0 < live_rows(state, self.of.m), self.zero(state)

    def zero(self, state: Buffer) -> Expr:
        """`TileWork.zero`; None where the tile has no use for it."""
        return None

    def factors(self, norm: CompletedNorm | None, token0: Expr, first: Expr, quick: bool) -> RowFactors | None:
        """The factors of a tile's tokens, of a norm that the kernel completes; None without one. first: whether the
        workgroup writes the norm's scales."""
        if norm is None:
            return None
        tokens, units = self.tile.tokens, self.factor_units
        return RowFactors(self.arch, norm, tokens, token0, self.thread, self.threads, first, units)


# ---- steps
# Tiles that go through the columns in steps: both operands of a step are staged in shared memory, from which all
# threads of the workgroup multiply them. The next step's global loads are issued before this step's multiplications.

Loaded = tuple[list, list]  # registers of a step: of the activations, and for each weight


def workgroups(tile: Tile, of: Product) -> int:
    return -(-of.tokens // tile.tokens) * -(-of.rows // tile.rows)


class SteppedGemm(Gemm[TileT]):
    """columns: of a step."""

    columns: int

    @abstractmethod
    def _stage(self, work: TileWork, loaded: Loaded) -> None:
        """Registers to shared memory."""

    @abstractmethod
    def _multiply(self, work: TileWork) -> None:
        """Adds the products of what is in shared memory to the sums."""

    def _sum_up(self, work: TileWork) -> None:
        """The products of all columns."""
        self._stage(work, self._fetch(work, T.int32(0)))
        barrier()
        with T.serial(self.k // self.columns) as step:
            following = self._fetch(work, T.Bind(T.min(step + 1, self.k // self.columns - 1)))
            self._multiply(work)
            barrier()
            self._stage(work, following)
            barrier()

    def _fetch(self, work: TileWork, step: Expr) -> Loaded:
        """The global loads of a step."""
        return self._fetch_acts(work, step), self._fetch_weights(work, step)

    @abstractmethod
    def _fetch_acts(self, work: TileWork, step: Expr) -> list:
        """Those of activations."""

    @abstractmethod
    def _fetch_weights(self, work: TileWork, step: Expr) -> list:
        """Those of weights."""

    def _weight_row(self, work: TileWork, row: Expr, weight: Weight) -> Expr:
        """The row to load for row number `row` of the tile."""
        return work.weight_row(work.row0 + row, weight, self.tile.rows)
