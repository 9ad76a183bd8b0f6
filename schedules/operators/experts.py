"""The operators of a mixture of experts, and the order in which they process pairs of a row and an expert.

A router chooses `used` of `count` experts for each live row. The pair of a row and its j-th expert has the number row *
used + j. The weights of all experts are one packed matrix of count * n rows; expert e has the rows from e * n on.

A slot is a place for a pair: the operators compute one result row for each slot. There are two orders:

- Few rows (tile = 1): pair i is in slot i, and kernels read the expert of each slot from `Ids` int32 [m, used].
- Many rows (tile > 1): pairs are sorted by expert. The pairs of each expert are padded to whole tiles of `tile` slots,
  so that all slots of a tile have the same expert. `expert_order` computes this order:

    Slots   int32 [m, used]             the slot of each pair
    Pairs   int32 [slots]               the pair in each slot; -1: padding
    Groups  int32 [tiles + 2 count + 1] the expert of each tile (-1: unused; these are the last ones), then the first
                                        tile of each expert, the number of used tiles, the number of pairs of each
                                        expert

All sizes are static: `tiles` is the maximum over all choices of experts for m rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.operators.base import ACTIVATIONS_SLOT, OUTPUT_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import Tensor, activations, padded

GATINGS = (
    "softmax",  # probabilities over all experts
    "sigmoid",  # sigmoid of each logit
    "sqrt_softplus",  # square root of softplus of each logit
    "softmax_used",  # experts are chosen by their logits; softmax over the logits of the chosen experts
)
# Kinds of activations with numbers; the name of such an activation is the kind followed by its numbers. For all of them
# the result is f(gate) * g(up):
#   LIMITED + limit: silu(min(gate, limit)) * clamp(up, -limit, limit)
#   CUT + limit: min(silu(gate), limit) * clamp(up, -limit, limit)
#   SITU + a_b (Kimi K3): a tanh(gate / a) sigmoid(gate) * b tanh(up / b); for b = 0 the second factor is up
LIMITED, CUT, SITU = "silu_max_", "silu_cut_", "situ_"
_CHOICE = Slot("output", ("Ids", "Weights"))
_GROUPS = Slot("input", ("Groups",), slots=True)
MIN_SUM = 6.103515625e-5  # lower bound of the sum that normalizes weights, as in llama.cpp: the least normal float16


@dataclass(frozen=True)
class Experts:
    """Sizes of a mixture of experts; see the module's docstring."""

    count: int  # experts of a layer
    used: int  # experts that a row uses
    tile: int = 1  # slots of a tile; 1: pairs are not sorted

    def tiles(self, m: int) -> int:
        """The largest number of tiles for m rows: each of up to min(count, pairs) experts has one tile that is not
        full."""
        pairs = m * self.used
        return min(pairs, (pairs + min(self.count, pairs) * (self.tile - 1)) // self.tile)

    def slots(self, m: int) -> int:
        """The largest number of slots for m rows."""
        return self.tiles(m) * self.tile

    def groups(self, m: int) -> int:
        """The number of elements of `Groups` for m rows."""
        return self.tiles(m) + 2 * self.count + 1


def numbers_of(act: str) -> tuple[str, tuple[float, ...]]:
    """(kind, numbers) of an activation's name. For one without numbers: (name, ())."""
    kind = next((kind for kind in (LIMITED, CUT, SITU) if act.startswith(kind)), act)
    return kind, tuple(map(float, act.removeprefix(kind).split("_"))) if kind != act else ()


# ---- the operators


@dataclass(frozen=True, kw_only=True)
class _ExpertsOperator(Operator):
    """experts: number of experts of a layer. used: experts that a row uses. tile: slots of a tile."""

    experts: int
    used: int
    tile: int

    @property
    def of(self) -> Experts:
        return Experts(self.experts, self.used, self.tile)

    @property
    def share(self) -> float:
        """The expected fraction of the experts that m rows use, if each row chooses at random."""
        return 1.0 - (1.0 - self.used / self.experts) ** self.m

    def choice(self) -> list[Tensor]:
        """(shape, dtype) of the experts of each row, and of their weights."""
        return [((self.m, self.used), "int32"), ((self.m, self.used), "float32")]


@dataclass(frozen=True, kw_only=True)
class Routing(_ExpertsOperator):
    """How a router chooses experts, and their weights. gating: one of GATINGS. normalize: weights are divided by their
    sum. scale: a factor of all weights. bias: a vector is added to the gating's results for the choice, but not to the
    weights. factors: weights are multiplied by a factor of each expert. groups: number of groups of consecutive
    experts; experts are chosen only from the best `groups_used` groups."""

    gating: str
    normalize: bool
    scale: float
    bias: bool
    factors: bool
    groups: int
    groups_used: int

    def routing_slots(self) -> Iterator[Slot]:
        return named("weight", B=self.bias, F=self.factors)


@dataclass(frozen=True, kw_only=True)
class Route(Routing, name="route", sizes="{0.experts}"):
    """The choice of experts from logits: (logits float32 [m, n], [selection bias], [experts' factors], workspace..) ->
    (ids int32 [m, used], weights float32 [m, used]). n: columns of the logits, with padding. This operator's kernel
    does not take the workspace; it is for `NormRoute`, which a pass may make of this operator."""

    n: int
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("L",), columns=self.experts))
        yield from self.routing_slots()
        yield _CHOICE

    def results(self) -> list[Tensor]:
        return self.choice()

    @property
    def arguments(self) -> int:
        return 2 + self.bias + self.factors


