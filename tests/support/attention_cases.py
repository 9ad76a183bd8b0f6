"""Cases of GPU attention kernels and their check against numpy in float64, for the emulator and for Vulkan devices.

Every case has rows in the middle of sequences: single rows, each of another sequence, and a chunk of one more. Their
pages lie in the cache in random order, and there are more of them than kernels are declared for. The cache contains
stale finite numbers after the rows and in front of what a sequence's first row sees, table entries there are those of
any page, and queries of rows that are not live are not numbers: none of that may matter nor change.
"""

from typing import NamedTuple

import numpy as np
from act_layouts import from_pairs

from mlc_amd.schedules.gpu.attention.attention_step import scratch_shapes
from mlc_amd.schedules.operators.attention import (
    PAGE,
    SLOTS,
    Attention,
    CausalAttention,
    Rope,
    RopeAttention,
    RopeKvWrite,
)
from mlc_amd.tools.reference import attention as reference
from mlc_amd.tools.reference.attention import (
    as_stored,
    attention_reference,
    first_seen,
    multiplied,
    pools_of,
    rope_reference,
    value_reference,
)

CTX = 512
STALE_K, STALE_V, LEFT = 300.0, 30000.0, 7.0
DEAD = (1 << 20, 1000)  # position and slot of rows that are not live


class Rows(NamedTuple):
    """The rows of a run: positions of the single rows; position and number of tokens of the chunk; how many of these,
    at its beginning, are of an image."""

    singles: tuple = ()
    chunk: tuple[int, int] = (0, 0)
    image: int = 0


class Case(NamedTuple):
    """attributes: of `Attention`, besides its shape. states: the `Rows` of each
    run; (position, live rows): of one sequence."""

    heads: int
    kv_heads: int
    d: int
    m: int = 1
    layout: str = ""
    rope: Rope | None = None
    states: tuple = tuple((length - 1, 1) for length in (1, 7, 33, 64, 65, 300))
    attributes: tuple | dict = ()
    back: bool = False
    several: int = 0  # single rows of a kernel with m > 1, at most

    @property
    def layer(self) -> Attention:
        return Attention(self.heads, self.kv_heads, self.d, CTX, **dict(self.attributes))

    @property
    def op(self) -> CausalAttention | RopeAttention:
        if self.rope:
            return RopeAttention(layer=self.layer, rope=self.rope, layout=self.layout, m=self.m)
        return CausalAttention(layer=self.layer, m=self.m, single=self.single, layout=self.layout, back=self.back)

    @property
    def write(self) -> RopeKvWrite:
        return RopeKvWrite(layer=self.layer, m=self.m, rope=self.rope)

    @property
    def single(self) -> int:
        return 1 if self.m == 1 else self.several

    @property
    def runs(self) -> list[Rows]:
        return [
            state if isinstance(state, Rows) else Rows((state[0],)) if self.single else Rows((), state)
            for state in self.states
        ]


