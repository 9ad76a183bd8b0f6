"""Attention: what a layer computes (`Attention`, `Rope`), without any layout of a target, and its operators.

`rope_kv_write` rotates and writes the cache, `attention` reads it; `rope_attention` is both, for single rows.
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
PAGE = 64  # keys of a page of the cache; no block of an attention kernel crosses one
SLOTS = 64  # rows of a page table: sequences that may take part in one step
STEP = 16  # columns: what vectors of the CPU and matrix units of GPUs take at once

KV_BLOCK = 32  # consecutive columns of a key's or value's head that share a scale, as in GGUF's Q8_0 and Q4_0


def padded_columns(columns: int) -> int:
    """Columns with padding: of a linear layer's results, and of a head in the cache and in rotated queries."""
    return -(-columns // STEP) * STEP


@dataclass(frozen=True)
class Attention:
    """One causal attention layer: grouped queries against a cache of keys and values.

    A row at position p sees the keys 0 .. p; with a window only those above p - window, with chunks only those from the
    last multiple of `chunk` on; with `images`, rows of an image see its later rows, too. Its score of a key is s =
    scale * (q . k), with a softcap softcap * tanh(s / softcap). With sinks, each query head has one more logit in the
    softmax's denominator, which has no value and is not scaled (gpt-oss).

    In latent attention (`values` is not 0; DeepSeek V2) the first `values` columns of a key are the value, so that the
    cache holds keys only, of one KV head.

    Keys and values are in pages of PAGE positions; a page table says for each slot (a sequence) and each block of PAGE
    positions which page has them. Layers of the same `span` share the tables. ValueError for a window with chunks, and
    for an unknown type of the cache.
    """

    heads: int  # query heads
    kv_heads: int  # divides heads
    d: int  # columns of a head of q and k, and of v unless `values` says otherwise; a multiple of 8
    ctx: int  # positions that a sequence may have
    scale: float = 0.0  # of q . k; 0: 1/sqrt(d)
    window: int = 0  # keys that a row sees, its own included; 0: all
    softcap: float = 0.0  # 0: none
    sinks: bool = False
    chunk: int = 0  # 0: none
    kv: str = KV_TYPE  # type of the cache: a name of runtime/cache/kv_types.py
    values: int = 0  # leading columns of a key that are the value; 0: values have tensors of their own
    images: bool = False  # the first state[2] rows of a chunk, those of an image, see one another

    def __post_init__(self):
        if (self.window and self.chunk) or self.kv not in get_args(KvType):
            raise ValueError(f"{self} is no attention layer")
        if self.values and (self.kv_heads != 1 or self.values > self.d or self.rotation):
            raise ValueError(f"{self} is no latent attention layer")

    @property
    def quantized(self) -> bool:
        """Whether the cache holds codes and scales: element = code * scale, where scale is, as float16, the element of
        KV_BLOCK columns that has the largest magnitude, divided by the lowest code (its magnitude divided by the
        highest, if codes are symmetric), and code is rounded to nearest. (`Codes.refits` changes the scale then.)"""
        return self.key_codes is not None

    @property
    def key_codes(self) -> Codes | None:
        return codes_of(self.kv)[0]

    @property
    def value_codes(self) -> Codes | None:
        """Of values that have tensors of their own; in latent attention of the keys that they are."""
        return codes_of(self.kv)[1]

    @property
    def rotation(self) -> int:
        """Columns of a block of a head that is multiplied by a Hadamard matrix H / sqrt(columns), in queries, keys and
        values, so that no column of a block has much more than others; attention's output is in the basis of the
        values. 0: none. Scores stay what they are. The largest power of two that divides d."""
        return self.d & -self.d if any(codes and codes.rotated for codes in codes_of(self.kv)) else 0

    @property
    def cache(self) -> tuple[str, ...]:
        """The tensors of the cache, as `cache_types` of a target has them."""
        return tensors_of(self.kv, self.values > 0)

    @property
    def span(self) -> int:
        """Keys that a row sees at most; 0: all."""
        return self.window or self.chunk

    @property
    def blocks(self) -> int:
        """Pages that a sequence may have: rows of `ctx` positions have so many entries in a page table."""
        return self.ctx // PAGE

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Columns of a head in the cache and in rotated queries."""
        return padded_columns(self.d)

    @property
    def value_d(self) -> int:
        """Columns of a head's value, and of its output."""
        return self.values or self.d

    @property
    def value_width(self) -> int:
        """The same with padding."""
        return padded_columns(self.value_d)

    @property
    def query_scale(self) -> float:
        """The factor on queries with which 2**(q . k) is exp(scale * q . k): softmax then needs powers of two only."""
        return LOG2E * self.scale if self.scale else LOG2E / math.sqrt(self.d)


@dataclass(frozen=True)
class Rope:
    """How q, k and v change before attention: RMS norm of each head of q and k (`eps` None: none) and rotation of its
    first columns. ValueError for a norm without eps."""

    neox: bool  # pairs are (i, i + rotary/2); False: (2i, 2i + 1)
    rotary: int  # columns of a head that rotate, even; 0: none
    eps: float | None = None  # of the heads' RMS norm
    norm_after: bool = False  # the rotation comes before the norm
    value_norm: bool = False  # RMS norm of each head of v, without weights
    writes: bool = True  # k and v into the cache; False: there is only q, for the cache that another layer wrote
    by_row: bool = False  # CS has the cosines and sines of each row; False: of each position

    def __post_init__(self):
        if self.eps is None and (self.norm_after or self.value_norm):
            raise ValueError(f"{self} has norms without eps")


def check_quantized(attention: Attention) -> None:
    """UserError for a layer whose heads are not whole blocks of a quantized cache."""
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
        """Two products for each head, of a key's and of a value's elements."""
        return 0, 2 * self.layer.heads * (self.layer.d + self.layer.value_d) if self.reads_cache else 0

    @property
    def span_label(self) -> str:
        return "".join(f"_{name}{size}" for name in ("window", "chunk") if (size := getattr(self.layer, name)))

    def attended(self) -> Iterator[Slot]:
        """The cache, what else softmax takes, and the result."""
        yield _CACHE_SLOT
        if self.layer.sinks:
            yield Slot("weight", ("Sinks",))
        yield from (Slot("work", ("Parts",), optional=True), Slot("zero", ("Arrived",), optional=True), OUTPUT_SLOT)


@dataclass(frozen=True, kw_only=True)
class CausalAttention(_AttentionOperator, name="attention"):
    """Causal attention: (rows, pages, rotated q, cache.., [sinks], workspace..) -> heads * value_d columns in `layout`.
    single: how many rows may be single ones. back: all are, and outputs are multiplied by `Attention.rotation`'s
    matrices again, so that they are in the basis that values had before."""

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
    """Inputs of head norms and rotation."""
    yield Slot("input", ("Q", "K", "V") if rope.writes else ("Q",))
    if rope.eps is not None:
        yield Slot("weight", ("QN", "KN") if rope.writes else ("QN",))
    if rope.rotary:
        yield Slot("input", ("CS",)) if rope.by_row else Slot("weight", ("CS",), rows=layer.ctx)


@dataclass(frozen=True, kw_only=True)
class _Write(_AttentionOperator):
    """An operator before attention. query_dtype: of rotated queries, its result."""

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
        """Of attention only the scale counts here, as queries are multiplied by it, and where keys go."""
        return replace(self, layer=replace(self.layer, window=0, chunk=0, softcap=0.0, sinks=False, images=False))


@dataclass(frozen=True, kw_only=True)
class RopeKvWrite(_Write, name="rope_kv_write"):
    """Head norms, RoPE, KV write in place: (rows, pages, q, k, v, [qn, kn], [cos_sin], cache..) -> (rotated q,
    cache..); for a layer that writes no cache (rows, q, [qn], [cos_sin]) -> rotated q."""

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT) if self.rope.writes else (STATE_SLOT, ROWS_SLOT)
        yield from _rotated(self.layer, self.rope)
        if self.rope.writes:
            yield _CACHE_SLOT
        yield Slot("output", ("Qo",))


@dataclass(frozen=True, kw_only=True)
class LatentKvWrite(_Write, name="latent_kv_write"):
    """Of latent attention: norm of the latent, RoPE, KV write in place: (rows, pages, q's rotating columns, q's columns
    for the latent, the latent and the key's rotating columns, norm's weight, [cos_sin], cache) -> (q, cache)."""

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Q", "L", "K")), Slot("weight", ("KN",)))
        if self.rope.rotary:
            yield Slot("weight", ("CS",), rows=self.layer.ctx)
        yield from (_CACHE_SLOT, Slot("output", ("Qo",)))


@dataclass(frozen=True, kw_only=True)
class RopeAttention(_AttentionOperator, name="rope_attention"):
    """rope_kv_write and attention of single rows, the cache written in place: (rows, pages, q, k, v, [qn, kn],
    [cos_sin], cache.., [sinks], workspace..) -> heads * d columns in `layout`; without `rope.writes` no k, v, kn."""

    reads_cache = True

    rope: Rope
    layout: str
    m: int

    @property
    def single(self) -> int:
        """All of its rows are single ones."""
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
