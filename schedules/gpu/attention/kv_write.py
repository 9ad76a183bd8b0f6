"""The kernel between the q/k/v projections and attention: rotary position embedding (RoPE), and the write of new keys
and values to the cache.

In: the float32 rows of Q, K, V of a step's tokens, their positions and slots, a table of cosines and sines. Out: the
rotated queries as float16, times `Attention.query_scale`; the cache, updated in place for live rows.

Models differ (`Rope`) in which elements form a pair, how many elements of a head rotate (from none to all; the others
are copied), and which heads are normalized, before or after the rotation. A wave has one head of one row. Decode
attention does not need this kernel: `attention_decode.py` does the same work with the functions of this module.

In latent attention (`schedules.operators.attention.Attention`), queries have columns for the latent and columns that
rotate; a key has a latent, which is normalized, and columns that rotate. A wave has one query head of a row, or its
key.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention.cache import (
    Cache,
    Element,
    own_elements,
    own_quads,
    place_args,
    row_position,
    row_slot,
    store_valid,
)
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, launch, rsqrt, wave_meets, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import WAVES, builds, is_live
from mlc_amd.schedules.kv_writes import Sources, latent_args, rope_args
from mlc_amd.schedules.operators.attention import Attention, LatentKvWrite, Rope, RopeKvWrite
from mlc_amd.schedules.space import Kernel, planned
from mlc_amd.schedules.tir import Buffer, Expr


@dataclass(frozen=True)
class WavesPlan:
    """waves: of a workgroup; fewer if the arch does not allow so many."""

    waves: int = 4

    def fitted(self, arch: Device) -> int:
        return min(self.waves, arch.threads // arch.wave)


def wave_heads(attention: Attention, rope: Rope) -> int:
    """The number of heads of a row, each of which a wave processes."""
    return attention.heads + (2 * attention.kv_heads if rope.writes else 0)


Elements = tuple[Expr, tuple[tuple[Expr, Expr], ...]]  # (valid, ((element, value), ..)); valid: None, or a condition


class Pair(NamedTuple):
    """Two elements of a head that form a pair of the rotation. valid: whether the lane has this pair, otherwise it must
    not store it; None if all lanes do."""

    valid: Expr
    number: Expr
    elements: list[Expr]
    values: Sequence[Expr]

    @property
    def stored(self) -> Elements:
        return self.valid, tuple(zip(self.elements, self.values, strict=True))


def norm_scale(arch: Device, parts: Iterable[tuple[Expr, Sequence[Expr]]], d: int, eps: float | None) -> Expr:
    """1 / sqrt(mean of squares + eps) of the d elements of a head, in all lanes. parts: (valid, values) of the elements
    that this lane has."""
    squares = T.float32(0)
    for valid, values in parts:
        square = sum((x * x for x in values[1:]), values[0] * values[0])
        squares = squares + (square if valid is None else T.Select(valid, square, T.float32(0)))
    return rsqrt(wave_sum(arch, T.Bind(squares)) * T.float32(1 / d) + T.float32(eps))


@dataclass(frozen=True)
class Heads:
    """Norms and rotation of heads of d columns. Each head is processed by a wave; lane: number of this lane."""

    arch: Device
    layer: Attention
    rope: Rope
    sources: Sources
    lane: Expr
    d: int

    def query(self, row: Expr, head: Expr, position: Expr) -> Iterator[Elements]:
        """`rotated` for a query head."""
        return self.rotated(self.sources.Q, row, head * self.d, position, self.sources.QN)

    def key(self, row: Expr, kv: Expr, position: Expr) -> Iterator[Elements]:
        """`rotated` for a head of the keys."""
        return self.rotated(self.sources.K, row, kv * self.d, position, self.sources.KN)

    def rotated(self, X: Buffer, row: Expr, column: Expr, position: Expr, weight: Buffer = None) -> Iterator[Elements]:
        """Normalizes and rotates the head X[row, column:column+d], float32. Yields the elements of each `Pair` of this
        lane. weight: of the head's norm, float32 [d]; None without a norm."""
        pairs, angles = list(self._load_pairs(X, row, column)), row if self.rope.by_row else position
        if weight is not None and self.rope.norm_after:
            turned = [self._rotated(pair, angles) for pair in pairs]
            yield from (pair.stored for pair in self._normalized(turned, weight))
            return
        if weight is not None:
            pairs = self._normalized(pairs, weight)
        for pair in pairs:
            yield self._rotated(pair, angles).stored

    def _load_pairs(self, X: Buffer, row: Expr, column: Expr) -> Iterator[Pair]:
        """The pairs of this lane of the head X[row, column:column+d]."""
        half = self.rope.rotary // 2
        for valid, pair in own_elements(self.arch, self.lane, 0, self.d // 2):
            rotates = pair < half
            low, high = (
                (T.Select(rotates, pair, pair * 2), T.Select(rotates, pair + half, pair * 2 + 1))
                if self.rope.neox and half
                else (pair * 2, pair * 2 + 1)
            )
            elements = [T.Bind(e) for e in (low, high)]
            yield Pair(valid, pair, elements, [T.Bind(X[row, column + e]) for e in elements])

    def _normalized(self, pairs: list[Pair], weight: Buffer) -> list[Pair]:
        scale = norm_scale(self.arch, [(pair.valid, pair.values) for pair in pairs], self.d, self.rope.eps)

        def scaled(pair: Pair) -> list[Expr]:
            return [T.Bind(x * scale * weight[e]) for e, x in zip(pair.elements, pair.values, strict=True)]

        return [pair._replace(values=scaled(pair)) for pair in pairs]

    def _rotated(self, pair: Pair, angles: Expr) -> Pair:
        half, (x, y) = self.rope.rotary // 2, pair.values
        if not half:
            return pair
        place = T.Bind(T.min(pair.number, T.int32(half - 1)))
        cos, sin = (T.Bind(self.sources.CS[angles, place * 2 + i]) for i in range(2))
        if self.rope.rotary < self.d:
            cos = T.Bind(T.Select(pair.number < half, cos, T.float32(1)))
            sin = T.Bind(T.Select(pair.number < half, sin, T.float32(0)))
        return pair._replace(values=[T.Bind(x * cos - y * sin), T.Bind(x * sin + y * cos)])

    def value_scale(self, row: Expr, kv: Expr) -> Expr:
        """The factor of the norm of a head of V, in all lanes of a wave; None without a norm."""
        if not self.rope.value_norm:
            return None
        own = own_elements(self.arch, self.lane, 0, self.d)
        values = [(valid, [T.Bind(self.value(row, kv, e))]) for valid, e in own]
        return norm_scale(self.arch, values, self.d, self.rope.eps)

    def value(self, row: Expr, kv: Expr, e: Expr, scale: Expr = None) -> Expr:
        """Element e of a head of V, times `scale` (None: 1)."""
        x = self.sources.V[row, kv * self.d + e]
        return x if scale is None else x * scale

    def store_value(self, cache: Cache, row: Expr, kv: Expr, slot: Expr, position: Expr, scale: Expr) -> None:
        """Stores a head of V, times `scale`, to the cache. All lanes of a wave must call it."""
        cache.store_value(self.arch, kv, slot, position, lambda e: self.value(row, kv, e, scale), self.lane)


class Meeting:
    """Shared memory through which the lanes of a wave exchange rotated elements of a head. Elements are rounded to
    float16, like a row's own key in decode attention; but not before a multiplication by a Hadamard matrix, before
    which decode attention does not round either."""

    def __init__(self, arch: Device, attention: Attention, waves: int, wave: Expr):
        self.arch, self.begin = arch, T.Bind(wave * attention.d)
        dtype = "float32" if attention.rotation else "float16"
        self.buffer = T.alloc_buffer((waves * attention.d,), dtype, scope=WAVE_SHARED)

    def of(self, elements: Iterable[Elements]) -> Element:
        """Stores a lane's elements of a head. Returns element(e), which any lane may call."""
        for valid, values in elements:
            stores = [((self.begin + e,), T.cast(y, self.buffer.dtype)) for e, y in values]
            store_valid(valid, self.buffer, stores)
        wave_meets(self.arch)
        return lambda e: T.cast(self.buffer[self.begin + e], "float32")


@builds(RopeKvWrite)
def rope_kv_write(op: RopeKvWrite, arch: Device, state: Buffer, plan: WavesPlan | None) -> None:
    """Kernel (state, rows, pages, parameters of `rope_args`, the cache (`cache.py`), Qo float16 [m, heads, width],
    whose padding is set to 0). Without rope.writes there are no pages and no cache. Nothing is written for rows that
    are not live, or whose position is not in the cache. Raises UserError for shapes that `cache_types` or `rope_args`
    refuses."""
    attention, m, rope = op.layer, op.m, op.rope
    heads, kv_heads, d = attention.heads, attention.kv_heads, attention.d
    total, waves = wave_heads(attention, rope), (plan or WavesPlan()).fitted(arch)
    rows, pages = place_args(m, attention if rope.writes else None)
    sources = rope_args(attention, m, rope)
    cache = Cache(attention, pages) if rope.writes else None
    Qo = T.arg("Qo", T.buffer((m, heads, attention.width), "float16"))
    with launch((-(-total // waves), m), (arch.wave, waves)) as (block, row, lane, wave):
        own = Heads(arch, attention, rope, sources, lane, d)
        head, position = T.Bind(block * waves + wave), T.Bind(row_position(rows, row))
        meeting = Meeting(arch, attention, waves, wave) if attention.quantized else None

        def write_query() -> None:
            scale, query = T.float32(attention.query_scale), own.query(row, head, position)
            if attention.rotation and meeting:
                quads = own_quads(arch, attention, meeting.of(query), lane)
                query = ((valid, [(e + i, y) for i, y in enumerate(values)]) for valid, e, values in quads)
            for valid, values in query:
                stores = [((row, head, e), T.cast(y * scale, "float16")) for e, y in values]
                store_valid(valid, Qo, stores)
            for first in range(d, attention.width, arch.wave):
                valid = None if first + arch.wave <= attention.width else first + lane < attention.width
                store_valid(valid, Qo, [((row, head, first + lane), T.float16(0))])

        def write_key_or_value(cache: Cache) -> None:
            slot = row_slot(rows, row)
            with T.If(head < heads + kv_heads):
                with T.Then():
                    kv = T.Bind(head - heads)
                    key = own.key(row, kv, position)
                    if meeting:
                        cache.store_codes(arch, kv, slot, position, meeting.of(key), lane)
                    else:
                        cache.store_key(kv, slot, position, key)
                with T.Else():
                    kv = T.Bind(head - heads - kv_heads)
                    own.store_value(cache, row, kv, slot, position, own.value_scale(row, kv))

        live = tirx.all(is_live(state, row), position >= 0, position < attention.ctx, head < total)
        with T.If(live), T.Then():
            if cache is None:
                write_query()
            else:
                with T.If(head < heads):
                    with T.Then():
                        write_query()
                    with T.Else():
                        write_key_or_value(cache)


@registry.plans(RopeKvWrite)
@planned({"waves": WAVES}, lambda op, arch: WavesPlan())
def plans(op: RopeKvWrite, arch: Device, plan: WavesPlan) -> Kernel:
    heads, waves = wave_heads(op.layer, op.rope), plan.fitted(arch)
    return Kernel(waves, -(-heads // waves) * op.m, waves * arch.wave, op.layer.d * 4 / arch.wave)


@builds(LatentKvWrite)
def latent_kv_write(op: LatentKvWrite, arch: Device, state: Buffer, plan: WavesPlan | None) -> None:
    """Kernel (state, rows, pages, parameters of `latent_args`, Kc, Qo) for latent attention; for rows and Qo see
    `rope_kv_write`. Raises UserError for shapes that `cache_types` refuses, ValueError without a norm,
    or unless all or none of the key's columns after its values rotate."""
    attention, m, rope = op.layer, op.m, op.rope
    heads, values, width = attention.heads, attention.values, attention.width
    shared = attention.d - values
    if rope.rotary not in (0, shared) or rope.eps is None:
        raise ValueError(f"keys of {attention.d} columns do not consist of {values} and {rope.rotary} that rotate")
    waves, scale = (plan or WavesPlan()).fitted(arch), T.float32(attention.query_scale)
    rows, pages = place_args(m, attention)
    Q, L, K, KN, CS = latent_args(op)
    cache = Cache(attention, pages)
    sources = Sources(Q, K, None, None, None, CS)
    Qo = T.arg("Qo", T.buffer((m, heads, width), "float16"))
    with launch((-(-(heads + 1) // waves), m), (arch.wave, waves)) as (block, row, lane, wave):
        own = Heads(arch, attention, rope, sources, lane, shared)
        meeting = Meeting(arch, attention, waves, wave) if attention.quantized else None
        head, position = T.Bind(block * waves + wave), T.Bind(row_position(rows, row))

        def turned(X: Expr, column: Expr) -> Iterator[Expr]:
            """The rotated columns of X from `column` on, as elements of a key."""
            for valid, pair in own.rotated(X, row, column, position):
                yield valid, [(values + e, y) for e, y in pair]

        def write_query() -> None:
            for valid, e in own_elements(arch, lane, 0, values):
                store_valid(valid, Qo, [((row, head, e), T.cast(L[row, head * values + e] * scale, "float16"))])
            for valid, pair in turned(Q, head * shared):
                store_valid(valid, Qo, [((row, head, e), T.cast(y * scale, "float16")) for e, y in pair])
            for valid, e in own_elements(arch, lane, attention.d, width):
                store_valid(valid, Qo, [((row, head, e), T.float16(0))])

        def write_key() -> None:
            latent = [(valid, e, T.Bind(K[row, e])) for valid, e in own_elements(arch, lane, 0, values)]
            factor = T.Bind(norm_scale(arch, [(valid, [x]) for valid, _, x in latent], values, rope.eps))
            key = [(valid, [(e, x * factor * KN[e])]) for valid, e, x in latent]
            slot, key = row_slot(rows, row), [*key, *turned(K, values)]
            if meeting:
                cache.store_codes(arch, T.int32(0), slot, position, meeting.of(key), lane)
            else:
                cache.store_key(0, slot, position, key)

        live = tirx.all(is_live(state, row), position >= 0, position < attention.ctx, head <= heads)
        with T.If(live), T.Then(), T.If(head < heads):
            with T.Then():
                write_query()
            with T.Else():
                write_key()
