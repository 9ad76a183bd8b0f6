"""The operators for embeddings, norms and linear layers, which read most of a model's weights.

There are three ways to compute the RMS norm before a linear layer: by a kernel of its own (`RmsNorm`), by the linear
layer (`eps`), or shared between two linear layers: the first one prepares the norm of its result (`norm_out`), the
next one completes it (`norm_in`). schedules/gpu/linear/deferred_norm.py explains the third.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.operators.base import ACTIVATIONS_SLOT, OUTPUT_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import SUMMED, Tensor, activations, kind_of, output_rows, padded

NormPlace = Literal["launch", "computed", "deferred"]  # the three ways to compute a norm, in the order above
SCALE_SLOT = Slot("output", ("NewScale",))  # 1 / rms of each row, for layers that prepare or complete a later norm


@dataclass(frozen=True, kw_only=True)
class Embed(Operator, name="embed", sizes="{0.fmt}"):
    """Rows of the embedding table, times `scale`: (tokens int32 [m], [features [m, features]], table) -> float32 [m,
    k]. features: columns of the argument `features`, whose first k columns replace the row of a negative token; 0: no
    such argument. of: the dtype of the argument `features`."""

    fmt: str
    vocab: int
    k: int
    m: int
    scale: float = 1.0
    features: int = 0
    of: str = "float32"

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("tokens",)))
        if self.features:
            yield Slot("input", ("features",))
        yield Slot("weight", until="X", matrix=(self.fmt, self.k), rows=self.vocab)
        yield OUTPUT_SLOT

    def results(self) -> list[Tensor]:
        return [((self.m, self.k), "float32")]

    @property
    def weights(self):
        return [(lookup(self.fmt), self.vocab)]


@dataclass(frozen=True, kw_only=True)
class Norm(Operator):
    """The base class of norms of rows of k columns. rows: which rows the result has (see `output_rows`). layout: the
    layout of the result. both: the float32 result is also returned, after the tensors of the layout."""

    k: int
    m: int
    eps: float
    layout: str
    rows: str
    both: bool = False

    def results(self) -> list[Tensor]:
        rows = output_rows(self.rows, self.m)
        return activations(rows, self.k, self.layout) + [((rows, self.k), "float32")] * self.both

    @property
    def label(self) -> str:
        what = "_both" if self.both else "_quantize" if self.layout else ""
        which = "" if self.rows == "all" else f"_{self.rows.partition(':')[0]}"
        return f"{self.name}{what}_{self.k}_m{self.m}{which}"


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Norm, name="rms_norm"):
    """x / rms(x) * g, where rms(x) = sqrt(mean(x*x) + eps): (x float32 [m, k], g). scale_out: the last result is
    1 / rms(x), float32 [rows]."""

    scale_out: bool = False

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("weight", ("G",)), OUTPUT_SLOT)
        if self.scale_out:
            yield SCALE_SLOT

    def results(self) -> list[Tensor]:
        return super().results() + [((output_rows(self.rows, self.m),), "float32")] * self.scale_out


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Norm, name="layer_norm"):
    """(x - mean(x)) / sqrt(variance(x) + eps) * g + b: (x float32 [m, k], g, [b])."""

    bias: bool

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)))
        yield from (Slot("weight", ("G", "B") if self.bias else ("G",)), OUTPUT_SLOT)


@dataclass(frozen=True, kw_only=True)
class Quantize(Operator, name="quantize", sizes="{0.k}"):
    """The conversion of rows to a layout: (x float32 [m, k],). rotation: before that, each block of so many columns is
    multiplied by a Hadamard matrix, see `Attention.rotation`; 0: none. The layout "" (float32) is allowed only with a
    rotation."""

    k: int
    m: int
    layout: str
    rotation: int = 0

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), OUTPUT_SLOT)

    def results(self) -> list[Tensor]:
        return activations(self.m, self.k, self.layout)

    @property
    def variant(self) -> str:
        return f"_rotated{self.rotation}" if self.rotation else ""


def _inputs(eps: float | None, norm_in: float | None, layout: str) -> Iterator[Slot]:
    """The slots of x, and of what a linear layer needs to compute or complete its norm. layout: that of x."""
    if eps is None:
        yield ACTIVATIONS_SLOT
    else:
        yield from (Slot("input", ("X",)), Slot("weight", ("G",)))
    if norm_in is not None:
        yield Slot("input", ("Squares", "Scale") if kind_of(layout) == "lanes" else ("Squares",))


def prepared_inputs(layout: str) -> Iterator[Slot]:
    """The input slots that an operator needs to prepare the norm of its result in `layout`; none for ""."""
    if layout:
        yield Slot("weight", ("NG",))
        yield from named("input", NS=kind_of(layout) == "lanes")


def prepared_outputs(layout: str) -> Iterator[Slot]:
    """The output slots of the prepared norm, which come after the operator's other outputs."""
    if layout:
        yield Slot("output", (*(["Hn"] if kind_of(layout) == "lanes" else ["An", "Sn"]), "NewSquares"))


