"""Rotary position embedding, and the new keys and values into the cache: what stands between the q/k/v projections and
attention.

In: the float32 rows of Q, K, V of a chunk's tokens, a table of cosines and sines, and `state` int32[4] = {position,
live, ...}. Out: the rotated queries, times log2(e)/sqrt(d) (attention works with powers of two), and the caches,
updated in place for the live tokens:

    Kc float16 [kv_heads, ctx/16, d, 16]    16 keys side by side: a register of scores is 16 keys
    Vc float16 [kv_heads, ctx, d]           a register of outputs is 16 elements of one value

Models differ in three ways, all parameters here: which elements form a pair (neox: i and i + rotary/2; otherwise 2i and
2i + 1), how many elements of a head rotate (the rest passes through), and whether each head of q and k is normalized
first (Qwen 3).
"""

import math

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.norm import token_loop
from mlc_amd.schedules.cpu.vector import LANES, at, dtype, f32, splat, store, tree_add

KEYS = 16  # keys of a tile of Kc


def cache_shapes(kv_heads, ctx, d):
    """Shapes of Kc and Vc (float16). UserError unless 64 divides ctx and 32 divides d, as the attention kernels
    need."""
    if ctx % 64 or d % 32:
        raise UserError(
            f"attention on the CPU needs a context in multiples of 64 and heads in multiples of 32, not {ctx} and {d}"
        )
    return (kv_heads, ctx // KEYS, d, KEYS), (kv_heads, ctx, d)


def _lanes(*sizes):
    """The widest vector that divides all sizes."""
    return math.gcd(LANES, *sizes)


class _Rotation:
    """Cosines and sines of one token, in the order in which its pairs lie in a head, and the head's elements rotated by
    them."""

    def __init__(self, CS, position, d, rotary, neox):
        self.d, self.half, self.neox = d, rotary // 2, neox
        self.cos, self.sin = (T.alloc_buffer((rotary,), "float32", scope="local") for _ in range(2))
        with T.serial(self.half) as i:
            c, s = (T.Bind(CS[position, i * 2 + j]) for j in range(2))
            for j, sign in ((0, -1), (1, 1)):  # y = x * cos + partner * sin: the first of a pair subtracts
                place = i + j * self.half if neox else i * 2 + j
                store(self.cos, c, place)
                store(self.sin, s * T.float32(sign), place)

    def vectors(self, load):
        """Yields (first element, lanes, rotated value) for a whole head; `load(e, n)` gives elements e .. e+n-1."""
        rotary, half = self.half * 2, self.half
        n = _lanes(half) if self.neox else _lanes(rotary)
        for e in range(0, rotary, n):
            x = T.Bind(load(e, n))
            partner = load((e + half) % rotary, n) if self.neox else T.Shuffle([x], [T.int32(i ^ 1) for i in range(n)])
            yield e, n, T.Bind(x * self.cos[at(e, n)] + partner * self.sin[at(e, n)])
        n = _lanes(self.d - rotary)
        for e in range(rotary, self.d, n):
            yield e, n, T.Bind(load(e, n))


def _head_loader(X, token, head, d, weight, eps):
    """load(e, n) of one head's elements, times weight / sqrt(mean of squares + eps) when there is a `weight`."""

    def plain(e, n):
        return X[token, at(head * d + e, n)]

    if weight is None:
        return plain
    squares = f32(0.0)
    for e in range(0, d, LANES):
        x = T.Bind(plain(e, LANES))
        squares = squares + x * x
    scale = T.Bind(T.float32(1) / T.sqrt(tree_add(T.Bind(squares)) * T.float32(1 / d) + T.float32(eps)))
    return lambda e, n: plain(e, n) * splat(scale, n) * weight[at(e, n)]


def rope_kv_write(heads, kv_heads, d, ctx, m, neox, rotary, qk_norm_eps, isa, name) -> tirx.PrimFunc:
    """Kernel (state int32[4], Q float32 [m, heads*d], K float32 [m, kv_heads*d], V float32 [m, kv_heads*d], [QN float32
    [d], KN float32 [d] when qk_norm_eps is not None], CS float32 [ctx, rotary] with CS[pos, 2i] = cos, CS[pos, 2i+1] =
    sin of pair i, Kc, Vc (in place), Qo float32 [m, heads, d]).

    Token i of the chunk has position state[0] + i; tokens that are not live, or at or beyond ctx, write nothing.
    UserError for shapes that `cache_shapes` refuses and for an odd number of rotated elements.
    """
    kshape, vshape = cache_shapes(kv_heads, ctx, d)
    if rotary % 2 or not 0 < rotary <= d:
        raise UserError(f"rotary embedding needs an even number of elements, at most the head's {d}, not {rotary}")
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state = T.arg("state", T.buffer((4,), "int32"))
        Q, K, V = (
            T.arg(n, T.buffer((m, h * d), "float32")) for n, h in (("Q", heads), ("K", kv_heads), ("V", kv_heads))
        )
        QN, KN = (None, None) if qk_norm_eps is None else (T.arg(n, T.buffer((d,), "float32")) for n in ("QN", "KN"))
        CS = T.arg("CS", T.buffer((ctx, rotary), "float32"))
        Kc, Vc = T.arg("Kc", T.buffer(kshape, "float16")), T.arg("Vc", T.buffer(vshape, "float16"))
        Qo = T.arg("Qo", T.buffer((m, heads, d), "float32"))
        with token_loop(state, m) as token:
            position = T.Bind(state[0] + token)
            with T.If(tirx.all(position >= 0, position < ctx)), T.Then():
                rotation = _Rotation(CS, position, d, rotary, neox)
                with T.serial(heads) as h:
                    for e, n, y in rotation.vectors(_head_loader(Q, token, h, d, QN, qk_norm_eps)):
                        store(Qo, y * f32(math.log2(math.e) / math.sqrt(d), n), token, h, at(e, n))
                with T.serial(kv_heads) as h:
                    tile, lane = T.Bind(position // KEYS), T.Bind(position % KEYS)
                    for e, n, y in rotation.vectors(_head_loader(K, token, h, d, KN, qk_norm_eps)):
                        y = T.Bind(T.cast(y, dtype("float16", n)))
                        for i in range(n):
                            store(Kc, T.Shuffle([y], [T.int32(i)]), h, tile, e + i, lane)
                    for e in range(0, d, LANES):
                        store(Vc, T.cast(V[token, at(h * d + e)], f"float16x{LANES}"), h, position, at(e))
    return ir.get()
