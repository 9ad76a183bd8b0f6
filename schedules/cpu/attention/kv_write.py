"""The kernels `rope_kv_write` and `latent_kv_write` on the CPU, between the projections and attention: head norms,
rotary position embedding (RoPE), and the write of new keys and values to the cache.

`schedules.operators.attention.Rope` describes the differences between models: which elements of a head form a pair, how
many elements rotate (the others are unchanged), which heads are normalized, and whether before or after the rotation.
schedules/kv_writes.py describes the inputs.
"""

import math
from collections.abc import Callable, Iterator

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.cache import Cache, RowTable, is_position
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.hadamard import hadamard
from mlc_amd.schedules.cpu.base.kernel import kernel, row_loop
from mlc_amd.schedules.cpu.base.vector import LANES, at, f32, splat, store, tree_add
from mlc_amd.schedules.kv_writes import latent_args, rope_args
from mlc_amd.schedules.operators import LatentKvWrite, RopeKvWrite
from mlc_amd.schedules.operators.attention import Rope
from mlc_amd.schedules.tir import Buffer, Expr

Load = Callable[[Expr, int], Expr]  # load(e, n): elements e .. e+n-1 of a head, a float32 vector
Head = Iterator[tuple[int, int, Expr]]  # all elements of a head as vectors: (first element, lanes, vector)


def _lanes(*sizes: int) -> int:
    """The lanes of the longest vector whose length divides all sizes."""
    return math.gcd(LANES, *sizes)


class Rotation:
    """Rotates heads by the cosines and sines in a row of CS, which it copies in the order of a head's elements."""

    def __init__(self, CS: Buffer | None, row: Expr, d: int, rope: Rope):
        self.d, self.half, self.neox = d, rope.rotary // 2, rope.neox
        if CS is None:
            return
        self.cos, self.sin = (T.alloc_buffer((rope.rotary,), "float32", scope="local") for _ in range(2))
        with T.serial(self.half) as i:
            c, s = (T.Bind(CS[row, i * 2 + j]) for j in range(2))
            for j, sign in ((0, -1), (1, 1)):  # y = x * cos + partner * sin: the first of a pair subtracts
                place = i + j * self.half if rope.neox else i * 2 + j
                store(self.cos, c, place)
                store(self.sin, s * T.float32(sign), place)

    def vectors(self, load: Load) -> Head:
        """The rotated head."""
        rotary, half = self.half * 2, self.half
        n = _lanes(half) if self.neox else _lanes(rotary)
        for e in range(0, rotary, n):
            x = T.Bind(load(e, n))
            partner = load((e + half) % rotary, n) if self.neox else T.Shuffle([x], [T.int32(i ^ 1) for i in range(n)])
            yield e, n, T.Bind(x * self.cos[at(e, n)] + partner * self.sin[at(e, n)])
        n = _lanes(self.d - rotary)
        for e in range(rotary, self.d, n):
            yield e, n, T.Bind(load(e, n))


def loader(X: Buffer, row: Expr, head: Expr, d: int) -> Load:
    """A Load of a head of a row of X."""
    return lambda e, n: X[row, at(head * d + e, n)]


def normalized(load: Load, d: int, eps: float, weight: Buffer | None = None) -> Load:
    """A Load of the RMS norm of a head, multiplied by the weight if there is one."""
    lanes = _lanes(d)
    squares = f32(0.0, lanes)
    for e in range(0, d, lanes):
        x = T.Bind(load(e, lanes))
        squares = squares + x * x
    scale = T.Bind(T.float32(1) / T.sqrt(tree_add(T.Bind(squares), lanes) * T.float32(1 / d) + T.float32(eps)))
    if weight is None:
        return lambda e, n: load(e, n) * splat(scale, n)
    return lambda e, n: load(e, n) * splat(scale, n) * weight[at(e, n)]


def vectors(load: Load, d: int) -> Head:
    n = _lanes(d)
    for e in range(0, d, n):
        yield e, n, load(e, n)


def _rotated(rotation: Rotation, load: Load, d: int, rope: Rope, weight: Buffer | None) -> Head:
    """A head of q or k, normalized with `weight` (None: not) and rotated, in the order of rope.norm_after."""
    if weight is None or rope.eps is None:
        return rotation.vectors(load)
    if not rope.norm_after:
        return rotation.vectors(normalized(load, d, rope.eps, weight))
    turned = T.alloc_buffer((d,), "float32", scope="local")
    for e, n, y in rotation.vectors(load):
        store(turned, y, at(e, n))
    return vectors(normalized(lambda e, n: turned[at(e, n)], d, rope.eps, weight), d)


