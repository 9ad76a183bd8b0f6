"""The operators of encoders, which process several texts or images in one step, each a run of rows, without a cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlc_amd.schedules.operators.attention import PAGE, Attention
from mlc_amd.schedules.operators.base import OUTPUT_SLOT, STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor, activations, padded


@dataclass(frozen=True, kw_only=True)
class PackedAttention(Operator, name="packed_attention", sizes="{0.heads}x{0.d}"):
    """Attention within segments: (segments int32 [m, 2], q float32 [m, padded(heads * d)], k and v float32 [m,
    padded(kv_heads * d)]) -> float32 [m, heads * d].

    A segment is a run of rows that attend to each other: a text, an image, a window of patches. segments: for each row
    the first row of its segment, and the row after the last one. Row i attends to the rows j of its segment; with a
    `window` only to those with |i - j| <= window, with `causal` only to those with j <= i. The score is

        scale * (q_i . k_j)                                     without `alibi`
        scale * (q_i . k_j) - 2**exponent(head) * |i - j|       with `alibi` (ALiBi)

    A row's result depends only on the rows of its segment. It does not depend on the position of the segment in the
    step, except for rounding in kernels with matrix units.
    """

    heads: int  # query heads
    kv_heads: int  # divides heads
    d: int  # columns of a head; a multiple of 8
    m: int
    scale: float = 0.0  # factor of q . k; 0: 1/sqrt(d)
    window: int = 0  # see above; 0: none
    causal: bool = False
    alibi: float = 0.0  # ALiBi's maximum bias: for 2**n heads, minus `exponent` of the last one; 0: no ALiBi

    def __post_init__(self):
        if self.d % 8 or self.heads % self.kv_heads:
            raise ValueError(f"{self}: d must be a multiple of 8, and heads a multiple of kv_heads")

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("segments",)), Slot("input", ("Q", "K", "V")))
        yield Slot("output", ("Y",))

    def results(self) -> list[Tensor]:
        return [((self.m, self.heads * self.d), "float32")]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its kernel's float32 parameters, by name."""
        m, kv = self.m, padded(self.kv_heads * self.d)
        return {"Q": (m, padded(self.heads * self.d)), "K": (m, kv), "V": (m, kv), "Y": (m, self.heads * self.d)}

    @property
    def variant(self) -> str:
        return f"_window{self.window}" * bool(self.window) + "_causal" * self.causal + "_alibi" * bool(self.alibi)

    layout = ""  # the layout of the result: float32

    @property
    def single(self) -> int:
        """The number of single rows, for kernels that also serve `CausalAttention`: none."""
        return 0

    @property
    def layer(self) -> Attention:
        """A causal attention layer with the same heads, for a chunk of m rows."""
        return Attention(self.heads, self.kv_heads, self.d, -(-self.m // PAGE) * PAGE, self.scale)

    @property
    def query_scale(self) -> float:
        """See `Attention.query_scale`."""
        return self.layer.query_scale

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads // self.kv_heads

    def exponent(self, head: Any, select: Callable[..., Any]) -> Any:
        """log2 of a head's slope in ALiBi. head: a number or an expression; select(condition, a, b): a function for its
        type. If the number of heads is no power of two, the slopes of the heads after the largest power of two are
        between the others' slopes (as in ggml's soft_max)."""
        power = 1 << (self.heads.bit_length() - 1)
        step = self.alibi / power
        return select(head < power, -step * (head + 1), -step / 2 * (2 * (head - power) + 1))

    def operations(self) -> tuple[int, int]:
        """The operations of two products for each head, as if all rows were one segment."""
        keys = min(2 * self.window + 1, self.m) if self.window else self.m
        return 4 * self.m * keys * self.heads * self.d, 0


@dataclass(frozen=True, kw_only=True)
class Activate(Operator, name="activate", sizes="{0.act}_{0.k}"):
    """act(x): (x float32 [m, k],) -> m rows of k columns in `layout`."""

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
    """The mean of consecutive rows, for each answer: (pooled int32 [m, 2], x float32 [m, k]) -> float32 [m, k]. pooled:
    for each answer the first row, and the row after the last one. `state` is (n, n, 0, 0) for n answers."""

    k: int
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("pooled",)), Slot("input", ("X",)), Slot("output", ("Y",)))

    def results(self) -> list[Tensor]:
        return [((self.m, self.k), "float32")]
