"""Rotary position embedding, and the new keys and values into the cache: what stands between the q/k/v projections and
attention.

In: the float32 rows of Q, K, V of a step's tokens, their places in sequences, a table of cosines and sines. Out: the
rotated queries as float16, times `Attention.query_scale`, and the cache, updated in place for live rows.

Models differ (`Rope`) in which elements form a pair, how many elements of a head rotate (the rest passes through, none
is possible), and which heads are normalized, before or after that. A wave has one head of one row. Decode does without
this kernel: `attention_decode.py` does the same work with the functions here.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.cache import Cache, pages_arg, row_position, row_slot, rows_arg, store_valid
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, launch, rsqrt, wave_meets, wave_sum
from mlc_amd.schedules.gpu.base.step import is_live, kernel, state_arg
from mlc_amd.schedules.operators.attention import Attention, Rope, padded_columns


@dataclass(frozen=True)
class Plan:
    """waves: of a workgroup, where the arch allows so many."""

    waves: int


PLAN = Plan(waves=4)


def wave_heads(attention: Attention, rope: Rope) -> int:
    """Heads that a row has, one for a wave each."""
    return attention.heads + (2 * attention.kv_heads if rope.writes else 0)


class Sources(NamedTuple):
    """The parameters Q, K, V, QN, KN, CS of `rope_kv_write`; None: it has no such parameter."""

    Q: object
    K: object
    V: object
    QN: object
    KN: object
    CS: object


def rope_args(attention: Attention, m, rope: Rope) -> Sources:
    """Declares the parameters. UserError for a number of rotated elements that is odd or larger than the head."""
    d, heads, kv_heads = attention.d, attention.heads, attention.kv_heads
    if rope.rotary % 2 or not 0 <= rope.rotary <= d:
        raise UserError(f"rotary embedding needs an even number of elements, at most the head's {d}, not {rope.rotary}")
    rows = {"Q": heads} | ({"K": kv_heads, "V": kv_heads} if rope.writes else {})
    shapes = {name: (m, padded_columns(count * d)) for name, count in rows.items()}
    if rope.eps is not None:
        shapes |= {name: (padded_columns(d),) for name in (("QN", "KN") if rope.writes else ("QN",))}
    if rope.rotary:
        shapes["CS"] = attention.ctx, rope.rotary
    found = {name: T.arg(name, T.buffer(shape, "float32")) for name, shape in shapes.items()}
    return Sources(*(found.get(name) for name in Sources._fields))


class Pair(NamedTuple):
    """Two elements of a head, which rotate together if they rotate. valid: None, or whether the lane has such a pair
    (it must not store otherwise)."""

    valid: object
    number: object
    elements: list
    values: list


def _load_pairs(X, token, column, arch, lane, d, rope):
    """The pairs of a lane, of the head X[token, column:column+d]."""
    half, pairs = rope.rotary // 2, d // 2
    for first in range(0, pairs, arch.wave):
        valid = None if first + arch.wave <= pairs else first + lane < pairs
        pair = T.Bind(first + lane if valid is None else T.min(first + lane, T.int32(pairs - 1)))
        rotates = pair < half
        low, high = (
            (T.Select(rotates, pair, pair * 2), T.Select(rotates, pair + half, pair * 2 + 1))
            if rope.neox and half
            else (pair * 2, pair * 2 + 1)
        )
        elements = [T.Bind(e) for e in (low, high)]
        yield Pair(valid, pair, elements, [T.Bind(X[token, column + e]) for e in elements])


def norm_scale(arch, parts, d, eps):
    """1 / sqrt(mean of squares + eps) of a head's d elements, in all lanes. parts: (valid, values) that this lane
    has."""
    squares = T.float32(0)
    for valid, values in parts:
        square = sum((x * x for x in values[1:]), values[0] * values[0])
        squares = squares + (square if valid is None else T.Select(valid, square, T.float32(0)))
    return rsqrt(wave_sum(arch, T.Bind(squares)) * T.float32(1 / d) + T.float32(eps))


def _normalize(pairs, arch, weight, d, eps):
    scale = norm_scale(arch, [(pair.valid, pair.values) for pair in pairs], d, eps)
    return [
        pair._replace(values=[T.Bind(x * scale * weight[e]) for e, x in zip(pair.elements, pair.values, strict=True)])
        for pair in pairs
    ]


def _rotate(pair, CS, position, d, rope):
    """The pair's values, rotated."""
    half, (x, y) = rope.rotary // 2, pair.values
    if not half:
        return x, y
    place = T.Bind(T.min(pair.number, T.int32(half - 1)))
    cos, sin = (T.Bind(CS[position, place * 2 + i]) for i in range(2))
    if rope.rotary < d:
        cos, sin = (
            T.Bind(T.Select(pair.number < half, cos, T.float32(1))),
            T.Bind(T.Select(pair.number < half, sin, T.float32(0))),
        )
    return T.Bind(x * cos - y * sin), T.Bind(x * sin + y * cos)