def multiplied(head: Head, d: int, size: int) -> Head:
    """A head of d columns, with each block of `size` columns multiplied by a Hadamard matrix; size 0: unchanged."""
    if not size:
        yield from head
        return
    whole = T.alloc_buffer((d,), "float32", scope="local")
    for e, n, y in head:
        store(whole, y, at(e, n))
    hadamard(whole, d, size)
    yield from vectors(lambda e, n: whole[at(e, n)], d)


@registry.builds(RopeKvWrite)
def rope_kv_write(op: RopeKvWrite, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32 [m, 2], pages as in cache.py, the parameters of `rope_args`, Kc, Vc, Ks, Vs as
    in cache.py (in place), Qo float32 [m, heads, width]). Qo is multiplied by layer.query_scale; its padding is not
    written. Without rope.writes there are no pages and no cache.

    Rows that are not live, or whose position is not in the cache, write nothing. Raises UserError for shapes that
    `cache_types` or `rope_args` refuses.
    """
    spec, rope, m = op.layer, op.rope, op.m
    d = spec.d
    with kernel(name) as (builder, state):
        table = RowTable(m)
        cache = Cache(spec, arch.isa).declare_pages() if rope.writes else None
        sources = rope_args(spec, m, rope)
        if cache:
            cache.declare()
        Qo = T.arg("Qo", T.buffer((m, spec.heads, spec.width), "float32"))
        with row_loop(state, m) as row:
            position = T.Bind(table.position(row))
            with T.If(is_position(spec, position)), T.Then():
                rotation = Rotation(sources.CS, row if rope.by_row else position, d, rope)
                with T.serial(spec.heads) as h:
                    load = loader(sources.Q, row, h, d)
                    query = _rotated(rotation, load, d, rope, sources.QN)
                    for e, n, y in multiplied(query, d, spec.rotation):
                        store(Qo, y * f32(spec.query_scale, n), row, h, at(e, n))
                if cache:
                    place = cache.place(table.slot(row), position)
                    with T.serial(spec.kv_heads) as h:
                        with cache.key_writer(h, place) as write:
                            load = loader(sources.K, row, h, d)
                            for e, n, y in _rotated(rotation, load, d, rope, sources.KN):
                                write(e, n, y)
                        value = loader(sources.V, row, h, d)
                        value = normalized(value, d, rope.eps) if rope.value_norm and rope.eps is not None else value
                        with cache.value_writer(h, place) as write:
                            for e, n, y in vectors(value, d):
                                write(e, n, y)
    return builder.get()


@registry.builds(LatentKvWrite)
def latent_kv_write(op: LatentKvWrite, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32 [m, 2], pages as in cache.py, the parameters of `latent_args`, Kc as in
    cache.py (in place), Qo float32 [m, heads, width]). Qo is multiplied by layer.query_scale.

    Rows that are not live, or whose position is not in the cache, write nothing. Raises UserError for shapes that
    `cache_types` refuses; ValueError without a norm, or unless all or none of a key's columns after its values rotate.
    """
    spec, rope, m = op.layer, op.rope, op.m
    heads, values, shared = spec.heads, spec.values, spec.d - spec.values
    if rope.rotary not in (0, shared) or rope.eps is None:
        raise ValueError(f"latent keys need a norm (eps), and 0 or {shared} rotating columns, not {rope.rotary}")
    with kernel(name) as (builder, state):
        table, cache = RowTable(m), Cache(spec, arch.isa).declare_pages()
        Q, L, K, KN, CS = latent_args(op)
        cache.declare()
        Qo = T.arg("Qo", T.buffer((m, heads, spec.width), "float32"))
        with row_loop(state, m) as row:
            position = T.Bind(table.position(row))
            with T.If(is_position(spec, position)), T.Then():
                rotation = Rotation(CS, position, shared, rope)
                with T.serial(heads) as h:
                    for e, n, y in vectors(loader(L, row, h, values), values):
                        store(Qo, y * f32(spec.query_scale, n), row, h, at(e, n))
                    for e, n, y in rotation.vectors(loader(Q, row, h, shared)):
                        store(Qo, y * f32(spec.query_scale, n), row, h, at(values + e, n))
                latent = normalized(loader(K, row, 0, values), values, rope.eps, KN)
                with cache.key_writer(0, cache.place(table.slot(row), position)) as write:
                    for e, n, y in vectors(latent, values):
                        write(e, n, y)
                    for e, n, y in rotation.vectors(lambda e, n: K[row, at(values + e, n)]):
                        write(values + e, n, y)
    return builder.get()