@dataclass(frozen=True, kw_only=True)
class NormRoute(Routing, name="norm_route", sizes="{0.fmt}_{0.experts}x{0.k}"):
    """`RmsNorm` of one row, the linear layer W of a router, and `Route` of its result: (x, g, W, [W's bias], [selection
    bias], [experts' factors], workspace..) -> (the norm's results.., ids, weights). fmt: format of W. router_bias:
    whether W has a bias. eps, layout, both: see RmsNorm."""

    fmt: str
    k: int
    eps: float
    layout: str
    both: bool
    router_bias: bool
    m: int = 1

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("weight", ("G",)))
        yield Slot("weight", prefix="W_", matrix=(self.fmt, self.k))
        yield from named("weight", WB=self.router_bias)
        yield from self.routing_slots()
        yield from (Slot("work", ("Logits",)), Slot("zero", ("Arrived",)), OUTPUT_SLOT, _CHOICE)

    def results(self) -> list[Tensor]:
        return activations(1, self.k, self.layout) + [((1, self.k), "float32")] * self.both + self.choice()

    def operations(self) -> tuple[int, int]:
        return 2 * self.k * self.experts, 0

    @property
    def weights(self):
        return [(lookup(self.fmt), self.experts)]


@dataclass(frozen=True, kw_only=True)
class ExpertOrder(_ExpertsOperator, name="expert_order", sizes="{0.experts}"):
    """The order of pairs sorted by expert: (ids,) -> (slots, pairs, groups); see the module's docstring."""

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("Ids",), slots=True), Slot("output", ("Slots", "Pairs", "Groups")))

    def results(self) -> list[Tensor]:
        of, m = self.of, self.m
        return [((m, of.used), "int32"), ((of.slots(m),), "int32"), ((of.groups(m),), "int32")]


@dataclass(frozen=True, kw_only=True)
class Gather(_ExpertsOperator, name="gather", sizes="{0.k}"):
    """Copies the rows of x to slots: (x float32 [m, k], [pairs], [weights]) -> a row of k columns for each slot, in
    `layout`. pairs: for tile > 1. weighted: rows are multiplied by the weights of their pairs."""

    k: int
    weighted: bool
    layout: str

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)))
        if self.tile > 1:
            yield Slot("input", ("Pairs",), slots=True)
        yield from named("input", Weights=self.weighted)
        yield replace(OUTPUT_SLOT, slots=True)

    def results(self) -> list[Tensor]:
        return activations(self.of.slots(self.m), self.k, self.layout)


