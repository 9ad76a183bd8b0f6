"""Operators of mixers that keep a state for each sequence, and the gate after a mixer.

Rows of one slot are consecutive tokens of one sequence; `cells` says which cell has a slot's state and where states go
(schedules/runs.py). States are changed in place.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.base import CELLS_SLOT, OUTPUT_SLOT, ROWS_SLOT, STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor, activations

_Y, _STATES = Slot("output", ("Y",)), Slot("states", ("States",))


@dataclass(frozen=True, kw_only=True)
class Mixer(Operator):
    """What operators with states share: (rows, cells, inputs.., weights.., states) -> (float32 [m, columns],
    states). They have `single`: how many rows may be single ones."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """Of the result."""

    @abstractmethod
    def own(self) -> Iterator[Slot]:
        """Inputs and weights."""

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, CELLS_SLOT)
        yield from self.own()
        yield from (_STATES, _Y)

    def results(self) -> list[Tensor]:
        return [((self.m, self.columns), "float32")]

    @property
    def written(self) -> int:
        return 1

    @property
    def variant(self) -> str:
        single = vars(self)["single"]
        return "_rows" if single == self.m else "_mixed" if single else ""


@dataclass(frozen=True, kw_only=True)
class CausalConv(Mixer, name="causal_conv", sizes="{0.channels}x{0.taps}"):
    """act(conv(x) + b), conv over the last `taps` positions of each column: (rows, cells, x.., w.., [b], states).

        Y[p] = act(sum over t < taps of W[t] * X[p - taps + 1 + t] + B)

    gated: x is [B, C, X], and it is C * conv(B * X). parts: how many x and w there are, of as many columns each, side
    by side, each x float32 [m, columns or 3 * columns], each w float32 [columns, taps] flat. states: float32 [cells,
    taps - 1, channels], the last inputs, the oldest first.
    """

    channels: int
    taps: int
    single: int
    m: int
    gated: bool
    act: str
    bias: bool
    parts: int = 1

    def own(self) -> Iterator[Slot]:
        yield from (Slot("input", prefix="X"), Slot("weight", prefix="W"))
        if self.bias:
            yield Slot("weight", ("B",))

    @property
    def columns(self) -> int:
        return self.channels

    def operations(self) -> tuple[int, int]:
        return 2 * self.m * self.channels * self.taps, 0


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Mixer, name="delta_net", sizes="{0.key_heads}x{0.value_heads}x{0.d}"):
    """A gated delta rule (compiler/models/config.py: DeltaNetConfig): (rows, cells, qkv, beta, alpha, a, dt, states),
    or by_channel (rows, cells, qkv, beta, decay, states). d: columns of a head; eps: of the lengths of q and k.

        decay = exp(a * softplus(alpha + dt)), k and q divided by sqrt(their squares' sum + eps), q by sqrt(d) too
        M *= decay;  M += k t^T,  t = sigmoid(beta) * (v - M^T k);  y = M^T q

    by_channel: each channel of k, a row of M, has a decay of its own, which is given. float32: qkv [m, q, k and v of
    all heads], beta and alpha [m, value heads, padded], a and dt [value heads, padded], decay [m, value heads * d],
    states [cells, value heads, d of k, d of v] on the CPU, where on the GPU M is transposed.
    """

    key_heads: int
    value_heads: int
    d: int
    single: int
    m: int
    grouped: bool
    eps: float
    by_channel: bool = False

    def own(self) -> Iterator[Slot]:
        yield Slot("input", ("X", "Beta", "Decay" if self.by_channel else "Alpha"))
        if not self.by_channel:
            yield Slot("weight", ("A", "Dt"))

    @property
    def columns(self) -> int:
        return self.value_heads * self.d

    def operations(self) -> tuple[int, int]:
        return 8 * self.m * self.value_heads * self.d**2, 0  # two products, decay and update


@dataclass(frozen=True, kw_only=True)
class SsmScan(Mixer, name="ssm_scan", sizes="{0.heads}x{0.d}x{0.size}"):
    """Mamba-2: (rows, cells, x, [z], t, a, [d], [bias], states). d: columns of x of a head; size: of B and C.

        dt = softplus(t + bias);  S *= exp(a * dt);  S += dt * x B^T;  y = (S C + D * x) * silu(z)

    given: t is dt itself, without a bias. gated: with z and D; else y = S C. by_state: each column of x has its own t
    and D, and a number of a for each of B, as Mamba-1 (one head has all columns).

    float32: x [m, x of all heads, B and C of all groups], z [m, heads * d, padded], t [m, heads, padded], a, d and bias
    [heads, padded] (by_state: t [m, d], a [d * size], d [d]), states [cells, heads, d * size] on the GPU; on the CPU S
    is transposed.
    """

    heads: int
    d: int
    size: int
    groups: int
    single: int
    m: int
    given: bool = False
    gated: bool = True
    by_state: bool = False

    def own(self) -> Iterator[Slot]:
        yield Slot("input", ("X", "Z", "Dt") if self.gated else ("X", "Dt"))
        yield Slot("weight", ("A", *(["D"] if self.gated else []), *([] if self.given else ["Bias"])))

    @property
    def columns(self) -> int:
        return self.heads * self.d

    def operations(self) -> tuple[int, int]:
        return 6 * self.m * self.heads * self.d * self.size, 0


@dataclass(frozen=True, kw_only=True)
class ChannelDecay(Operator, name="channel_decay", sizes="{0.heads}x{0.d}"):
    """exp(a * softplus(x + dt)), what a delta net keeps of each channel: (x float32 [m, heads * d, padded], a [heads,
    padded], dt [heads * d, padded]) -> float32 [m, heads * d]. The d columns of a head share an a."""

    heads: int
    d: int
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("weight", ("A", "Dt")), _Y)

    def results(self) -> list[Tensor]:
        return [((self.m, self.heads * self.d), "float32")]


@dataclass(frozen=True, kw_only=True)
class Gate(Operator, name="gate", sizes="{0.k}"):
    """y * sigmoid(z), or y * silu(z): (x, z float32 [m, k], [g float32 [size]]); y is x, or with eps its RMS norm over
    each `size` columns, times g."""

    k: int
    m: int
    size: int
    eps: float | None
    silu: bool
    layout: str

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X", "Z")))
        if self.eps is not None:
            yield Slot("weight", ("G",))
        yield OUTPUT_SLOT

    def results(self) -> list[Tensor]:
        return activations(self.m, self.k, self.layout)

    @property
    def variant(self) -> str:
        return ("" if self.eps is None else "_norm") + ("_quantize" if self.layout else "")
