"""What the operators of a mixture of experts compute, and the order in which rows reach their experts.

A router gives each live row `used` of `count` experts: a pair (row, j) is number row * used + j. An expert's weights
are n rows of a stack of matrices: row e * n + i of a packed matrix of count * n rows.

Few rows (tiles of one slot): the number of a pair is that of its slot, and the kernels take the expert of each slot
from `Ids` [m, used].

Many rows: pairs are sorted by expert, and each expert's pairs padded to whole tiles of `tile` slots, so that a tile
needs one expert. `expert_order` makes

    Slots   int32 [m, used]             slot of each pair
    Pairs   int32 [slots]               pair in each slot; -1: padding
    Groups  int32 [tiles + 2 count + 1] expert of each tile (-1: unused, after the others), the first tile of each
                                        expert, the number of used tiles, the number of pairs of each expert

All sizes are static: `tiles` is the maximum for any assignment of m rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.operators.base import ACTIVATIONS_SLOT, OUTPUT_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import Tensor, activations, padded

GATINGS = (
    "softmax",  # probabilities over all experts
    "sigmoid",  # of each logit
    "sqrt_softplus",  # the root of softplus of each logit
    "softmax_used",  # the logits choose, softmax over the chosen ones
)
# In front of an activation's numbers. A limit: up is between -limit and limit, and SiLU's argument, or else its result,
# at most the limit. Two of Kimi K3: a tanh(gate / a) sigmoid(gate) * b tanh(up / b); with b = 0 up as it is
LIMITED, CUT, SITU = "silu_max_", "silu_cut_", "situ_"
_CHOICE = Slot("output", ("Ids", "Weights"))
_GROUPS = Slot("input", ("Groups",), slots=True)
MIN_SUM = 6.103515625e-5  # lower bound of the sum that weights are divided by: llama.cpp (float16's smallest normal)


@dataclass(frozen=True)
class Experts:
    """count: experts of a layer; used: of them by a row; tile: slots of a tile; 1: pairs are not sorted."""

    count: int
    used: int
    tile: int = 1

    def tiles(self, m: int) -> int:
        """Tiles of m rows at most: each of up to min(count, pairs) experts has one tile that is not full."""
        pairs = m * self.used
        return min(pairs, (pairs + min(self.count, pairs) * (self.tile - 1)) // self.tile)

    def slots(self, m: int) -> int:
        return self.tiles(m) * self.tile

    def groups(self, m: int) -> int:
        """Entries of `Groups`."""
        return self.tiles(m) + 2 * self.count + 1


def numbers_of(act: str) -> tuple[str, tuple[float, ...]]:
    """The kind of an activation (LIMITED, CUT or SITU), and its numbers; of one without any its name, and ()."""
    kind = next((kind for kind in (LIMITED, CUT, SITU) if act.startswith(kind)), act)
    return kind, tuple(map(float, act.removeprefix(kind).split("_"))) if kind != act else ()


# ---- the operators


@dataclass(frozen=True, kw_only=True)
class _ExpertsOperator(Operator):
    """experts: of a layer; used: of them by a row; tile: as of Experts."""

    experts: int
    used: int
    tile: int

    @property
    def of(self) -> Experts:
        return Experts(self.experts, self.used, self.tile)

    @property
    def share(self) -> float:
        """Of the experts that m rows are expected to use, if each chooses at random."""
        return 1.0 - (1.0 - self.used / self.experts) ** self.m

    def choice(self) -> list[Tensor]:
        """The experts of each row, and their weights."""
        return [((self.m, self.used), "int32"), ((self.m, self.used), "float32")]


@dataclass(frozen=True, kw_only=True)
class Routing(_ExpertsOperator):
    """How experts are chosen. gating: one of GATINGS; normalize: weights add up to one; scale: of weights; bias: a
    vector is added for the choice only; factors: of each expert; groups: of neighbouring experts, of which
    `groups_used` take part."""

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
    """(logits [m, n], [selection bias], [experts' factors], workspace..) -> (ids int32 [m, used], weights [m, used]).
    The workspace is that of norm_route."""

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
    """An RMS norm of one row, and the route of its product with W: (x, g, W, [W's bias], [selection bias], [experts'
    factors], workspace..) -> (the norm's results.., ids, weights). fmt, router_bias: of W; eps, layout and both as of
    RmsNorm."""

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
    """Rows sorted by expert: (ids,) -> (slots, pairs, groups)."""

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("Ids",), slots=True), Slot("output", ("Slots", "Pairs", "Groups")))

    def results(self) -> list[Tensor]:
        of, m = self.of, self.m
        return [((m, of.used), "int32"), ((of.slots(m),), "int32"), ((of.groups(m),), "int32")]


@dataclass(frozen=True, kw_only=True)
class Gather(_ExpertsOperator, name="gather", sizes="{0.k}"):
    """The rows of x in slots, times their weights: (x [m, k], [pairs], [weights]). Without pairs they are not
    sorted."""

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
    """n: rows of an expert's matrix, k: columns."""

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
    """act(x G^T) * (x U^T) of each slot's expert: (x, groups, G, U, [G's bias, U's bias]). gate, up: formats; shared: x
    has one row for all slots of a row, instead of one for each slot."""

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
    """x W^T of each slot's expert: (x, groups, W, [bias]) -> float32 [slots, padded(n)]."""

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
        """Further inputs."""
        return iter(())

    def results(self) -> list[Tensor]:
        return [((self.of.slots(self.m), padded(self.n)), "float32")]


@dataclass(frozen=True, kw_only=True)
class ExpertDown(ExpertLinear, name="expert_down"):
    """combine(expert_linear) of rows that are not sorted: (x, ids, W, [bias], [weights], [residual]) -> float32 [m,
    padded(n)]."""

    weighted: bool
    residual: bool

    def ends(self) -> Iterator[Slot]:
        return named("input", Weights=self.weighted, R=self.residual)

    def results(self) -> list[Tensor]:
        return [((self.m, padded(self.n)), "float32")]


@dataclass(frozen=True, kw_only=True)
class Combine(_ExpertsOperator, name="combine", sizes="{0.n}"):
    """The sum of a row's slots, times their weights: (y, slots, [weights], [residual]) -> float32 [m, n]."""

    n: int
    weighted: bool
    residual: bool

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("input", ("Slots",), slots=True))
        yield from named("input", Weights=self.weighted, R=self.residual)
        yield OUTPUT_SLOT

    def results(self) -> list[Tensor]:
        return [((self.m, self.n), "float32")]
