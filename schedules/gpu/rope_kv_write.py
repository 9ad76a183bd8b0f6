"""Rotary position embedding, and the new keys and values into the cache: what stands between the q/k/v projections and
attention.

In: the float32 rows of Q, K, V of a chunk's tokens, a table of cosines and sines, and `state` int32[4] = {position,
live, ...}. Out: the rotated queries as float16, times log2(e)/sqrt(d) (attention works with powers of two), and the
caches, updated in place for live tokens:

    Kc float16 [kv_heads, ctx/32, d/8, 32, 8]   16-byte units of 8 elements of a key: 32 lanes with a key each read 512
                                                bytes in a row
    Vc float16 [kv_heads, ctx/8, d, 8]          16-byte units of 8 keys of a column: lanes with a column each read in a
                                                row

Both are what matrix instructions want as operands, too. Allocate Vc zeroed: attention multiplies keys beyond the end by
0.

Models differ in three ways, all parameters here: which elements form a pair (neox: i and i + rotary/2; otherwise 2i and
2i + 1), how many elements of a head rotate (the rest passes through), and whether each head of q and k is normalized
first (Qwen 3). A wave has one head of one token. Decode does without this kernel: `attention_decode.py` does the same
work with the functions here.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.device import launch, rsqrt, wave_sum

KEYS, UNIT = 32, 8  # keys of a block of Kc; elements of a 16-byte unit


@dataclass(frozen=True)
class Plan:
    """waves: of a workgroup, where the arch allows so many."""

    waves: int


PLAN = Plan(waves=4)


class Rope(NamedTuple):
    """How a model rotates: see the module. `eps` is that of the heads' normalization, None: there is none."""

    neox: bool
    rotary: int
    eps: float | None = None


