"""What rows of decode attention (`attention_decode.py`) add to their softmax that is not in the cache yet: their own
key and value, and those of rows before them in the same step that are of the same sequence.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.cache import UNIT, row_slot, store_valid
from mlc_amd.schedules.gpu.attention.rope_kv_write import rotated, value_scale
from mlc_amd.schedules.gpu.attention.softmax import P_SHIFT, soft_cap
from mlc_amd.schedules.gpu.base.device import dot2, exp2, fma, wave_meets, wave_min
from mlc_amd.schedules.gpu.base.registers import at, lane_of, opaque, put
from mlc_amd.schedules.gpu.base.step import kept


def rounded(x, buffer):
    """The float32 x as float16, in the type of the buffer."""
    half = T.cast(x, "float16")
    return half if str(buffer.dtype) == "float16" else T.cast(half, "float32")


def earlier_rows(arch, places, token, slot, lane):
    """How many rows right before row `token` are of its sequence."""
    m, first = int(places.shape[0]), token
    for start in range(0, m, arch.wave):
        row = T.Bind(T.min(start + lane, T.int32(m - 1)))
        same = (row < token) & (row_slot(places, row) == slot)
        first = T.Bind(T.min(first, wave_min(arch, T.Bind(T.Select(same, row, token)))))
    return T.Bind(token - first)


def _scores(rows, queries, key, begin=0):
    """Yields the score of each row with a key in shared memory, from element `begin` on, in all lanes."""
    arch, d = rows.arch, rows.d

    def part(r):
        """What this lane has of the row's score."""
        score = T.float32(0)
        for first in range(0, d // 2, arch.wave):
            pair = T.Bind(T.min(first + rows.lane, T.int32(d // 2 - 1)))
            product = _product(arch, queries[r, at(pair * 2, 2)], key[at(begin + pair * 2, 2)])
            score = score + T.Select(first + rows.lane < d // 2, product, T.float32(0))
        return T.Bind(score)

    for score in rows.sums(part(r) for r in range(rows.count)):
        yield soft_cap(rows.attention, score)


def _values(rows, V, row, scale, kv):
    """Yields this lane's elements of a row's value, rounded to float16. scale: None is 1."""
    for x in range(rows.columns):
        value = V[row, kv * rows.d + rows.column(x)]
        value = value if scale is None else value * scale
        yield T.cast(T.cast(value, "float16"), "float32")


def start_with_own(rows, queries, own_key, V, scale, kv, token):
    """The rows' state after the token's own key, whose weight is 1. scale: of the value, None is 1."""
    for r, score in enumerate(_scores(rows, queries, own_key)):
        put(rows.top, score, r)
        put(rows.total, T.Select(rows.lane == 0, T.float32(2**P_SHIFT), T.float32(0)), r)
    for x, value in enumerate(_values(rows, V, token, scale, kv)):
        value = T.Bind(value * T.float32(2**P_SHIFT))
        for r in range(rows.count):
            put(rows.out, value, r * rows.columns + x)


def add_row(rows, queries, buffer, sources, rope, kv, place):
    """Adds the key and the value of another row of the step to the rows' state. buffer: (shared memory, where the
    wave's own part of it begins); place: (row, its position)."""
    arch, (_, K, V, _, KN, CS), (keys, begin), (row, position) = rows.arch, sources, buffer, place
    for valid, values in rotated(arch, K, row, kv * rows.d, CS, position, KN, rows.lane, rows.d, rope):
        store_valid(valid, keys, [((begin + e,), rounded(y, keys)) for e, y in values])
    wave_meets(arch)
    weights = []
    for r, score in enumerate(_scores(rows, queries, keys, begin)):
        weight = opaque(exp2(score - rows.rescale(r, score) + T.float32(P_SHIFT)))
        put(rows.total, rows.total[r] + T.Select(rows.lane == 0, weight, T.float32(0)), r)
        weights.append(weight)
    scale = value_scale(arch, V, row, kv, rows.lane, rows.d, rope)
    for x, value in enumerate(_values(rows, V, row, scale, kv)):
        value = T.Bind(value)
        for r, weight in enumerate(weights):
            put(rows.out, fma(value, weight, rows.out[r * rows.columns + x]), r * rows.columns + x)
    wave_meets(arch)


def add_rows(rows, keys, sources, rope, place, count, takers, target):
    """Adds the keys and values of row `token` and of count - 1 rows before it to the state of `MatrixRows`, if `count`
    is not 0, and writes those of the row itself to the cache. The waves of the workgroup share them out; in a step of
    one row, whose token is the int 0, count is 1 at most.

    keys: shared memory, float16 [waves * d]; place: (kv, token, its position); takers: (which of the waves that take
    rows this one is, their number): the first takes the row itself; target: (cache, slot, whether the row is written)
    """
    arch, d, lane, (_, K, V, _, KN, CS) = rows.arch, rows.d, rows.lane, sources
    (kv, token, position), (wave, waves), (cache, slot, writes) = place, takers, target
    begin = T.Bind(wave * d)
    with kept(T.Bind(T.truncdiv(T.max(count - wave, T.int32(0)) + (waves - 1), T.int32(waves)))) as i:
        back = T.Bind(wave + i * waves)
        row, there = token, position
        if not isinstance(token, int):
            row, there = (T.Bind(T.max(x - back, T.int32(0))) for x in (token, position))
        pairs = list(rotated(arch, K, row, kv * d, CS, there, KN, lane, d, rope))
        for valid, values in pairs:
            store_valid(valid, keys, [((begin + e,), rounded(y, keys)) for e, y in values])
        scale = value_scale(arch, V, row, kv, lane, d, rope)
        wave_meets(arch)

        def element(e):
            return T.cast(keys[begin + e], "float32")

        def value(column):
            x = V[row, kv * d + column]
            return T.cast(x if scale is None else x * scale, "float16")

        rows.add_key(lambda c: [T.Bind(element(c * UNIT + e)) for e in range(UNIT)], value)
        with T.If((back == 0) & writes), T.Then():
            if rows.attention.quantized:
                cache.store_key_codes(arch, kv, slot, position, element, lane)
            else:
                cache.store_key(kv, slot, position, pairs)
            cache.store_value(arch, kv, slot, position, V, row, lane, scale)
        wave_meets(arch)


def _product(arch, x, y):
    """x . y of two pairs of float16 or of float32."""
    if str(x.ty) == "float16x2":
        return dot2(arch, *(T.reinterpret("uint32", pair) for pair in (x, y)), T.float32(0))
    x, y = ([lane_of(pair, i) for i in range(2)] for pair in (T.Bind(x), T.Bind(y)))
    return fma(x[1], y[1], x[0] * y[0])
