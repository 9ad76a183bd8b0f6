"""Attention and RoPE in float64, as `schedules.operators.attention` describes them, and the layouts of the KV cache."""

import numpy as np

from mlc_amd.schedules.operators.attention import KV_BLOCK, KV_STEPS, PAGE

CACHES = ("Kc", "Vc", "Ks", "Vs")  # parameters of kernels


def attention_reference(layer, q, k, v, position, sinks=None, image=0):
    """q [rows, heads, d], in natural units; k, v [kv_heads, keys, d], of all positions; position: of the first row,
    which others follow, or of each row; sinks [heads]; image: positions below it are seen by all rows: [rows, heads *
    d], all float64."""
    rows, heads = len(q), layer.kv_heads

    def of_head(x):
        """[kv_heads, rows, group, ..] as [kv_heads, rows * group, ..]: what one product of matrices takes."""
        return x.reshape(heads, -1, x.shape[-1])

    q = q.reshape(rows, heads, -1, layer.d).transpose(1, 0, 2, 3)
    scores = (of_head(q) @ k.transpose(0, 2, 1)).reshape(heads, rows, -1, k.shape[1])
    scores = scores * (layer.scale or layer.d**-0.5)
    if layer.softcap:
        scores = layer.softcap * np.tanh(scores / layer.softcap)
    positions = position + np.arange(rows) if np.ndim(position) == 0 else position
    own, keys = positions[:, None, None], np.arange(k.shape[1])
    seen = ((keys <= own) | (keys < image)) & (keys > own - (layer.window or k.shape[1]))
    seen &= keys >= own // layer.chunk * layer.chunk if layer.chunk else True
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks.reshape(heads, 1, -1, 1) - top)
    found = (of_head(weights / total) @ v).reshape(heads, rows, -1, v.shape[-1])
    return found.transpose(1, 0, 2, 3).reshape(rows, -1)


def first_seen(layer, position):
    """The first key that a row at `position` sees."""
    if layer.chunk:
        return position // layer.chunk * layer.chunk
    return max(0, position + 1 - layer.window) if layer.window else 0


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


# ---- the KV cache: layouts of schedules/cpu/attention/cache.py ("cpu") and schedules/gpu/attention/cache.py ("gpu"),
# page by page


def keys_of(layout, Kc):
    """float32 [pages, kv_heads, PAGE, width], keys in the order of their positions: a view where the layout allows
    one."""
    if Kc.ndim == 4:  # of latent attention on the CPU: [pages, 1, PAGE, width]
        return Kc
    pages, heads = Kc.shape[:2]
    if layout == "cpu":  # [pages, kv_heads, 4, width, 16]
        return Kc.transpose(0, 1, 2, 4, 3).reshape(pages, heads, PAGE, -1)
    # [pages, kv_heads, 2, width/8, 32, 8], of codes [.., width/16, 32, 16]
    return Kc.transpose(0, 1, 2, 4, 3, 5).reshape(pages, heads, PAGE, -1)


def values_of(layout, Vc):
    """As `keys_of`."""
    if layout == "cpu":  # [pages, kv_heads, PAGE, width]
        return Vc
    # [pages, kv_heads, 8, width, 8], of codes [.., 4, width, 16]
    return Vc.transpose(0, 1, 2, 4, 3).reshape(*Vc.shape[:2], PAGE, -1)


def packed(layout, k, v):
    """Kc and Vc of keys and values [pages, kv_heads, PAGE, width], or of their codes: the inverse of `keys_of` and
    `values_of`."""
    pages, heads, _, width = k.shape
    unit = 16 // k.dtype.itemsize  # elements of 16 bytes
    if layout == "cpu":
        return k.reshape(pages, heads, 4, 16, width).transpose(0, 1, 2, 4, 3), v
    keys = k.reshape(pages, heads, 2, 32, width // unit, unit).transpose(0, 1, 2, 4, 3, 5)
    return keys, v.reshape(pages, heads, PAGE // unit, unit, width).transpose(0, 1, 2, 4, 3)


def quantized(x):
    """(codes, scales) of elements [.., d] of a cache of type q8_0, as `Attention.quantized` has them: int8 [.., d],
    float16 [.., d/KV_BLOCK]."""
    blocks = x.reshape(*x.shape[:-1], -1, KV_BLOCK).astype(np.float64)
    largest = np.minimum(np.abs(blocks).max(-1) / KV_STEPS, np.finfo(np.float16).max)
    scales = largest.astype(np.float16)
    real = scales[..., None].astype(np.float64)
    steps = np.divide(blocks, real, out=np.zeros_like(blocks), where=real > 0)
    return np.clip(np.rint(steps), -KV_STEPS, KV_STEPS).astype(np.int8).reshape(x.shape), scales


def as_stored(x):
    """Elements as a cache of type q8_0 has them, float32."""
    codes, scales = quantized(x)
    return codes * np.repeat(scales.astype(np.float32), KV_BLOCK, -1)


def pools_of(layout, caches):
    """(keys, values) [pages, kv_heads, PAGE, width] of the parameters CACHES, by name. Without Vc values are keys."""
    if "Vc" not in caches:
        return (keys_of(layout, caches["Kc"]),) * 2
    pools = keys_of(layout, caches["Kc"]), values_of(layout, caches["Vc"])
    if "Ks" not in caches:
        return pools
    scales = (caches[name].transpose(0, 1, 3, 2) for name in ("Ks", "Vs"))  # [pages, kv_heads, d/KV_BLOCK, PAGE]
    return tuple(
        codes * np.repeat(scale.astype(np.float32), KV_BLOCK, -1) for codes, scale in zip(pools, scales, strict=True)
    )


def stored(layout, caches, places, k, v) -> dict[str, np.ndarray]:
    """Copies of the caches, by parameter, with k and v [rows, kv_heads, d] in these places, (page, key in the page) of
    the rows. v: None without Vc."""
    if v is None:
        keys = keys_of(layout, caches["Kc"]).copy()
        keys[places[0], :, places[1], : k.shape[-1]] = k
        return {"Kc": keys if caches["Kc"].ndim == 4 else np.ascontiguousarray(packed(layout, keys, keys)[0])}
    (page, key), pools = places, (keys_of(layout, caches["Kc"]).copy(), values_of(layout, caches["Vc"]).copy())
    found: dict[str, np.ndarray] = {}
    for pool, rows, scales in zip(pools, (k, v), ("Ks", "Vs"), strict=True):
        if scales in caches:
            found[scales] = caches[scales].copy()
            rows, found[scales].transpose(0, 1, 3, 2)[page, :, key] = quantized(rows)
        pool[page, :, key, : k.shape[-1]] = rows
    found["Kc"], found["Vc"] = (np.ascontiguousarray(x) for x in packed(layout, *pools))
    return found


def places_of(pages, positions, slots):
    """(page, key in the page) of the rows' own keys; pages: the page tables."""
    return pages[slots, positions // PAGE], positions % PAGE


def of_slot(pooled, pages, slot, end):
    """Keys or values [kv_heads, at least `end`, width] of the positions of a slot, of those [pages, kv_heads, PAGE,
    width] of all pages."""
    mine = pooled[pages[slot, : -(-end // PAGE)]]
    return mine.transpose(1, 0, 2, 3).reshape(pooled.shape[1], -1, pooled.shape[3])
