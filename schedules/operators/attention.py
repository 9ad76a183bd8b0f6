"""Attention: descriptions of what a layer computes (`Attention`, `Rope`), independent of any target, and the operators.

`rope_kv_write` rotates queries and keys, and writes keys and values to the cache. `attention` reads the cache.
`rope_attention` does both in one kernel, for single rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

from mlc_amd.runtime.cache.kv_types import KV_TYPE, Codes, KvType, codes_of, tensors_of
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators.base import OUTPUT_SLOT, PAGES_SLOT, ROWS_SLOT, STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor, activations

LOG2E = math.log2(math.e)
PAGE = 64  # positions in a page of the cache; no block of an attention kernel crosses the end of a page
SLOTS = 64  # rows of a page table: the largest number of sequences in one step
STEP = 16  # columns are padded to a multiple of this, the step of CPU vectors and of GPU matrix units

KV_BLOCK = 32  # consecutive columns of a head that share a scale in a quantized cache, as in GGUF's Q8_0 and Q4_0


def padded_columns(columns: int) -> int:
    """columns rounded up to a multiple of STEP: the columns of a linear layer's result, and of a head in the cache and
    in rotated queries."""
    return -(-columns // STEP) * STEP


@dataclass(frozen=True)
class Attention:
    """One causal attention layer: grouped queries, and a cache of keys and values.

    A row at position p attends to the keys 0 .. p. With a window it attends only to the keys above p - window; with
    chunks, only to keys from the last multiple of `chunk` on; with `images`, the rows of an image also attend to the
    later rows of this image. The score of a key is s = scale * (q . k), with a softcap softcap * tanh(s / softcap).
    With sinks, each query head has one more logit, which counts in the softmax's denominator, has no value, and is not
    scaled (gpt-oss).

    In latent attention (`values` is not 0; DeepSeek V2) the first `values` columns of a key are its value. The cache
    then holds only keys, of one KV head.

    The cache consists of pages of PAGE positions. For each slot (a sequence) and each block of PAGE positions, a page
    table has the number of the page. Layers with the same `span` share a table.

    Raises ValueError for a window together with chunks, for an unknown type of the cache, and for latent attention with
    several KV heads or a rotation.
    """

    heads: int  # query heads
    kv_heads: int  # divides heads
    d: int  # columns of a head of q and k, and of v if `values` is 0; a multiple of 8
    ctx: int  # largest number of positions of a sequence
    scale: float = 0.0  # factor of q . k; 0: 1/sqrt(d)
    window: int = 0  # number of keys that a row attends to, including its own; 0: all
    softcap: float = 0.0  # 0: none
    sinks: bool = False
    chunk: int = 0  # 0: none
    kv: str = KV_TYPE  # type of the cache: a name of runtime/cache/kv_types.py
    values: int = 0  # number of leading columns of a key that are the value; 0: values have their own tensors
    images: bool = False  # the first state[2] rows of a chunk are those of an image, and all attend to each other

    def __post_init__(self):
        if (self.window and self.chunk) or self.kv not in get_args(KvType):
            raise ValueError(f"{self}: a window excludes chunks, and the cache's type must be a known one")
        if self.values and (self.kv_heads != 1 or self.values > self.d or self.rotation):
            raise ValueError(f"{self}: latent attention needs one KV head, values <= d, and a cache without rotation")

    @property
    def quantized(self) -> bool:
        """Whether the cache holds codes and scales: element = code * scale.

        Each block of KV_BLOCK columns has a float16 scale: the element with the largest magnitude, divided by the
        lowest code. If codes are symmetric, it is the largest magnitude, divided by the highest code. The code is
        rounded to nearest. With `Codes.refits` the scale is adjusted after the codes are known."""
        return self.key_codes is not None

    @property
    def key_codes(self) -> Codes | None:
        """The codes of keys; None: they are not quantized."""
        return codes_of(self.kv)[0]

    @property
    def value_codes(self) -> Codes | None:
        """The codes of values; None: they are not quantized. In latent attention values are columns of the keys."""
        return codes_of(self.kv)[1]

    @property
    def rotation(self) -> int:
        """The size of the orthogonal Hadamard matrix, H / sqrt(size), by which each block of `size` columns of a head
        of queries, keys and values is multiplied, keys and values before they are quantized; 0: none. It spreads
        outliers over the columns of a block. Scores do not change, but attention's output is multiplied by the matrix,
        as values are. The size is the largest power of two that divides d."""
        return self.d & -self.d if any(codes and codes.rotated for codes in codes_of(self.kv)) else 0

    @property
    def cache(self) -> tuple[str, ...]:
        """The names of the cache's tensors; `cache_types` of a target has their shapes."""
        return tensors_of(self.kv, self.values > 0)

    @property
    def span(self) -> int:
        """The largest number of keys that a row attends to; 0: all."""
        return self.window or self.chunk

    @property
    def blocks(self) -> int:
        """The largest number of pages of a sequence, which is the number of columns of a page table."""
        return self.ctx // PAGE

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Columns of a head in the cache and in rotated queries, with padding."""
        return padded_columns(self.d)

    @property
    def value_d(self) -> int:
        """Columns of a head of values, and of attention's output."""
        return self.values or self.d

    @property
    def value_width(self) -> int:
        """`value_d` with padding."""
        return padded_columns(self.value_d)

    @property
    def query_scale(self) -> float:
        """log2(e) * scale. Rotated queries are multiplied by it: then exp(scale * q . k) is 2**(rotated q . k), so that
        softmax needs only powers of two."""
        return LOG2E * self.scale if self.scale else LOG2E / math.sqrt(self.d)