def prepared_results(m: int, n: int, layout: str) -> list[Tensor]:
    """(shape, dtype) of the outputs of the prepared norm: x * g in the layout, and sums of squares."""
    if not layout:
        return []
    return [*activations(m, n, layout), ((m, n // SUMMED[kind_of(layout)]), "float32")]


def _stores_scale(op: "Linear | GateUp") -> bool:
    """Whether the operator completes a norm and returns its scales: in the layout "lanes", layers that prepare a later
    norm read them."""
    return op.norm_in is not None and kind_of(op.layout_read) == "lanes"


@dataclass(frozen=True, kw_only=True)
class Linear(Operator, name="linear"):
    """x W^T for each matrix W, plus biases and a residual: (x, [g], [squares, [scale]], (W, [bias]).., [residual], [g,
    [scale] of the prepared norm]) -> (float32 [m, padded(n)] for each W.., [outputs of the prepared norm], [scales]).

    segments  (format, rows) of each W
    k         columns of each W
    layout    the layout of x
    biases    for each W, whether it has a bias
    eps       not None: the kernel computes an RMS norm of x with this eps; the norm's weight g follows x
    norm_in   not None: the kernel completes an RMS norm of x with this eps; sums of squares follow x
    norm_out  not "": the kernel prepares the RMS norm of its result in this layout, with the weight g after the
              residual, and also returns x * g and sums of squares
    exact     x stays float32

    In the layout "lanes" a norm that is prepared or completed takes a scale, and a norm that is completed returns its
    scales as the last result.
    """

    segments: tuple[tuple[str, int], ...]
    k: int
    m: int
    layout: str
    biases: tuple[bool, ...]
    residual: bool = False
    eps: float | None = None
    norm_in: float | None = None
    norm_out: str = ""
    exact: bool = field(default=False, compare=False)

    @property
    def formats(self) -> list[str]:
        return [fmt for fmt, _ in self.segments]

    @property
    def plain(self) -> bool:
        """Whether there is only one matrix, and no residual."""
        return len(self.segments) == 1 and not self.residual

    def slots(self) -> Iterator[Slot]:
        yield STATE_SLOT
        yield from _inputs(self.eps, self.norm_in, self.layout)
        for i, ((fmt, _), biased) in enumerate(zip(self.segments, self.biases, strict=True)):
            yield Slot("weight", prefix=f"W{i}_", matrix=(fmt, self.k))
            if biased:
                yield Slot("weight", (f"bias{i}",))
        yield from named("input", R=self.residual)
        yield from prepared_inputs(self.norm_out)
        for i, (_, n) in enumerate(self.segments):
            yield Slot("output", (f"Y{i}",), columns=n)
        yield from prepared_outputs(self.norm_out)
        if _stores_scale(self):
            yield SCALE_SLOT

    def results(self) -> list[Tensor]:
        found: list[Tensor] = [((self.m, padded(n)), "float32") for _, n in self.segments]
        found += prepared_results(self.m, self.segments[0][1], self.norm_out)
        return found + [((self.m,), "float32")] * _stores_scale(self)

    @property
    def label(self) -> str:
        sizes = f"{sum(n for _, n in self.segments)}x{self.k}_m{self.m}"
        return f"{_normed(self)}linear_{_formats(self.formats)}_{sizes}"

    def operations(self) -> tuple[int, int]:
        return 2 * self.m * self.k * sum(n for _, n in self.segments), 0

    @property
    def weights(self):
        return [(lookup(fmt), n) for fmt, n in self.segments]


@dataclass(frozen=True, kw_only=True)
class HeadLinear(Operator, name="head_linear", sizes="{0.fmt}_{0.heads}x{0.n}x{0.k}"):
    """x W^T for each head, with a matrix [n, k] of its own: (x [m, heads * k], W) -> float32 [m, heads * n]. W is the
    stack of the heads' matrices."""

    fmt: str
    heads: int
    n: int
    k: int
    m: int
    layout: str

    @property
    def formats(self) -> list[str]:
        return [self.fmt]

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ACTIVATIONS_SLOT)
        yield Slot("weight", prefix="W_", matrix=(self.fmt, self.k))
        yield OUTPUT_SLOT

    def results(self) -> list[Tensor]:
        return [((self.m, self.heads * self.n), "float32")]

    def operations(self) -> tuple[int, int]:
        return 2 * self.m * self.heads * self.k * self.n, 0


@dataclass(frozen=True, kw_only=True)
class GateUp(Operator, name="gate_up"):
    """act(x G^T) * (x U^T): (x, [g], [squares, [scale]], G, U) -> (m rows of n columns in `layout`, [scales]). gate,
    up: formats of G and U. layout_in: the layout of x. eps, norm_in: see Linear."""

    gate: str
    up: str
    n: int
    k: int
    m: int
    layout_in: str
    layout: str
    act: str = "silu"
    eps: float | None = None
    norm_in: float | None = None

    @property
    def formats(self) -> list[str]:
        return [self.gate, self.up]

    def slots(self) -> Iterator[Slot]:
        yield STATE_SLOT
        yield from _inputs(self.eps, self.norm_in, self.layout_in)
        yield Slot("weight", prefix="G_", matrix=(self.gate, self.k))
        yield Slot("weight", prefix="U_", matrix=(self.up, self.k))
        yield OUTPUT_SLOT
        if _stores_scale(self):
            yield SCALE_SLOT

    def results(self) -> list[Tensor]:
        scales: list[Tensor] = [((self.m,), "float32")] * _stores_scale(self)
        return activations(self.m, self.n, self.layout) + scales

    @property
    def label(self) -> str:
        return f"{_normed(self)}gate_up_{_formats(self.formats)}_{self.n}x{self.k}_m{self.m}"

    def operations(self) -> tuple[int, int]:
        return 4 * self.m * self.k * self.n, 0


def _formats(formats: list[str]) -> str:
    return "_".join(dict.fromkeys(formats))


def _normed(op: Linear | GateUp) -> str:
    return "rms_norm_" if op.eps is not None or op.norm_in is not None else ""
