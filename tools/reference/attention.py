"""Attention and RoPE in float64, as `schedules.attention` describes them, and the layouts of the KV cache."""

import numpy as np


def attention_reference(layer, q, k, v, position, sinks=None):
    """q [rows, heads, d], in natural units; k, v [kv_heads, keys, d], of all positions; position: of the first row,
    which others follow, or of each row; sinks [heads]: [rows, heads * d], all float64."""
    live = len(q)
    scores = np.einsum("thgd,hnd->thgn", q.reshape(live, layer.kv_heads, -1, layer.d), k)
    scores = scores * (layer.scale or layer.d**-0.5)
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    positions = position + np.arange(live) if np.ndim(position) == 0 else position
    own, keys = positions[:, None, None, None], np.arange(k.shape[1])
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


# ---- the KV cache: layouts of schedules/cpu/cache.py ("cpu") and schedules/gpu/cache.py ("gpu")


def keys_of(layout, Kc):
    """float32 [kv_heads, places, width]: a view where the layout allows one."""
    heads = len(Kc)
    if layout == "cpu":  # [kv_heads, places/16, width, 16]
        return Kc.transpose(0, 1, 3, 2).reshape(heads, -1, Kc.shape[2])
    return Kc.transpose(0, 1, 3, 2, 4).reshape(heads, -1, Kc.shape[2] * 8)  # [kv_heads, places/32, width/8, 32, 8]


def values_of(layout, Vc):
    """As `keys_of`."""
    return Vc if layout == "cpu" else Vc.transpose(0, 1, 3, 2).reshape(len(Vc), -1, Vc.shape[2])  # [.., width, 8]


def stored(layout, Kc, Vc, places, k, v):
    """Copies of the caches with k and v [rows, kv_heads, d] in these places."""
    Kc, Vc, head = Kc.copy(), Vc.copy(), np.arange(len(Kc))[:, None, None]
    place, column = np.asarray(places)[:, None], np.arange(k.shape[-1])
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    if layout == "cpu":
        Kc[head, place // 16, column, place % 16] = k
        Vc[head, place, column] = v
    else:
        Kc[head, place // 32, column // 8, place % 32, column % 8] = k
        Vc[head, place // 8, column, place % 8] = v
    return Kc, Vc