@dataclass(frozen=True, kw_only=True)
class _ExpertProduct(_ExpertsOperator):
    """A product with the experts' matrices. n: rows of an expert's matrix; k: columns."""

    n: int
    k: int

    def stack(self, prefix: str, fmt: str) -> Slot:
        return Slot("weight", prefix=prefix, matrix=(fmt, self.k), share=self.share)

    def operations(self) -> tuple[int, int]:
        return 2 * self.m * self.used * self.k * self.n * len(self.formats), 0

    @property
    def label(self) -> str:
        formats = "_".join(dict.fromkeys(self.formats))
        return f"{self.name}_{formats}_{self.experts}x{self.n}x{self.k}_m{self.m}"


@dataclass(frozen=True, kw_only=True)
class ExpertGateUp(_ExpertProduct, name="expert_gate_up"):
    """act(x G^T) * (x U^T) with the expert of each slot: (x, groups or ids, G, U, [G's bias, U's bias]) -> a row of n
    columns for each slot, in `layout`. gate, up: formats of G and U. shared: x has one row for all slots of a row of
    the step; otherwise one for each slot."""

    gate: str
    up: str
    biases: bool
    act: str
    layout_in: str
    layout: str
    shared: bool

    @property
    def formats(self) -> list[str]:
        return [self.gate, self.up]

    @property
    def x_rows(self) -> int:
        return self.m if self.shared else self.of.slots(self.m)

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ACTIVATIONS_SLOT, _GROUPS)
        yield from (self.stack("G_", self.gate), self.stack("U_", self.up))
        if self.biases:
            yield Slot("weight", ("GB", "UB"), share=self.share)
        yield replace(OUTPUT_SLOT, slots=True)

    def results(self) -> list[Tensor]:
        return activations(self.of.slots(self.m), self.n, self.layout)


@dataclass(frozen=True, kw_only=True)
class ExpertLinear(_ExpertProduct, name="expert_linear"):
    """x W^T with the expert of each slot: (x, groups or ids, W, [bias]) -> float32 [slots, padded(n)]."""

    fmt: str
    bias: bool
    layout: str

    @property
    def formats(self) -> list[str]:
        return [self.fmt]

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ACTIVATIONS_SLOT, _GROUPS, self.stack("W_", self.fmt))
        yield from named("weight", self.share, WB=self.bias)
        yield from self.ends()
        yield Slot("output", ("Y",), columns=self.n, slots=self.tile > 1)

    def ends(self) -> Iterator[Slot]:
        """The slots of further inputs, after W and its bias."""
        return iter(())

    def results(self) -> list[Tensor]:
        return [((self.of.slots(self.m), padded(self.n)), "float32")]


@dataclass(frozen=True, kw_only=True)
class ExpertDown(ExpertLinear, name="expert_down"):
    """`ExpertLinear` and `Combine` in one kernel, for pairs that are not sorted: (x, ids, W, [bias], [weights],
    [residual]) -> float32 [m, padded(n)]."""

    weighted: bool
    residual: bool

    def ends(self) -> Iterator[Slot]:
        return named("input", Weights=self.weighted, R=self.residual)

    def results(self) -> list[Tensor]:
        return [((self.m, padded(self.n)), "float32")]


@dataclass(frozen=True, kw_only=True)
class Combine(_ExpertsOperator, name="combine", sizes="{0.n}"):
    """The sum over the slots of each row: (y float32 [slots, n], slots, [weights], [residual]) -> float32 [m, n].
    weighted: a slot's row is multiplied by its pair's weight. residual: it is added to the sum."""

    n: int
    weighted: bool
    residual: bool

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("input", ("Slots",), slots=True))
        yield from named("input", Weights=self.weighted, R=self.residual)
        yield OUTPUT_SLOT

    def results(self) -> list[Tensor]:
        return [((self.m, self.n), "float32")]
