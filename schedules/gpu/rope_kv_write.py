"""Rotary position embedding, and the new keys and values into the cache: what stands between the q/k/v projections and
attention.

In: the float32 rows of Q, K, V of a step's tokens, a table of cosines and sines, `state`. Out: the rotated queries as
float16, times `Attention.query_scale`, and the cache, updated in place for live rows.

Models differ (`Rope`) in which elements form a pair, how many elements of a head rotate (the rest passes through, none
is possible), and whether each head of q and k is normalized first. A wave has one head of one row. Decode does without
this kernel: `attention_decode.py` does the same work with the functions here.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.attention import Attention, Rope, padded_columns
from mlc_amd.schedules.gpu.cache import Cache, row_position, store_valid
from mlc_amd.schedules.gpu.device import launch, rsqrt, wave_sum
from mlc_amd.schedules.gpu.step import is_live, kernel, state_arg


@dataclass(frozen=True)
class Plan:
    """waves: of a workgroup, where the arch allows so many."""

    waves: int


PLAN = Plan(waves=4)


class Sources(NamedTuple):
    """The parameters Q, K, V, QN, KN, CS of `rope_kv_write`; QN and KN are None without normalization, CS without
    rotation."""

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
    sources = ("Q", heads), ("K", kv_heads), ("V", kv_heads)
    Q, K, V = (T.arg(n, T.buffer((m, padded_columns(h * d)), "float32")) for n, h in sources)
    QN, KN = (None, None) if rope.eps is None else (T.arg(n, T.buffer((padded_columns(d),), "float32")) for n in ("QN", "KN"))
    CS = T.arg("CS", T.buffer((attention.ctx, rope.rotary), "float32")) if rope.rotary else None
    return Sources(Q, K, V, QN, KN, CS)


def rotated(arch, X, token, column, CS, position, weight, lane, d, rope):
    """One head's rotation by a wave: yields (valid, ((element, value), (element, value))) for each pair of this lane.

    The head is X[token, column:column+d], float32. `valid` is None, or says whether the lane has such a pair (it must
    not store otherwise). weight: None or float32 [d], then the head is multiplied by weight / sqrt(mean of squares +
    eps) first.
    """
    half, pairs = rope.rotary // 2, d // 2
    loaded = []
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
        loaded.append((valid, pair, elements, [T.Bind(X[token, column + e]) for e in elements]))
    if weight is not None:
        squares = T.float32(0)
        for valid, _, _, (x, y) in loaded:
            square = x * x + y * y
            squares = squares + (square if valid is None else T.Select(valid, square, T.float32(0)))
        scale = rsqrt(wave_sum(arch, T.Bind(squares)) * T.float32(1 / d) + T.float32(rope.eps))
        loaded = [
            (v, p, es, [T.Bind(x * scale * weight[e]) for e, x in zip(es, xs, strict=True)]) for v, p, es, xs in loaded
        ]
    for valid, pair, elements, (x, y) in loaded:
        if not half:
            yield valid, tuple(zip(elements, (x, y), strict=True))
            continue
        place = T.Bind(T.min(pair, T.int32(half - 1)))
        cos, sin = (T.Bind(CS[position, place * 2 + i]) for i in range(2))
        if rope.rotary < d:
            cos, sin = (
                T.Bind(T.Select(pair < half, cos, T.float32(1))),
                T.Bind(T.Select(pair < half, sin, T.float32(0))),
            )
        yield valid, tuple(zip(elements, (T.Bind(x * cos - y * sin), T.Bind(x * sin + y * cos)), strict=True))


def rope_kv_write(attention: Attention, m, rope: Rope, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Q float32 [m, heads*d], K float32 [m, kv_heads*d], V float32 [m, kv_heads*d], [QN float32
    [d], KN float32 [d] when rope.eps is not None], [CS float32 [ctx, rotary] with CS[pos, 2i] = cos, CS[pos, 2i+1] =
    sin of pair i, unless rotary is 0], Kc, Vc (in place), Qo float16 [m, heads, width], whose padding becomes 0).

    Q, K, V and the norms' weights are padded to multiples of 16 columns, as linear layers and vectors are. Rows that are not live, or whose position is at or beyond ctx, write nothing. UserError for shapes that
    `cache_types` or `rope_args` refuses.
    """
    heads, kv_heads, d = attention.heads, attention.kv_heads, attention.d
    total, waves = heads + 2 * kv_heads, min((plan or PLAN).waves, arch.threads // arch.wave)
    with kernel(name) as ir:
        state = state_arg()
        Q, K, V, QN, KN, CS = rope_args(attention, m, rope)
        cache = Cache(attention)
        Qo = T.arg("Qo", T.buffer((m, heads, attention.width), "float16"))
        with launch((-(-total // waves), m), (arch.wave, waves)) as (block, row, lane, wave):
            head, position = T.Bind(block * waves + wave), T.Bind(row_position(state, row))
            live = tirx.all(is_live(state, row), position >= 0, position < attention.ctx, head < total)
            with T.If(live), T.Then(), T.If(head < heads):
                with T.Then():
                    scale = T.float32(attention.query_scale)
                    for valid, values in rotated(arch, Q, row, head * d, CS, position, QN, lane, d, rope):
                        stores = [((row, head, e), T.cast(y * scale, "float16")) for e, y in values]
                        store_valid(valid, Qo, stores)
                    for first in range(d, attention.width, arch.wave):
                        valid = None if first + arch.wave <= attention.width else first + lane < attention.width
                        store_valid(valid, Qo, [((row, head, first + lane), T.float16(0))])
                with T.Else(), T.If(head < heads + kv_heads):
                    with T.Then():
                        kv = T.Bind(head - heads)
                        cache.store_key(kv, position, rotated(arch, K, row, kv * d, CS, position, KN, lane, d, rope))
                    with T.Else():
                        cache.store_value(arch, T.Bind(head - heads - kv_heads), position, V, row, lane)
    return ir.get()
