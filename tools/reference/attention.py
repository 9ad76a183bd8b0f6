"""Attention and RoPE in numpy, float64, as `schedules.attention` describes them: what the kernels of all targets are
compared with."""

import numpy as np


def attention_reference(layer, q, k, v, position, sinks=None):
    """q [live, heads, d], in natural units; k, v [kv_heads, keys, d], of all positions; sinks [heads]: [live, heads *
    d], all float64."""
    live = len(q)
    scores = np.einsum("thgd,hnd->thgn", q.reshape(live, layer.kv_heads, -1, layer.d), k)
    scores = scores * (layer.scale or layer.d**-0.5)
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    own, keys = position + np.arange(live)[:, None, None, None], np.arange(k.shape[1])
    seen = (keys <= own) & (keys > own - (layer.window or k.shape[1]))
    seen &= keys >= own // layer.chunk * layer.chunk if layer.chunk else True
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.reshape(1, layer.kv_heads, -1, 1) - top)
    return np.einsum("thgn,hnd->thgd", weights / total, v).reshape(live, -1)


def first_seen(layer, position):
    """The first key that a row at `position` sees."""
    if layer.chunk:
        return position // layer.chunk * layer.chunk
    return max(0, position + 1 - layer.window) if layer.window else 0


def in_ring(layer, x, end):
    """x [kv_heads, ctx, d], of all positions, as the layer's cache holds it when the last position written is end - 1:
    each place has the last position that it belongs to."""
    places = np.arange(layer.places)
    return x[:, places + np.maximum(0, end - 1 - places) // layer.places * layer.places]


def rope_reference(x, cs, rope, weight):
    """x [rows, heads, d], cs [rows, rotary] as in the kernel's table: the heads normalized and rotated, in float64."""
    x, cs, half = x.astype(np.float64), cs.astype(np.float64)[:, None], rope.rotary // 2
    if rope.eps is not None and not rope.norm_after:
        x = _normalized(x, rope.eps) * weight
    evens = slice(0, rope.rotary, 2), slice(1, rope.rotary, 2)
    first, second = (slice(0, half), slice(half, rope.rotary)) if rope.neox else evens
    y = x.copy()
    y[..., first] = x[..., first] * cs[..., ::2] - x[..., second] * cs[..., 1::2]
    y[..., second] = x[..., first] * cs[..., 1::2] + x[..., second] * cs[..., ::2]
    return _normalized(y, rope.eps) * weight if rope.norm_after else y


def value_reference(v, rope):
    """v [rows, heads, d]: the values that the cache gets, in float64."""
    v = v.astype(np.float64)
    return _normalized(v, rope.eps) if rope.value_norm else v


def _normalized(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