def cache_shapes(kv_heads, ctx, d):
    """Shapes of Kc and Vc (float16). UserError unless 64 divides ctx and 32 divides d, as the attention kernels
    need."""
    if ctx % 64 or d % 32:
        raise UserError(
            f"attention on the GPU needs a context in multiples of 64 and heads in multiples of 32, not {ctx} and {d}"
        )
    return (kv_heads, ctx // KEYS, d // UNIT, KEYS, UNIT), (kv_heads, ctx // UNIT, d, UNIT)


def query_scale(d):
    """What queries are multiplied by, so that 2**(q . k) is exp of the usual score."""
    return math.log2(math.e) / math.sqrt(d)


def rope_args(heads, kv_heads, d, ctx, m, rope):
    """Declares the parameters Q, K, V, QN, KN, CS (see `rope_kv_write`); QN and KN are None without normalization.
    UserError for a number of rotated elements that is odd or larger than the head."""
    if rope.rotary % 2 or not 0 < rope.rotary <= d:
        raise UserError(f"rotary embedding needs an even number of elements, at most the head's {d}, not {rope.rotary}")
    Q, K, V = (T.arg(n, T.buffer((m, h * d), "float32")) for n, h in (("Q", heads), ("K", kv_heads), ("V", kv_heads)))
    QN, KN = (None, None) if rope.eps is None else (T.arg(n, T.buffer((d,), "float32")) for n in ("QN", "KN"))
    return Q, K, V, QN, KN, T.arg("CS", T.buffer((ctx, rope.rotary), "float32"))


def rotated(arch, X, token, column, CS, position, weight, lane, d, rope):
    """One head's rotation by a wave: yields (valid, ((element, value), (element, value))), this lane's pairs one after
    the other.

    The head is X[token, column:column+d], float32. `valid` is None, or says whether the lane has such a pair (it may
    not store otherwise). weight: None or float32 [d], then the head is multiplied by weight / sqrt(mean of squares +
    eps) first.
    """
    half, pairs = rope.rotary // 2, d // 2
    loaded = []
    for first in range(0, pairs, arch.wave):
        valid = None if first + arch.wave <= pairs else first + lane < pairs
        pair = T.Bind(first + lane if valid is None else T.min(first + lane, T.int32(pairs - 1)))
        turns = pair < half
        low, high = (
            (T.Select(turns, pair, pair * 2), T.Select(turns, pair + half, pair * 2 + 1))
            if rope.neox
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
        place = T.Bind(T.min(pair, T.int32(half - 1)))
        cos, sin = (T.Bind(CS[position, place * 2 + i]) for i in range(2))
        if rope.rotary < d:
            cos, sin = (
                T.Bind(T.Select(pair < half, cos, T.float32(1))),
                T.Bind(T.Select(pair < half, sin, T.float32(0))),
            )
        yield valid, tuple(zip(elements, (T.Bind(x * cos - y * sin), T.Bind(x * sin + y * cos)), strict=True))


def store_valid(valid, buffer, stores):
    """Stores (index, value)s where `valid` holds (None: always)."""
    if valid is None:
        for index, value in stores:
            T.buffer_store(buffer, value, list(index))
    else:
        with T.If(valid), T.Then():
            store_valid(None, buffer, stores)


def store_key(Kc, kv, position, pairs):
    """Stores what `rotated` yields into the cache."""
    for valid, values in pairs:
        places = [
            ((kv, position // KEYS, e // UNIT, position % KEYS, e % UNIT), T.cast(y, "float16")) for e, y in values
        ]
        store_valid(valid, Kc, places)


def store_value(arch, Vc, kv, position, V, token, lane, d):
    """Stores one token's value of one head, V[token, kv*d:], into the cache."""
    for first in range(0, d, arch.wave):
        valid = None if first + arch.wave <= d else first + lane < d
        e = T.Bind(first + lane if valid is None else T.min(first + lane, T.int32(d - 1)))
        store_valid(valid, Vc, [((kv, position // UNIT, e, position % UNIT), T.cast(V[token, kv * d + e], "float16"))])


def rope_kv_write(heads, kv_heads, d, ctx, m, neox, rotary, qk_norm_eps, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Q float32 [m, heads*d], K float32 [m, kv_heads*d], V float32 [m, kv_heads*d], [QN float32
    [d], KN float32 [d] when qk_norm_eps is not None], CS float32 [ctx, rotary] with CS[pos, 2i] = cos, CS[pos, 2i+1] =
    sin of pair i, Kc, Vc (in place), Qo float16 [m, heads, d]).

    Token i of the chunk has position state[0] + i; tokens that are not live, or at or beyond ctx, write nothing.
    UserError for shapes that `cache_shapes` or `rope_args` refuses.
    """
    kshape, vshape = cache_shapes(kv_heads, ctx, d)
    rope, total, waves = (
        Rope(neox, rotary, qk_norm_eps),
        heads + 2 * kv_heads,
        min((plan or PLAN).waves, arch.threads // arch.wave),
    )
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state = T.arg("state", T.buffer((4,), "int32"))
        Q, K, V, QN, KN, CS = rope_args(heads, kv_heads, d, ctx, m, rope)
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        Qo = T.arg("Qo", T.buffer((m, heads, d), "float16"))
        with launch((-(-total // waves), m), (arch.wave, waves)) as (block, token, lane, wave):
            head, position = T.Bind(block * waves + wave), T.Bind(state[0] + token)
            live = tirx.all(token < state[1], position >= 0, position < ctx, head < total)
            with T.If(live), T.Then(), T.If(head < heads):
                with T.Then():
                    for valid, values in rotated(arch, Q, token, head * d, CS, position, QN, lane, d, rope):
                        store_valid(
                            valid,
                            Qo,
                            [((token, head, e), T.cast(y * T.float32(query_scale(d)), "float16")) for e, y in values],
                        )
                with T.Else(), T.If(head < heads + kv_heads):
                    with T.Then():
                        kv = T.Bind(head - heads)
                        store_key(Kc, kv, position, rotated(arch, K, token, kv * d, CS, position, KN, lane, d, rope))
                    with T.Else():
                        store_value(arch, Vc, T.Bind(head - heads - kv_heads), position, V, token, lane, d)
    return ir.get()