@dataclass(frozen=True)
class Rope:
    """The operations on q, k and v before attention: an RMS norm of each head of q and k, and the rotation of its first
    columns (RoPE). Raises ValueError for norms without eps."""

    neox: bool  # which columns form a pair: true: (i, i + rotary/2); false: (2i, 2i + 1)
    rotary: int  # number of columns of a head that rotate, even; 0: none
    eps: float | None = None  # eps of the RMS norm of heads; None: no norm
    norm_after: bool = False  # the norm comes after the rotation, not before it
    value_norm: bool = False  # also an RMS norm of each head of v, without weights
    writes: bool = True  # writes k and v to the cache; false: there is only q, and another layer wrote the cache
    by_row: bool = False  # CS has the cosines and sines of each row; false: of each position

    def __post_init__(self):
        if self.eps is None and (self.norm_after or self.value_norm):
            raise ValueError(f"{self} has norms without eps")


def check_quantized(attention: Attention) -> None:
    """Raises UserError if the cache is quantized and a head is not a multiple of KV_BLOCK columns."""
    if attention.quantized and attention.d % KV_BLOCK:
        raise UserError(
            f"--kv-type {attention.kv} needs heads in multiples of {KV_BLOCK}, not of {attention.d} as this model's; "
            "leave it out"
        )


# ---- the operators

_CACHE_SLOT = Slot("cache", ("Kc", "Vc", "Ks", "Vs"))


@dataclass(frozen=True, kw_only=True)
class _AttentionOperator(Operator):
    layer: Attention

    @property
    def positions(self) -> int:
        return self.layer.ctx

    @property
    def most_keys(self) -> int:
        return self.layer.span if self.reads_cache else 0

    def operations(self) -> tuple[int, int]:
        """A key costs each query head a product with its d columns, and one with the value_d columns of its value."""
        return 0, 2 * self.layer.heads * (self.layer.d + self.layer.value_d) if self.reads_cache else 0

    @property
    def span_label(self) -> str:
        return "".join(f"_{name}{size}" for name in ("window", "chunk") if (size := getattr(self.layer, name)))

    def attended(self) -> Iterator[Slot]:
        """The slots from the cache on: cache, sinks, workspace, output."""
        yield _CACHE_SLOT
        if self.layer.sinks:
            yield Slot("weight", ("Sinks",))
        yield from (Slot("work", ("Parts",), optional=True), Slot("zero", ("Arrived",), optional=True), OUTPUT_SLOT)


