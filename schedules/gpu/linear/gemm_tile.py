"""The common part of all GEMM kernels: the product, a workgroup's tile of it, and the interface of tile routines
(`Gemm`).

A kernel launches `token_tiles` by `row_tiles` workgroups of `threads` threads. In the launch it calls `allocate`, then
`emit` for any number of kinds of tiles, of which each workgroup computes one (`gemm.py`). The routines:

    gemm_matrix.py                  AMD's matrix units, float16; gemm_matrix_int8.py: int8
    gemm_lanes.py, lane_tiles.py    cooperative matrices whose distribution over lanes is known
    gemm_coop.py                    other cooperative matrices
    gemm_dot.py                     without matrix units
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
    """The product that a kernel computes."""

    arch: Device
    layout: str  # layout of the activations
    formats: tuple[Format, ...]  # formats of the weights
    m: int  # tokens, or slots of experts
    k: int  # columns
    rows: int  # rows of all segments
    weights: int = 1  # weights of the same shape that share a tile (gate and up: 2)
    expert_slots: int = 0  # slots of a tile of one expert; 0 without experts

    @property
    def tokens(self) -> int:
        """The number of tokens that tiles must divide: the slots of one expert, or all tokens."""
        return self.expert_slots or self.m

    @property
    def has_floats(self) -> bool:
        return any(fmt.kind == "float" for fmt in self.formats)


def product_of(op: Multiplied, arch: Device) -> Product:
    """The product of an operator's kernel."""
    weights = 2 if isinstance(op, GateUp | ExpertGateUp) else 1
    m, expert_slots = (op.of.slots(op.m), op.tile) if isinstance(op, ExpertLinear | ExpertGateUp) else (op.m, 0)
    rows = sum(padded(n) for _, n in op.weights) // weights
    return Product(arch, op.layout_read, tuple(f for f, _ in op.weights), m, op.k, rows, weights, expert_slots)


@dataclass(frozen=True)
class Tile:
    """The size of a workgroup's tile: tokens, and rows of each weight."""

    tokens: int
    rows: int


class Weight(NamedTuple):
    """A weight. rows: number of rows, with padding."""

    fmt: Format
    planes: Planes
    rows: int


@dataclass(frozen=True)
class TileWork:
    """The work of a workgroup on a tile, which begins at token0 and row0."""

    acts: Sequence[Buffer]  # the activations
    weights: Sequence[Weight]  # the weights that share the tile
    token0: Expr
    row0: Expr
    # The routine must call store(token, row, values) for its results. values: for each weight the float32 result of the
    # token and row, or a vector for the rows from `row` on, all of which exist.
    store: Callable[..., None]
    first: Expr = None  # row 0 of these weights is this row of a stack of weights
    factors: RowFactors | None = None  # the factors of a norm that the kernel completes
    zero: Expr = None  # an int32 that is 0, which the compiler does not know
    # If not None, the routine may call early(token, row) before its sums are complete, and must then pass the result to
    # `store`, after the values.
    early: Callable[[Expr, Expr], tuple] | None = None

    @property
    def rows(self) -> int:
        return self.weights[0].rows

    @property
    def has_floats(self) -> bool:
        return any(weight.fmt.kind == "float" for weight in self.weights)

    def viewed(self, span: int = 1) -> "TileWork":
        """The same work, with the planes as `load.views` returns them."""
        weights = [weight._replace(planes=load.views(weight.fmt, weight.planes, span)) for weight in self.weights]
        return replace(self, weights=weights)

    def weight_row(self, row: Expr, weight: Weight, height: int) -> Expr:
        """The row to load for `row` in tiles of so many rows: itself, or the weight's last row if it does not exist."""
        row = T.min(row, weight.rows - 1) if weight.rows % height else row
        return T.Bind(row if self.first is None else self.first + row)

    def if_row(self, row: Expr, height: int) -> Expr | None:
        """Whether the row exists; None if all rows of tiles of this height do."""
        return row < self.rows if self.rows % height else None

    @staticmethod
    def if_token(token: Expr, m: int, width: int) -> Expr | None:
        """Whether the token exists; None if all tokens of tiles of this width do."""
        return token < m if m % width else None


TileT = TypeVar("TileT", bound=Tile)