class Pool:
    """The pages of an attention layer's cache, of `count` blocks of sequences, and its page tables.

    k, v: [kv_heads, places, d], place i of page p is PAGE * p + i.
    """

    def __init__(self, rng, layer, count):
        count = max(count, layer.blocks) + 2
        self.rng, self.layer, self.blocks = rng, layer, layer.blocks
        self.free, self.slots = list(rng.permutation(count)), list(rng.permutation(SLOTS))
        shape = layer.kv_heads, count * PAGE, layer.d
        self.k, self.v = exact(layer, *(np.full(shape, stale, np.float16) for stale in (STALE_K, STALE_V)))
        self.table = rng.integers(0, count, (SLOTS, layer.blocks)).astype(np.int32)

    def add(self, keys, values, begin, end) -> int:
        """Stores the positions begin .. end-1 of a sequence, of [kv_heads, CTX, d]; its slot."""
        slot = self.slots.pop()
        for block in range(begin // PAGE, -(-end // PAGE)):
            self.table[slot, block] = page = self.free.pop()
            for pool, whole in ((self.k, keys), (self.v, values)):
                pool[:, page * PAGE : (page + 1) * PAGE] = whole[:, block * PAGE : (block + 1) * PAGE]
        return slot

    def places(self, slot, positions):
        positions = np.asarray(positions)
        return self.table[slot, positions // PAGE] * PAGE + positions % PAGE

    def check_written(self, k, v, places, keys, values):
        """k, v: what a kernel left; keys, values: [rows, kv_heads, d], expected in `places`; the rest is unchanged."""
        layer = self.layer
        parts = (self.k, k, keys, layer.key_codes), (self.v, v, values, layer.value_codes)
        for before, after, expected, codes in parts:
            found = after[:, places].transpose(1, 0, 2)
            if codes:  # keys are rounded to float16 before
                step = np.repeat(
                    np.abs(expected).reshape(*expected.shape[:2], layer.d // 32, 32).max(-1) / -codes.lowest, 32, -1
                )
                apart = np.abs(found - as_stored(expected, codes))
                assert (apart <= 1.1 * step).all() and (apart > 0.1 * step).sum() <= 0.05 * apart.size
            else:
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-6)
            assert (np.delete(after, places, axis=1) == np.delete(before, places, axis=1)).all()


def widened(x):
    """Columns padded with zeros to a multiple of 16."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)])


def pack(k, v):
    """Keys and values [kv_heads, places, d] in the cache's layout."""
    k, v = widened(k), widened(v)
    n, places, width = k.shape
    pages = places // PAGE
    return (
        np.ascontiguousarray(k.reshape(n, pages, PAGE // 32, 32, width // 8, 8).transpose(1, 0, 2, 4, 3, 5)),
        np.ascontiguousarray(v.reshape(n, pages, PAGE // 8, 8, width).transpose(1, 0, 2, 4, 3)),
    )


def exact(layer, k, v):
    """Keys and values that the layer's cache holds exactly."""
    return tuple(as_stored(x, codes) if codes else x for x, codes in ((k, layer.key_codes), (v, layer.value_codes)))


def caches_of(layer, k, v):
    """The parameters of a layer's cache, of keys and values [kv_heads, places, d] that it holds exactly."""
    if not layer.quantized:
        return dict(zip(("Kc", "Vc"), pack(k, v), strict=True))
    return reference.caches_of(
        "gpu", layer, *(x.reshape(layer.kv_heads, -1, PAGE, layer.d).transpose(1, 0, 2, 3) for x in (k, v))
    )


def elements_of(layer, caches):
    """The inverse."""
    if not layer.quantized:
        return unpack(caches["Kc"], caches["Vc"], layer.d)
    return tuple(x.transpose(1, 0, 2, 3).reshape(layer.kv_heads, -1, layer.d) for x in pools_of("gpu", caches))


def unpack(Kc, Vc, d):
    """The inverse; the padding must be zero."""
    _, n, _, width, _ = Vc.shape
    k, v = Kc.transpose(1, 0, 2, 4, 3, 5).reshape(n, -1, width), Vc.transpose(1, 0, 2, 4, 3).reshape(n, -1, width)
    assert not k[..., d:].any() and not v[..., d:].any()
    return k[..., :d], v[..., :d]


def outputs(m, columns):
    """All layouts, filled with something that must stay where nothing is written."""
    return {
        "X": np.full((m, columns), LEFT, np.float32),
        "H": np.full((m, columns), LEFT, np.float16),
        "A": np.zeros((m, columns // 32, 32), np.int8),
        "S": np.full((m, columns // 32, 4), LEFT, np.float32),
    }


def scratch(case):
    """Parts, full of what nobody may read, and Arrived."""
    return {
        n: np.full(shape, np.nan, dtype) if dtype == "float32" else np.zeros(shape, dtype)
        for n, (shape, dtype) in scratch_shapes(case.heads, case.layer.value_d).items()
    }


def check_output(out, layout, live, expected):
    scale = np.abs(expected).max()
    if layout == "rows":
        q, d = out["A"][:live].astype(np.int64), out["S"][:live, :, 0].astype(np.float64)
        got = (q * d[:, :, None]).reshape(live, -1)
        sums = np.stack([q.sum(-1), q[..., :16].sum(-1), q[..., 16:].sum(-1)], -1) * d[:, :, None]
        np.testing.assert_allclose(out["S"][:live, :, 1:], sums, rtol=1e-5, atol=1e-6 * scale)
        assert (np.abs(got - expected) <= np.repeat(d, 32, 1) * 0.501 + scale * 2e-3).all()
        assert d.max() < scale / 100
        assert (out["S"][live:] == LEFT).all()
    else:
        got = from_pairs(out["H"]) if layout == "pairs" else out["X"]
        assert np.abs(got[:live] - expected).max() <= scale * 2e-3
        assert (got[live:] == LEFT).all()


def rope_inputs(rng, case):
    """(inputs of the kernel, function rows, positions -> queries, keys and values of these rows, in float64)"""
    heads, kv_heads, d, m, rope = case.heads, case.kv_heads, case.d, case.m, case.rope
    half = rope.rotary // 2
    angles = np.arange(CTX)[:, None] * 10000.0 ** (-np.arange(half) / max(half, 1))
    # with a factor, as some models scale their angles' table
    cs = 1.25 * np.stack([np.cos(angles), np.sin(angles)], -1).reshape(CTX, rope.rotary).astype(np.float32)
    q, k, v = (rng.standard_normal((m, h * d)).astype(np.float32) for h in (heads, kv_heads, kv_heads))
    norms = {} if rope.eps is None else {name: rng.standard_normal(d).astype(np.float32) for name in ("QN", "KN")}

    def rotated(rows, positions):
        found = (
            rope_reference(q.reshape(m, heads, d)[rows], cs[positions], rope, norms.get("QN")),
            rope_reference(k.reshape(m, kv_heads, d)[rows], cs[positions], rope, norms.get("KN")),
            value_reference(v.reshape(m, kv_heads, d)[rows], rope),
        )
        return tuple(multiplied(x, case.layer.rotation) for x in found)

    return {name: widened(x) for name, x in {"Q": q, "K": k, "V": v, **norms}.items()} | {"CS": cs}, rotated


def sequence(rng, layer, end, begin=0):
    """Keys and values [kv_heads, CTX, d], random from `begin` to `end`, stale outside."""
    k, v = (rng.standard_normal((layer.kv_heads, CTX, layer.d)).astype(np.float16) for _ in "kv")
    for outside in (slice(end, None), slice(0, begin)):
        k[:, outside], v[:, outside] = STALE_K, STALE_V
    return k, v


def sequences(run: Rows):
    """[(position of the first row, rows)] of the step's sequences."""
    return [(position, 1) for position in run.singles] + ([run.chunk] if run.chunk[1] else [])


def rows_array(case, places):
    """The parameter `rows`. places: (slot, first position, rows) of the sequences, in order."""
    live = [(first + i, slot) for slot, first, count in places for i in range(count)]
    return np.array(live + [DEAD] * (case.m - len(live)), np.int32)


def state_of(run: Rows):
    return np.array([len(run.singles), len(run.singles) + run.chunk[1], run.image, 0], np.int32)


def check_attention(case, run, grow=0.0):
    """One run for each of the case's: run(arrays by parameter name) executes the kernel on them in place. grow: how
    much larger the last key of the cache is than the first."""
    rng, layer, d = np.random.default_rng(1), case.layer, case.d
    joined = scratch(case)
    writes = case.rope is not None and case.rope.writes
    for rows in case.runs:
        parts = sequences(rows)
        live = sum(count for _, count in parts)
        pool, found, places = Pool(rng, layer, layer.blocks * len(parts)), [], []
        for position, count in parts:
            begin = first_seen(layer, position)
            keys, values = sequence(rng, layer, position if writes else position + count, begin)
            seen = slice(begin, position + count)
            keys[:, seen] *= (1 + grow * np.arange(CTX)[seen] / CTX)[:, None].astype(np.float16)
            keys, values = exact(layer, keys, values)
            found.append((keys, values))
            places.append((pool.add(keys, values, begin, position + count), position, count))
        caches = caches_of(layer, pool.k, pool.v)
        if case.rope:
            inputs, rotated = rope_inputs(rng, case)
            places_of_rows = np.concatenate([np.arange(position, position + count) for position, count in parts])
            queries, own_keys, own_values = rotated(slice(0, live), places_of_rows)
            for name in "QKV":
                inputs[name][live:] = np.nan
        else:
            q = rng.standard_normal((case.m, layer.heads, d)) * 2
            q[live:] = np.nan
            inputs = {"Qo": widened((q * layer.query_scale).astype(np.float16))}
            queries = inputs["Qo"][:live, :, :d].astype(np.float64) / layer.query_scale
        # between far below and far above the scores
        sinks = np.linspace(-3, 12, layer.heads).astype(np.float32) if layer.sinks else None
        out = outputs(case.m, layer.heads * layer.value_d)
        given = {"state": state_of(rows), "rows": rows_array(case, places), "pages": pool.table}
        run({**given, **caches, "Sinks": sinks, **inputs, **joined, **out})
        new_k, new_v = elements_of(layer, caches)
        if writes:
            there = [pool.places(slot, np.arange(first, first + count)) for slot, first, count in places]
            pool.check_written(new_k, new_v, np.concatenate(there), own_keys, own_values)
            done = 0
            for (position, count), (keys, values), own in zip(parts, found, there, strict=True):
                for whole, new, exactly in ((keys, new_k, own_keys), (values, new_v, own_values)):
                    mine = exactly[done : done + count].transpose(1, 0, 2)
                    # the kernel has its own ones as float16
                    whole[:, position : position + count] = mine.astype(np.float16) if layer.quantized else new[:, own]
                done += count
        else:
            assert (new_k == pool.k).all() and (new_v == pool.v).all()
        expected, done = [], 0
        for i, ((position, count), (keys, values)) in enumerate(zip(parts, found, strict=True)):
            keys, values = (x[:, : position + count].astype(np.float64) for x in (keys, values))
            values = keys[..., : layer.values] if layer.values else values
            mine = queries[done : done + count]
            image = rows.chunk[0] + rows.image if i == len(rows.singles) and rows.image else 0
            expected.append(attention_reference(layer, mine, keys, values, position, sinks, image))
            done += count
        if live:
            back = layer.rotation if case.back else 0
            check_output(out, case.layout, live, multiplied(np.concatenate(expected), back))
        else:
            assert all((out[name] == LEFT).all() for name in "XHS")
        assert not joined["Arrived"].any()


def check_rope(case, run, states):
    """The same for `rope_kv_write`. states: (position, rows) of a chunk, or `Rows`."""
    rng, layer, m = np.random.default_rng(2), case.layer, case.m
    for state in states:
        rows = state if isinstance(state, Rows) else Rows((), state)
        parts = sequences(rows)
        pool = Pool(rng, layer, layer.blocks * len(parts))
        stale = exact(layer, *sequence(rng, layer, 0))
        places = [(pool.add(*stale, position, min(position + n, CTX)), position, n) for position, n in parts]
        caches = caches_of(layer, pool.k, pool.v)
        inputs, rotated = rope_inputs(rng, case)
        Qo, given = np.full((m, layer.heads, layer.width), LEFT, np.float16), rows_array(case, places)
        run({"state": state_of(rows), "rows": given, "pages": pool.table, **caches, "Qo": Qo, **inputs})
        written = np.flatnonzero(given[:, 0] < CTX)
        queries, keys, values = rotated(written, given[written, 0])
        np.testing.assert_allclose(Qo[written], widened(queries * layer.query_scale), rtol=1e-3, atol=2e-6)
        assert (np.delete(Qo, written, axis=0) == LEFT).all()
        there = np.concatenate([pool.places(slot, np.arange(p, min(p + n, CTX))) for slot, p, n in places])
        there, keys, values = (x if case.rope.writes else x[:0] for x in (there, keys, values))
        pool.check_written(*elements_of(layer, caches), there, keys, values)