@dataclass(frozen=True, kw_only=True)
class CausalAttention(_AttentionOperator, name="attention"):
    """Causal attention: (rows, pages, rotated q, cache.., [sinks], workspace..) -> m rows of heads * value_d columns in
    `layout`. single: the largest number of single rows. back: outputs are multiplied by the matrices of
    `Attention.rotation` again, which undoes the rotation of values; only where all rows are single rows."""

    reads_cache = True

    m: int
    single: int
    layout: str
    back: bool = False

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Qo",)))
        yield from self.attended()

    def results(self) -> list[Tensor]:
        return activations(self.m, self.layer.heads * self.layer.value_d, self.layout)

    @property
    def variant(self) -> str:
        return ("_rows" if self.m == self.single else "_mixed" if self.single else "") + self.span_label


def _rotated(layer: Attention, rope: Rope) -> Iterator[Slot]:
    """The input slots of head norms and rotation."""
    yield Slot("input", ("Q", "K", "V") if rope.writes else ("Q",))
    if rope.eps is not None:
        yield Slot("weight", ("QN", "KN") if rope.writes else ("QN",))
    if rope.rotary:
        yield Slot("input", ("CS",)) if rope.by_row else Slot("weight", ("CS",), rows=layer.ctx)


@dataclass(frozen=True, kw_only=True)
class _Write(_AttentionOperator):
    """An operator that rotates queries, and writes the cache, for the attention after it. query_dtype: the dtype of the
    result, the rotated queries."""

    m: int
    rope: Rope
    query_dtype: str = field(default="float32", compare=False)

    def results(self) -> list[Tensor]:
        return [((self.m, self.layer.heads, self.layer.width), self.query_dtype)]

    @property
    def written(self) -> int:
        return len(self.layer.cache) if self.rope.writes else 0

    @property
    def workload(self) -> "_Write":
        """Without the attributes of the layer that only matter to attention. The kernel needs the scale, by which it
        multiplies queries, and the layout of the cache."""
        return replace(self, layer=replace(self.layer, window=0, chunk=0, softcap=0.0, sinks=False, images=False))


@dataclass(frozen=True, kw_only=True)
class RopeKvWrite(_Write, name="rope_kv_write"):
    """Head norms, RoPE, and the write to the cache, in place: (rows, pages, q, k, v, [qn, kn], [cos_sin], cache..) ->
    (rotated q [m, heads, width], cache..). For a layer that does not write a cache: (rows, q, [qn], [cos_sin]) ->
    rotated q. schedules/kv_writes.py has the shapes of the inputs."""

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT) if self.rope.writes else (STATE_SLOT, ROWS_SLOT)
        yield from _rotated(self.layer, self.rope)
        if self.rope.writes:
            yield _CACHE_SLOT
        yield Slot("output", ("Qo",))


@dataclass(frozen=True, kw_only=True)
class LatentKvWrite(_Write, name="latent_kv_write"):
    """`RopeKvWrite` for latent attention: norm of the latent, RoPE, and the write to the cache, in place: (rows, pages,
    q's rotating columns, q's columns for the latent, the latent and the key's rotating columns, the norm's weight,
    [cos_sin], cache) -> (q [m, heads, width], cache). schedules/kv_writes.py has the shapes of the inputs."""

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Q", "L", "K")), Slot("weight", ("KN",)))
        if self.rope.rotary:
            yield Slot("weight", ("CS",), rows=self.layer.ctx)
        yield from (_CACHE_SLOT, Slot("output", ("Qo",)))


@dataclass(frozen=True, kw_only=True)
class RopeAttention(_AttentionOperator, name="rope_attention"):
    """`RopeKvWrite` and `CausalAttention` in one kernel, for single rows; the cache is written in place: (rows, pages,
    q, k, v, [qn, kn], [cos_sin], cache.., [sinks], workspace..) -> m rows of heads * d columns in `layout`. Without
    `rope.writes` there are no k, v and kn."""

    reads_cache = True

    rope: Rope
    layout: str
    m: int

    @property
    def single(self) -> int:
        """All rows are single rows."""
        return self.m

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT)
        yield from _rotated(self.layer, self.rope)
        yield from self.attended()

    def results(self) -> list[Tensor]:
        return activations(self.m, self.layer.heads * self.layer.d, self.layout)

    @property
    def variant(self) -> str:
        return self.span_label


Attending = CausalAttention | RopeAttention  # operators that read the cache