def rotated(arch, X, token, column, CS, position, weight, lane, d, rope):
    """One head's norm and rotation by a wave: yields (valid, ((element, value), (element, value))) for each `Pair` of
    this lane.

    The head is X[token, column:column+d], float32. weight: of the head's norm, float32 [d], or None.
    """
    pairs = list(_load_pairs(X, token, column, arch, lane, d, rope))
    if weight is not None and not rope.norm_after:
        pairs = _normalize(pairs, arch, weight, d, rope.eps)
    if weight is not None and rope.norm_after:
        pairs = [pair._replace(values=_rotate(pair, CS, position, d, rope)) for pair in pairs]
        for pair in _normalize(pairs, arch, weight, d, rope.eps):
            yield pair.valid, tuple(zip(pair.elements, pair.values, strict=True))
        return
    for pair in pairs:
        yield pair.valid, tuple(zip(pair.elements, _rotate(pair, CS, position, d, rope), strict=True))


def value_scale(arch, V, row, kv, lane, d, rope):
    """The factor on the elements of a head of V that its norm makes, in all lanes of a wave; None without a norm."""
    if not rope.value_norm:
        return None
    parts = []
    for first in range(0, d, arch.wave):
        valid = None if first + arch.wave <= d else first + lane < d
        e = T.Bind(first + lane if valid is None else T.min(first + lane, T.int32(d - 1)))
        parts.append((valid, [T.Bind(V[row, kv * d + e])]))
    return norm_scale(arch, parts, d, rope.eps)


def rope_kv_write(attention: Attention, m, rope: Rope, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32[m, 2], pages of `pages_arg`, Q float32 [m, heads*d], K float32 [m,
    kv_heads*d], V float32 [m, kv_heads*d], [QN float32 [d], KN float32 [d] when rope.eps is not None], [CS float32
    [ctx, rotary] with CS[pos, 2i] = cos, CS[pos, 2i+1] = sin of pair i, unless rotary is 0], the cache as in
    `cache.py` (in place), Qo float16 [m, heads, width], whose padding becomes 0).

    Without rope.writes there are no pages, K, V, KN, caches. Q, K, V and the norms' weights are padded to multiples of
    16 columns, as linear layers and vectors are. Rows that are not live, or whose position is at or beyond ctx, write
    nothing. UserError for shapes that `cache_types` or `rope_args` refuses.
    """
    heads, kv_heads, d = attention.heads, attention.kv_heads, attention.d
    total, waves = wave_heads(attention, rope), min((plan or PLAN).waves, arch.threads // arch.wave)
    with kernel(name) as ir:
        state, rows = state_arg(), rows_arg(m)
        pages = pages_arg(attention) if rope.writes else None
        Q, K, V, QN, KN, CS = rope_args(attention, m, rope)
        cache = Cache(attention, pages) if rope.writes else None
        Qo = T.arg("Qo", T.buffer((m, heads, attention.width), "float16"))
        with launch((-(-total // waves), m), (arch.wave, waves)) as (block, row, lane, wave):
            head, position = T.Bind(block * waves + wave), T.Bind(row_position(rows, row))
            if cache and attention.quantized:
                turned = T.alloc_buffer((waves * d,), "float16", scope=WAVE_SHARED)

            def write_query():
                scale = T.float32(attention.query_scale)
                for valid, values in rotated(arch, Q, row, head * d, CS, position, QN, lane, d, rope):
                    stores = [((row, head, e), T.cast(y * scale, "float16")) for e, y in values]
                    store_valid(valid, Qo, stores)
                for first in range(d, attention.width, arch.wave):
                    valid = None if first + arch.wave <= attention.width else first + lane < attention.width
                    store_valid(valid, Qo, [((row, head, first + lane), T.float16(0))])

            def write_codes(cache, kv, slot, key):
                """The lanes that quantize a block have others of its elements than those that rotated them. Rounded to
                float16, as what decode attention has of its own key."""
                for valid, values in key:
                    store_valid(valid, turned, [((wave * d + e,), T.cast(y, "float16")) for e, y in values])
                wave_meets(arch)
                cache.store_key_codes(arch, kv, slot, position, lambda e: T.cast(turned[wave * d + e], "float32"), lane)

            def write_key_or_value(cache):
                slot = row_slot(rows, row)
                with T.If(head < heads + kv_heads):
                    with T.Then():
                        kv = T.Bind(head - heads)
                        key = rotated(arch, K, row, kv * d, CS, position, KN, lane, d, rope)
                        if attention.quantized:
                            write_codes(cache, kv, slot, key)
                        else:
                            cache.store_key(kv, slot, position, key)
                    with T.Else():
                        kv = T.Bind(head - heads - kv_heads)
                        scale = value_scale(arch, V, row, kv, lane, d, rope)
                        cache.store_value(arch, kv, slot, position, V, row, lane, scale)

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
    return ir.get()
