"""Embedding, norms and linear layers: operators that read rows of activations, and most of a model's weights.

A linear layer may compute the RMS norm of its input (`eps`), complete one whose parts the layer before prepared
(`norm_in`), and prepare the next one (`norm_out`): schedules/gpu/linear/deferred_norm.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.operators.base import ACTIVATIONS_SLOT, OUTPUT_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import SUMMED, Tensor, activations, kind_of, output_rows, padded

NormPlace = Literal["launch", "computed", "deferred"]  # a norm's: a kernel of its own, `eps`, `norm_in` and `norm_out`
SCALE_SLOT = Slot("output", ("NewScale",))  # of a norm, for the layers that complete the next one


@dataclass(frozen=True, kw_only=True)
class Embed(Operator, name="embed", sizes="{0.fmt}"):
    """Rows of the embedding table times `scale`: (tokens int32 [m], [features [m, features]], table) -> float32 [m, k].
    features: a negative token's row is the first k columns of its own (0: there are none); of: their dtype."""

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
    """What norms of rows share. rows: which ones the result has (`output_rows`); layout: of the result; both: after its
    tensors there is the float32 result."""

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
    """x / rms(x) * g: (x, g). scale_out: at the end of the results there is 1 / rms(x), float32 [rows]."""

    scale_out: bool = False

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("weight", ("G",)), OUTPUT_SLOT)
        if self.scale_out:
            yield SCALE_SLOT

    def results(self) -> list[Tensor]:
        return super().results() + [((output_rows(self.rows, self.m),), "float32")] * self.scale_out


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Norm, name="layer_norm"):
    """(x - mean(x)) / deviation(x) * g + b: (x, g, [b])."""

    bias: bool

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)))
        yield from (Slot("weight", ("G", "B") if self.bias else ("G",)), OUTPUT_SLOT)


@dataclass(frozen=True, kw_only=True)
class Quantize(Operator, name="quantize", sizes="{0.k}"):
    """Rows in a layout: (x float32 [m, k],). rotation: each so many columns are multiplied by a Hadamard matrix before,
    see `Attention.rotation`; 0: none. The layout "" only with that."""

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
    """Of a linear layer that may compute or complete a norm; layout: of its input."""
    if eps is None:
        yield ACTIVATIONS_SLOT
    else:
        yield from (Slot("input", ("X",)), Slot("weight", ("G",)))
    if norm_in is not None:
        yield Slot("input", ("Squares", "Scale") if kind_of(layout) == "lanes" else ("Squares",))


def prepared_inputs(layout: str) -> Iterator[Slot]:
    """Of an operator that prepares the norm of its result in that layout; "": it does not."""
    if layout:
        yield Slot("weight", ("NG",))
        yield from named("input", NS=kind_of(layout) == "lanes")


def prepared_outputs(layout: str) -> Iterator[Slot]:
    """The same: after its other outputs."""
    if layout:
        yield Slot("output", (*(["Hn"] if kind_of(layout) == "lanes" else ["An", "Sn"]), "NewSquares"))


def prepared_results(m: int, n: int, layout: str) -> list[Tensor]:
    """The same: x * g in the layout, and sums of squares."""
    if not layout:
        return []
    return [*activations(m, n, layout), ((m, n // SUMMED[kind_of(layout)]), "float32")]


def _stores_scale(op: "Linear | GateUp") -> bool:
    """Whether it completes a norm whose scales the layers that prepare the next one read."""
    return op.norm_in is not None and kind_of(op.layout_read) == "lanes"


@dataclass(frozen=True, kw_only=True)
class Linear(Operator, name="linear"):
    """x W^T for each W, plus biases and a residual: (x, [g], [squares, [scale]], (W, [bias]).., [residual], [g, [scale]
    of the norm that it prepares]) -> float32 [m, padded(n)] for each W.

    segments  (format, rows) of each W; biases: which of them have one
    layout    of x
    eps       of a norm of x that it computes, whose weight g follows x; norm_in: of one that it completes; norm_out:
              the layout in which it prepares one ("": it does not), and x * g and squares follow its result. Those of
              the layout "lanes" take a scale, and the scales of one that is completed are the last result
    exact     x stays float32
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
        """Whether it is one product without a residual."""
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
    """x W^T with a matrix of a stack for each head's columns: (x [m, heads * k], W) -> float32 [m, heads * n]."""

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
    """act(x G^T) * (x U^T): (x, [g], [squares, [scale]], G, U) -> n columns in `layout`. gate, up: formats; eps and
    norm_in as of Linear."""

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
