"""What rows of decode attention (`attention_decode.py`) add to their softmax that is not in the cache yet: their own
key and value, and those of rows before them in the same step that are of the same sequence.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_rows_matrix import MatrixRows
from mlc_amd.schedules.gpu.attention.attention_rows_vulkan import DotRows, query_dtype
from mlc_amd.schedules.gpu.attention.cache import UNIT, Cache, row_slot, store_valid
from mlc_amd.schedules.gpu.attention.kv_write import Elements, Heads
from mlc_amd.schedules.gpu.attention.softmax import P_SHIFT, soft_cap
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED, dot2, exp2, fma, wave_meets, wave_min
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.registers import at, lane_of, opaque, put
from mlc_amd.schedules.gpu.base.step import kept
from mlc_amd.schedules.tir import Buffer, Expr


class Place(NamedTuple):
    """A row of the step: its KV head here, its number, which is the int 0 in a step of one row, its position, and the
    slot of its sequence."""

    kv: Expr
    token: Expr
    position: Expr
    slot: Expr


class Takers(NamedTuple):
    """Waves of a workgroup that share out rows: the number of this one among them, and how many there are."""

    wave: Expr
    waves: int

    def count(self, rows: Expr) -> Expr:
        """How many of so many rows this wave has."""
        return T.truncdiv(T.max(rows - self.wave, T.int32(0)) + (self.waves - 1), T.int32(self.waves))


def store_rounded(
    pairs: Iterable[Elements], buffer: Buffer, *index: Expr, begin: Expr = None, scale: Expr = None
) -> None:
    """Stores a head's elements, times `scale`, as float16 in the type of the buffer, at (*index, begin + element)."""
    for valid, values in pairs:
        stores = [
            ((*index, e if begin is None else begin + e), _rounded(y if scale is None else y * scale, buffer))
            for e, y in values
        ]
        store_valid(valid, buffer, stores)


def _rounded(x: Expr, buffer: Buffer) -> Expr:
    half = T.cast(x, "float16")
    return half if str(buffer.dtype) == "float16" else T.cast(half, "float32")


def earlier_rows(arch: Device, places: Buffer, token: Expr, slot: Expr, lane: Expr) -> Expr:
    """How many rows right before row `token` are of its sequence."""
    m, first = int(places.shape[0]), token
    for start in range(0, m, arch.wave):
        row = T.Bind(T.min(start + lane, T.int32(m - 1)))
        same = (row < token) & (row_slot(places, row) == slot)
        first = T.Bind(T.min(first, wave_min(arch, T.Bind(T.Select(same, row, token)))))
    return T.Bind(token - first)


