"""Cases of GPU attention kernels and their check against numpy in float64, for the emulator and for Vulkan devices.

Every case is a chunk in the middle of a sequence. The cache contains stale finite numbers behind the chunk and in front
of what its first row sees, and queries of rows that are not live are not numbers: neither may matter nor change.
"""

from typing import NamedTuple

import numpy as np

from mlc_amd.schedules.attention import Attention, Rope
from mlc_amd.schedules.gpu.attention_join import scratch_shapes
from mlc_amd.tools.reference.attention import attention_reference, first_seen, in_ring, rope_reference, value_reference

CTX = 512
STALE_K, STALE_V, LEFT = 300.0, 30000.0, 7.0


class Case(NamedTuple):
    """attributes: of `Attention`, besides its shape. states: (position, live rows) of each run."""

    heads: int
    kv_heads: int
    d: int
    m: int = 1
    layout: str = ""
    rope: Rope | None = None
    states: tuple = tuple((length - 1, 1) for length in (1, 7, 33, 64, 65, 300))
    attributes: tuple | dict = ()

    @property
    def layer(self) -> Attention:
        return Attention(self.heads, self.kv_heads, self.d, CTX, **dict(self.attributes))


def widened(x):
    """Columns padded with zeros to a multiple of 16."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)])


def pack(k, v):
    """Keys and values [kv_heads, ctx, d] in the cache's layout."""
    k, v = widened(k), widened(v)
    n, ctx, width = k.shape
    return (
        np.ascontiguousarray(k.reshape(n, ctx // 32, 32, width // 8, 8).transpose(0, 1, 3, 2, 4)),
        np.ascontiguousarray(v.reshape(n, ctx // 8, 8, width).transpose(0, 1, 3, 2)),
    )


def unpack(Kc, Vc, d):
    """The inverse; the padding must be zero."""
    n, _, width, _ = Vc.shape
    k, v = Kc.transpose(0, 1, 3, 2, 4).reshape(n, -1, width), Vc.transpose(0, 1, 3, 2).reshape(n, -1, width)
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
        for n, (shape, dtype) in scratch_shapes(case.heads, case.kv_heads, case.d).items()
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
        got = out["H" if layout == "half" else "X"]
        assert np.abs(got[:live] - expected).max() <= scale * 2e-3
        assert (got[live:] == LEFT).all()


def rope_inputs(rng, case):
    """(inputs of the kernel, function position, live -> queries, keys and values of these rows, in float64)"""
    heads, kv_heads, d, m, rope = case.heads, case.kv_heads, case.d, case.m, case.rope
    half = rope.rotary // 2
    angles = np.arange(CTX)[:, None] * 10000.0 ** (-np.arange(half) / max(half, 1))
    # with a factor, as some models scale their angles' table
    cs = 1.25 * np.stack([np.cos(angles), np.sin(angles)], -1).reshape(CTX, rope.rotary).astype(np.float32)
    q, k, v = (rng.standard_normal((m, h * d)).astype(np.float32) for h in (heads, kv_heads, kv_heads))
    norms = {} if rope.eps is None else {name: rng.standard_normal(d).astype(np.float32) for name in ("QN", "KN")}

    def rotated(position, live):
        rows = cs[position : position + live]
        return (
            rope_reference(q.reshape(m, heads, d)[:live], rows, rope, norms.get("QN")),
            rope_reference(k.reshape(m, kv_heads, d)[:live], rows, rope, norms.get("KN")),
            value_reference(v.reshape(m, kv_heads, d)[:live], rope),
        )

    return {name: widened(x) for name, x in {"Q": q, "K": k, "V": v, **norms}.items()} | {"CS": cs}, rotated


def stale_cache(rng, kv_heads, d, end, begin=0):
    """Keys and values [kv_heads, CTX, d], random from `begin` to `end`."""
    k, v = (rng.standard_normal((kv_heads, CTX, d)).astype(np.float16) for _ in "kv")
    for outside in (slice(end, None), slice(0, begin)):
        k[:, outside], v[:, outside] = STALE_K, STALE_V
    return k, v


def check_written(before, after, position, expected):
    """before, after, as [kv_heads, places, d]; expected [tokens, kv_heads, d] from `position` on; the rest is
    unchanged."""
    here = np.arange(position, position + len(expected)) % before.shape[1]
    np.testing.assert_allclose(after[:, here].transpose(1, 0, 2), expected, rtol=1e-3, atol=2e-6)
    assert (np.delete(after, here, axis=1) == np.delete(before, here, axis=1)).all()


def check_attention(case, run, grow=0.0):
    """One run for each state: run(arrays by parameter name) executes the kernel on them in place. grow: how much larger
    the last key of the cache is than the first."""
    rng, layer, d = np.random.default_rng(1), case.layer, case.d
    joined = scratch(case)
    for position, live in case.states:
        end = position + live
        begin, writes = first_seen(layer, position), case.rope is not None and case.rope.writes
        written = position if writes else end
        keys, values = stale_cache(rng, layer.kv_heads, d, written, begin)
        keys[:, begin:end] *= (1 + grow * np.arange(begin, end) / CTX)[:, None].astype(np.float16)
        k, v = (in_ring(layer, x, written) for x in (keys, values))
        Kc, Vc = pack(k, v)
        if case.rope:
            inputs, rotated = rope_inputs(rng, case)
            queries, own_key, own_value = rotated(position, 1)
        else:
            q = rng.standard_normal((case.m, layer.heads, d)) * 2
            q[live:] = np.nan
            inputs = {"Qo": widened((q * layer.query_scale).astype(np.float16))}
            queries = inputs["Qo"][:live, :, :d].astype(np.float64) / layer.query_scale
        # between far below and far above the scores
        sinks = np.linspace(-3, 12, layer.heads).astype(np.float32) if layer.sinks else None
        out, state = outputs(case.m, layer.heads * d), np.array([position, live, 0, 0], np.int32)
        run({"state": state, "Kc": Kc, "Vc": Vc, "Sinks": sinks, **inputs, **joined, **out})
        new_k, new_v = unpack(Kc, Vc, d)
        if writes:
            check_written(k, new_k, position, own_key)
            check_written(v, new_v, position, own_value)
            keys[:, position], values[:, position] = (x[:, position % layer.places] for x in (new_k, new_v))
        else:
            assert (new_k == k).all() and (new_v == v).all()
        keys, values = (x[:, :end].astype(np.float64) for x in (keys, values))
        check_output(out, case.layout, live, attention_reference(layer, queries, keys, values, position, sinks))
        assert not joined["Arrived"].any()


def check_rope(case, run, states):
    """The same for `rope_kv_write`."""
    rng, layer, m, d = np.random.default_rng(2), case.layer, case.m, case.d
    for position, live in states:
        written = min(live, CTX - position)
        k, v = (in_ring(layer, x, 0) for x in stale_cache(rng, layer.kv_heads, d, 0))
        Kc, Vc = pack(k, v)
        inputs, rotated = rope_inputs(rng, case)
        Qo, state = np.full((m, layer.heads, layer.width), LEFT, np.float16), np.array([position, live, 0, 0], np.int32)
        run({"state": state, "Kc": Kc, "Vc": Vc, "Qo": Qo, **inputs})
        queries, keys, values = rotated(position, written)
        np.testing.assert_allclose(Qo[:written], widened(queries * layer.query_scale), rtol=1e-3, atol=2e-6)
        assert (Qo[written:] == LEFT).all()
        new_k, new_v = unpack(Kc, Vc, d)
        check_written(k, new_k, position, keys if case.rope.writes else keys[:0])
        check_written(v, new_v, position, values if case.rope.writes else values[:0])
