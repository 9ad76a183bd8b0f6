"""The operators of mixers that keep a state for each sequence, and of the gate after a mixer.

Rows with the same slot are consecutive tokens of one sequence. The argument `cells` has the numbers of the cells from
which a slot's state is read, and to which new states are written (schedules/runs.py). States are changed in place.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.base import CELLS_SLOT, OUTPUT_SLOT, ROWS_SLOT, STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor, activations

_Y, _STATES = Slot("output", ("Y",)), Slot("states", ("States",))


@dataclass(frozen=True, kw_only=True)
class Mixer(Operator):
    """The base class of operators with states: (rows, cells, inputs.., weights.., states) -> (float32 [m, columns],
    states). Subclasses have a field `single`: the largest number of single rows."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """The columns of the result."""

    @abstractmethod
    def own(self) -> Iterator[Slot]:
        """The slots of inputs and weights."""

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
    """A causal convolution of each channel over its last `taps` positions: (rows, cells, x.., w.., [b], states). At
    position p:

        Y[p] = act(sum over t < taps of W[t] * X[p - taps + 1 + t] + B)

    gated: the columns of x are [B, C, X], and the result is C * conv(B * X). parts: the channels are divided equally
    between so many arguments x and w. Each x is float32 [m, channels / parts], or if gated [m, 3 * channels]; each w is
    float32 [channels / parts * taps], with the taps of a channel consecutive. states: float32 [cells, taps - 1,
    channels], the last inputs, the oldest first.
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
    """A gated delta rule (compiler/models/config.py: DeltaNetConfig): (rows, cells, qkv, beta, alpha, a, dt, states);
    with by_channel (rows, cells, qkv, beta, decay, states). For each token and value head, with M, the head's state:

        decay = exp(a * softplus(alpha + dt))
        k = k / sqrt(sum(k*k) + eps);  q = q / sqrt(sum(q*q) + eps) / sqrt(d)
        M *= decay;  M += k t^T,  t = sigmoid(beta) * (v - M^T k);  y = M^T q

    d: columns of a head. grouped: consecutive value heads share a key head; otherwise a value head has the key head
    `value head % key_heads`. by_channel: each row of M has its own decay, given as an argument.

    All are float32: qkv [m, columns of q, k and v of all heads], beta and alpha [m, value heads, padded], a and dt
    [value heads, padded], decay [m, value heads * d], states [cells, value heads, d, d]. On the CPU the rows of a state
    are those of M; on the GPU M is stored transposed.
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
    """The scan of Mamba-2: (rows, cells, x, [z], t, a, [D], [bias], states). For each token and head, with S [d, size],
    the head's state:

        dt = softplus(t + bias);  S *= exp(a * dt);  S += dt * x B^T;  y = (S C + D * x) * silu(z)

    d: columns of x for each head. size: elements of B, and of C. groups: number of different B and C; consecutive heads
    share one. given: t is dt itself, and there is no bias. gated: false: y = S C, without z and D. by_state: as in
    Mamba-1, where one head has all columns: each column of x has its own t and D, and a has a number for each element
    of S.

    All are float32: x [m, columns of x of all heads, B of all groups, C of all groups], z [m, heads * d, padded], t [m,
    heads, padded], a, D and bias [heads, padded] (by_state: t [m, d], a [d * size], D [d]), states [cells, heads, d *
    size]. On the GPU a state is S; on the CPU S is stored transposed.
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
    """exp(a * softplus(x + dt)), the decay of each channel of a `DeltaNet` with by_channel: (x float32 [m, heads * d,
    padded], a [heads, padded], dt [heads * d, padded]) -> float32 [m, heads * d]. The d columns of a head have the same
    a."""

    heads: int
    d: int
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("weight", ("A", "Dt")), _Y)

    def results(self) -> list[Tensor]:
        return [((self.m, self.heads * self.d), "float32")]


@dataclass(frozen=True, kw_only=True)
class Gate(Operator, name="gate", sizes="{0.k}"):
    """y * sigmoid(z), or with silu y * silu(z): (x, z float32 [m, k], [g float32 [size]]) -> m rows of k columns in
    `layout`. eps None: y is x. Otherwise y is the RMS norm of each block of `size` columns of x, times g."""

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