class Gemm(ABC, Generic[TileT]):
    """The tile routine of one kernel. Raises ValueError for a tile that does not fit."""

    choices: ClassVar[dict[str, tuple[int, ...]]]  # for tuning: values of each field of the tile
    rows_side_by_side = 1  # number of rows that neighbouring lanes hold when `store` is called
    row_stride = 1  # distance between the lanes that hold neighbouring rows of a token then; needed to prepare norms
    completes_norms = False  # whether it can complete and prepare norms (`deferred_norm.py`)
    cuts_tiles = False  # whether the number of tokens need not be a multiple of a tile's
    factor_units: Units | None = None  # shared memory of the routine to use for the factors of a norm
    threads: int  # threads of a workgroup
    thread: Expr  # the argument of `allocate`

    def __init__(self, of: Product, tile: TileT):
        self.of, self.tile, self.arch, self.k, self.weights = of, tile, of.arch, of.k, of.weights
        self.token_tiles = -(-of.m // tile.tokens)

    def prepared(self, state: Buffer, acts: list[Buffer]) -> list[Buffer]:
        """`TileWork.acts` from the parameters of the activations. To be called after the last parameter is declared: it
        may declare views, or emit a launch that converts activations."""
        return acts

    @abstractmethod
    def allocate(self, thread: Expr) -> None:
        """Declares shared memory and registers, inside the launch. thread: threadIdx.x."""

    @abstractmethod
    def emit(self, work: TileWork) -> None:
        """Emits the code of one tile."""

    @abstractmethod
    def loads(self) -> float:
        """The bytes of loads that a thread has in flight. Raises ValueError for a tile with which a thread would need
        too many registers or too much code; tuning does not measure it."""

    def _staged(self, total: int) -> Iterator[Expr]:
        """The numbers, of 0 .. total-1, of the items that this thread stages. Threads without an item repeat the last
        one."""
        return (number for number, _ in each_owned(self.thread, self.threads, total))

    def row_tiles(self, rows: int) -> int:
        return -(-rows // self.tile.rows)

    def is_quick(self, workgroups: int) -> bool:
        """Whether all workgroups are resident at the same time, so that the latency of a workgroup is the kernel's
        time."""
        return False

    def live_and_zero(self, state: Buffer, token0: Expr, quick: bool) -> tuple[Expr, Expr]:
        """(condition whether a tile has live tokens, `TileWork.zero`)."""
        return token0 < live_rows(state, self.of.m), self.zero(state)

    def zero(self, state: Buffer) -> Expr:
        """`TileWork.zero`; None if the routine does not use it."""
        return None

    def factors(self, norm: CompletedNorm | None, token0: Expr, first: Expr, quick: bool) -> RowFactors | None:
        """The factors of a tile's tokens for a norm that the kernel completes; None without one. first: whether the
        workgroup writes the norm's scales."""
        if norm is None:
            return None
        tokens, units = self.tile.tokens, self.factor_units
        return RowFactors(self.arch, norm, tokens, token0, self.thread, self.threads, first, units)


# ---- steps
# Routines that stage both operands in shared memory, some columns in each step. All threads of the workgroup multiply
# from there. The global loads of the next step are issued before the multiplications of this step.

Loaded = tuple[list, list]  # registers with a step's loads: (of the activations, of the weights)


def workgroups(tile: Tile, of: Product) -> int:
    return -(-of.tokens // tile.tokens) * -(-of.rows // tile.rows)


class SteppedGemm(Gemm[TileT]):
    """A routine with such steps. columns: of a step."""

    columns: int

    @abstractmethod
    def _stage(self, work: TileWork, loaded: Loaded) -> None:
        """Stores the registers of a step to shared memory."""

    @abstractmethod
    def _multiply(self, work: TileWork) -> None:
        """Adds the products of the operands in shared memory to the sums."""

    def _sum_up(self, work: TileWork) -> None:
        """Adds up the products of all columns."""
        self._stage(work, self._fetch(work, T.int32(0)))
        barrier()
        with T.serial(self.k // self.columns) as step:
            following = self._fetch(work, T.Bind(T.min(step + 1, self.k // self.columns - 1)))
            self._multiply(work)
            barrier()
            self._stage(work, following)
            barrier()

    def _fetch(self, work: TileWork, step: Expr) -> Loaded:
        """Issues the global loads of a step."""
        return self._fetch_acts(work, step), self._fetch_weights(work, step)

    @abstractmethod
    def _fetch_acts(self, work: TileWork, step: Expr) -> list:
        """The loads of activations of a step."""

    @abstractmethod
    def _fetch_weights(self, work: TileWork, step: Expr) -> list:
        """The loads of weights of a step."""

    def _weight_row(self, work: TileWork, row: Expr, weight: Weight) -> Expr:
        """The row to load for row number `row` of the tile."""
        return work.weight_row(work.row0 + row, weight, self.tile.rows)