def _scores(rows: DotRows, queries: Buffer, key: Buffer, begin: Expr = 0) -> Iterator[Expr]:
    """Yields the score of each row with a key in shared memory, from element `begin` on, in all lanes."""
    arch, d = rows.arch, rows.d

    def part(r: int) -> Expr:
        """What this lane has of the row's score."""
        score = T.float32(0)
        for first in range(0, d // 2, arch.wave):
            pair = T.Bind(T.min(first + rows.lane, T.int32(d // 2 - 1)))
            product = _product(arch, queries[r, at(pair * 2, 2)], key[at(begin + pair * 2, 2)])
            score = score + T.Select(first + rows.lane < d // 2, product, T.float32(0))
        return T.Bind(score)

    for score in rows.sums(part(r) for r in range(rows.count)):
        yield soft_cap(rows.attention, score)


def _values(rows: DotRows, heads: Heads, row: Expr, kv: Expr, scale: Expr) -> Iterator[Expr]:
    """Yields this lane's elements of a row's value, rounded to float16. scale: of `Heads.value_scale`."""
    for x in range(rows.columns):
        yield T.cast(T.cast(heads.value(row, kv, rows.column(x), scale), "float16"), "float32")


def start_with_own(rows: DotRows, heads: Heads, queries: Buffer, own_key: Buffer, place: Place) -> None:
    """The rows' state after the token's own key, whose weight is 1."""
    scale = heads.value_scale(place.token, place.kv)
    for r, score in enumerate(_scores(rows, queries, own_key)):
        put(rows.top, score, r)
        put(rows.total, T.Select(rows.lane == 0, T.float32(2**P_SHIFT), T.float32(0)), r)
    for x, value in enumerate(_values(rows, heads, place.token, place.kv, scale)):
        value = T.Bind(value * T.float32(2**P_SHIFT))
        for r in range(rows.count):
            put(rows.out, value, r * rows.columns + x)


def add_earlier(rows: DotRows, heads: Heads, queries: Buffer, place: Place, others: Expr, takers: Takers) -> None:
    """Adds the keys of the `others` rows before it, which are of its sequence."""
    wave, waves = takers
    keys = T.alloc_buffer((waves * rows.d,), query_dtype(rows.arch), scope=WAVE_SHARED)
    count = takers.count(others)
    with T.serial(T.Bind(count if waves > 1 else T.Select(wave == 0, others, T.int32(0)))) as i:
        back = T.Bind(1 + wave + i * waves)
        row, position = T.Bind(place.token - back), T.Bind(T.max(place.position - back, T.int32(0)))
        begin = T.Bind(wave * rows.d) if waves > 1 else 0
        _add_row(rows, heads, queries, (keys, begin), place._replace(token=row, position=position))


def _add_row(rows: DotRows, heads: Heads, queries: Buffer, buffer: tuple[Buffer, Expr], place: Place) -> None:
    """Adds the key and the value of another row of the step to the rows' state. buffer: (shared memory, where the
    wave's own part of it begins)."""
    arch, (keys, begin), (kv, row, position, _) = rows.arch, buffer, place
    store_rounded(heads.key(row, kv, position), keys, begin=begin)
    wave_meets(arch)
    weights = []
    for r, score in enumerate(_scores(rows, queries, keys, begin)):
        weight = opaque(exp2(score - rows.rescale(r, score) + T.float32(P_SHIFT)))
        put(rows.total, rows.total[r] + T.Select(rows.lane == 0, weight, T.float32(0)), r)
        weights.append(weight)
    scale = heads.value_scale(row, kv)
    for x, value in enumerate(_values(rows, heads, row, kv, scale)):
        value = T.Bind(value)
        for r, weight in enumerate(weights):
            put(rows.out, fma(value, weight, rows.out[r * rows.columns + x]), r * rows.columns + x)
    wave_meets(arch)


def write_own(cache: Cache, heads: Heads, place: Place, own_key: Buffer) -> None:
    """Writes the row's own key and value to the cache. own_key: the rotated key in shared memory."""
    kv, token, position, slot = place
    if heads.layer.quantized:
        cache.store_codes(heads.arch, kv, slot, position, lambda e: T.cast(own_key[e], "float32"), heads.lane)
    else:
        cache.store_key(kv, slot, position, heads.key(token, kv, position))
    heads.store_value(cache, token, kv, slot, position, heads.value_scale(token, kv))


def add_rows(
    rows: MatrixRows, heads: Heads, keys: Buffer, place: Place, count: Expr, takers: Takers, target: tuple[Cache, Expr]
) -> None:
    """Adds the keys and values of a row and of count - 1 rows before it to the state of `MatrixRows`, if `count` is not
    0, and writes those of the row itself to the cache. The waves of the workgroup share them out; in a step of one row
    count is 1 at most.

    keys: shared memory, float16 [waves * d]; takers: the first takes the row itself; target: (cache, whether the row is
    written)
    """
    arch, d, lane, (kv, token, position, slot), (cache, writes) = rows.arch, rows.d, rows.lane, place, target
    begin = T.Bind(takers.wave * d)
    with kept(T.Bind(takers.count(count))) as i:
        back = T.Bind(takers.wave + i * takers.waves)
        row, there = token, position
        if not isinstance(token, int):
            row, there = (T.Bind(T.max(x - back, T.int32(0))) for x in (token, position))
        pairs = list(heads.key(row, kv, there))
        store_rounded(pairs, keys, begin=begin)
        scale = heads.value_scale(row, kv)
        wave_meets(arch)

        def element(e: Expr) -> Expr:
            return T.cast(keys[begin + e], "float32")

        rows.add_key(
            lambda c: [T.Bind(element(c * UNIT + e)) for e in range(UNIT)],
            lambda column: T.cast(heads.value(row, kv, column, scale), "float16"),
        )
        with T.If((back == 0) & writes), T.Then():
            if rows.attention.quantized:
                cache.store_codes(arch, kv, slot, position, element, lane)
            else:
                cache.store_key(kv, slot, position, pairs)
            heads.store_value(cache, row, kv, slot, position, scale)
        wave_meets(arch)


def _product(arch: Device, x: Expr, y: Expr) -> Expr:
    """x . y of two pairs of float16 or of float32."""
    if str(x.ty) == "float16x2":
        return dot2(arch, T.reinterpret("uint32", x), T.reinterpret("uint32", y), T.float32(0))
    x, y = ([lane_of(pair, i) for i in range(2)] for pair in (T.Bind(x), T.Bind(y)))
    return fma(x[1], y[1], x[0] * y[0])
