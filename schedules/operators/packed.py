"""Operators of packed rows: several runs of rows in one step, without a cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlc_amd.schedules.operators.attention import PAGE, Attention
from mlc_amd.schedules.operators.base import OUTPUT_SLOT, STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor, activations, padded


@dataclass(frozen=True, kw_only=True)
class PackedAttention(Operator, name="packed_attention", sizes="{0.heads}x{0.d}"):
    """Attention among the rows of each segment: (segments int32 [m, 2], q float32 [m, padded(heads * d)], k and v
    float32 [m, padded(kv_heads * d)]) -> float32 [m, heads * d].

    segments: of each row the first row of its segment and the row after the last one. A segment is a run of rows that
    see each other: a text, an image, a window of patches. Row i of it sees the rows j of the segment, with a `window`
    those with |i - j| <= window, if `causal` those with j <= i. Its score of j is

        scale * (q_i . k_j) - 2**(`exponent` of the head) * |i - j|        the latter with `alibi` (ALiBi)

    A row's result depends on the rows of its segment only: to the bit, on matrix units but for roundings.
    """

    heads: int  # query heads
    kv_heads: int  # divides heads
    d: int  # columns of a head; a multiple of 8
    m: int
    scale: float = 0.0  # 0: 1/sqrt(d)
    window: int = 0  # 0: all
    causal: bool = False
    alibi: float = 0.0  # the largest bias of ALiBi, of the last head of a power of two; 0: none

    def __post_init__(self):
        if self.d % 8 or self.heads % self.kv_heads:
            raise ValueError(f"{self}: heads have a multiple of 8 columns, and the same number of them a KV head")

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("segments",)), Slot("input", ("Q", "K", "V")))
        yield Slot("output", ("Y",))

    def results(self) -> list[Tensor]:
        return [((self.m, self.heads * self.d), "float32")]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its kernel's float32 parameters, by name."""
        m, kv = self.m, padded(self.kv_heads * self.d)
        return {"Q": (m, padded(self.heads * self.d)), "K": (m, kv), "V": (m, kv), "Y": (m, self.heads * self.d)}

    @property
    def variant(self) -> str:
        return f"_window{self.window}" * bool(self.window) + "_causal" * self.causal + "_alibi" * bool(self.alibi)

    layout = ""  # of its result

    @property
    def single(self) -> int:
        """No row is a single one, as of `CausalAttention`."""
        return 0

    @property
    def layer(self) -> Attention:
        """The attention of a chunk of m rows with the same heads."""
        return Attention(self.heads, self.kv_heads, self.d, -(-self.m // PAGE) * PAGE, self.scale)

    @property
    def query_scale(self) -> float:
        """The factor on queries with which 2**(q . k) is exp(scale * q . k)."""
        return self.layer.query_scale

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def exponent(self, head: Any, select: Callable[..., Any]) -> Any:
        """Of two, the slope of ALiBi of a head, a number or an expression; select(condition, a, b). The heads after the
        last power of two have the slopes between those of the others (ggml's soft_max)."""
        power = 1 << (self.heads.bit_length() - 1)
        step = self.alibi / power
        return select(head < power, -step * (head + 1), -step / 2 * (2 * (head - power) + 1))

    def operations(self) -> tuple[int, int]:
        """Two products for each head, with the keys of a segment of all rows at most."""
        keys = min(2 * self.window + 1, self.m) if self.window else self.m
        return 4 * self.m * keys * self.heads * self.d, 0


@dataclass(frozen=True, kw_only=True)
class Activate(Operator, name="activate", sizes="{0.act}_{0.k}"):
    """act(x): (x float32 [m, k],) -> k columns in `layout`."""

    act: str
    k: int
    m: int
    layout: str

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), OUTPUT_SLOT)

    def results(self) -> list[Tensor]:
        return activations(self.m, self.k, self.layout)

    @property
    def variant(self) -> str:
        return "_quantize" if self.layout else ""


@dataclass(frozen=True, kw_only=True)
class Pool(Operator, name="pool", sizes="{0.k}"):
    """The mean of some consecutive rows for each answer: (pooled int32 [m, 2], x float32 [m, k]) -> float32 [m, k].
    pooled: of each answer the first row and the one after the last; `state`: {n, n, 0, 0} of n answers."""

    k: int
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("pooled",)), Slot("input", ("X",)), Slot("output", ("Y",)))

    def results(self) -> list[Tensor]:
        return [((self.m, self.k), "float32")]
