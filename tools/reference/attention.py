"""Attention and RoPE in float64, as specified in `schedules.operators.attention`; and the layouts of the KV cache."""

import numpy as np

from mlc_amd.runtime.cache.kv_types import CODES
from mlc_amd.schedules.operators.attention import KV_BLOCK, PAGE

CACHES = ("Kc", "Vc", "Ks", "Vs")  # names of kernels' parameters
# codes by the dtype of keys or values; other dtypes are float16
STORED = {"int8": CODES["q8_0"], "uint8": CODES["q4_0"]}


def attention_reference(layer, q, k, v, position, sinks=None, image=0):
    """Attention, float64 [rows, heads * d]. q: [rows, heads, d], in natural units. k, v: [kv_heads, keys, d], of all
    positions. position: of the first row, if rows are consecutive, or of each row. sinks: [heads]. image: all rows
    attend to the positions below this one."""
    rows, heads = len(q), layer.kv_heads

    def of_head(x):
        """[kv_heads, rows, group, ..] as [kv_heads, rows * group, ..], for one product of matrices."""
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
    """The first key to which a row at `position` attends."""
    if layer.chunk:
        return position // layer.chunk * layer.chunk
    return max(0, position + 1 - layer.window) if layer.window else 0


def rope_reference(x, cs, rope, weight):
    """The normalized and rotated heads, float64. x: [rows, heads, d]. cs: [rows, rotary], as in the kernel's table."""
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
    """The values for the cache, float64. v: [rows, heads, d]."""
    v = v.astype(np.float64)
    return _normalized(v, rope.eps) if rope.value_norm else v


def multiplied(x, size):
    """x [.., d], with each `size` columns multiplied by a Hadamard matrix / sqrt(size), float64. size 0: x."""
    step, y = 1, x.astype(np.float64)
    while step < size:
        y = y.reshape(*x.shape[:-1], -1, 2, step)
        y = np.stack([y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]], -2)
        step *= 2
    return y.reshape(x.shape) / np.sqrt(size) if size else x


def _normalized(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


# ---- the KV cache, page by page: layouts of schedules/cpu/attention/cache.py ("cpu") and
# schedules/gpu/attention/cache.py ("gpu")


def keys_of(layout, Kc):
    """Keys in the order of their positions: [pages, kv_heads, PAGE, width], float16 or codes. A view if possible."""
    if Kc.ndim == 4:  # latent attention on the CPU: [pages, 1, PAGE, width]
        return Kc
    pages, heads = Kc.shape[:2]
    if layout == "cpu":  # [pages, kv_heads, 4, width, 16]
        return _columns(Kc.transpose(0, 1, 2, 4, 3).reshape(pages, heads, PAGE, -1), _BLOCKS)
    # [pages, kv_heads, 2, width/8, 32, 8]; codes: [.., width/16, 32, 16] or [.., width/8, 32, 4]
    return _columns(Kc.transpose(0, 1, 2, 4, 3, 5).reshape(pages, heads, PAGE, -1), _UNITS)


def values_of(layout, Vc):
    """Values, in the form of `keys_of`."""
    if layout == "cpu":  # [pages, kv_heads, PAGE, width]
        return _columns(Vc, _BLOCKS)
    # [pages, kv_heads, 8, width, 8]; codes: [.., 4, width, 16]
    return _columns(Vc.transpose(0, 1, 2, 4, 3).reshape(*Vc.shape[:2], PAGE, -1), _NEIGHBOURS)


# For bytes with two 4-bit codes: the columns of consecutive bytes, in the order (lower half, upper half) of each byte
_BLOCKS = np.arange(32).reshape(2, 16).T
_UNITS = np.array([[0, 2], [4, 6], [1, 3], [5, 7]])
_NEIGHBOURS = np.array([[0, 1]])


def _columns(x, order):
    """Codes [.., d] from bytes [.., d/2] with two codes each. Other arrays are returned unchanged."""
    if x.dtype != np.uint8:
        return x
    codes = np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], -1, order.size)
    return (codes[..., np.argsort(order.ravel())].astype(np.int8) + STORED["uint8"].lowest).reshape(*x.shape[:-1], -1)


def _bytes(x, order, dtype):
    """The inverse of `_columns` if dtype is uint8; otherwise x."""
    if np.dtype(dtype) != np.uint8:
        return x
    codes = (x - STORED["uint8"].lowest).astype(np.uint8).reshape(*x.shape[:-1], -1, order.size)
    low, high = np.moveaxis(codes[..., order.ravel()].reshape(*codes.shape[:-1], -1, 2), -1, 0)
    return (low | high << 4).reshape(*x.shape[:-1], -1)


def packed_keys(layout, k, dtype):
    """Kc, of this dtype, for keys (or their codes) [pages, kv_heads, PAGE, width]: the inverse of `keys_of`."""
    k = _bytes(k, _BLOCKS if layout == "cpu" else _UNITS, dtype)
    pages, heads, _, width = k.shape
    if layout == "cpu":
        return k.reshape(pages, heads, 4, 16, width).transpose(0, 1, 2, 4, 3)
    unit = {"float16": 8, "int8": 16, "uint8": 4}[str(np.dtype(dtype))]
    return k.reshape(pages, heads, 2, 32, width // unit, unit).transpose(0, 1, 2, 4, 3, 5)


def packed_values(layout, v, dtype):
    """Vc, of this dtype, for values: the inverse of `values_of`."""
    v = _bytes(v, _BLOCKS if layout == "cpu" else _NEIGHBOURS, dtype)
    if layout == "cpu":
        return v
    unit = 16 // np.dtype(dtype).itemsize
    return v.reshape(*v.shape[:2], PAGE // unit, unit, v.shape[-1]).transpose(0, 1, 2, 4, 3)


def quantized(x, codes=CODES["q8_0"]):
    """(codes int8 [.., d], scales float16 [.., d/KV_BLOCK]) of elements [.., d] of a cache, as `Attention.quantized`
    specifies."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // KV_BLOCK, KV_BLOCK).astype(np.float64)
    largest = np.abs(blocks).max(-1)
    if codes.lowest != -codes.highest:
        largest = np.where(blocks.max(-1) >= largest, largest, -largest)
    most = np.finfo(np.float16).max
    step = codes.highest if codes.lowest == -codes.highest else codes.lowest
    scales = np.clip(largest / step, -most, most).astype(np.float16)
    real = scales[..., None].astype(np.float64)
    steps = np.divide(blocks, real, out=np.zeros_like(blocks), where=real != 0)
    steps = np.clip(np.rint(steps), codes.lowest, codes.highest)
    if codes.refits:
        square = (steps * steps).sum(-1)
        fitted = np.divide((blocks * steps).sum(-1), square, out=np.zeros_like(square), where=square > 0)
        scales = np.clip(fitted, -most, most).astype(np.float16)
    return steps.astype(np.int8).reshape(x.shape), scales


def as_stored(x, codes=CODES["q8_0"]):
    """Elements after they were stored with these codes, float32."""
    found, scales = quantized(x, codes)
    return found * np.repeat(scales.astype(np.float32), KV_BLOCK, -1)


def caches_of(layout, layer, k, v) -> dict[str, np.ndarray]:
    """The parameters of a layer's cache, for keys and values [pages, kv_heads, PAGE, width]: the inverse of
    `pools_of`."""
    found = {}
    parts = (("Kc", "Ks", k, layer.key_codes, packed_keys), ("Vc", "Vs", v, layer.value_codes, packed_values))
    for name, scales, pool, codes, write in parts:
        dtype = next((dtype for dtype, of in STORED.items() if of == codes), "float16")
        if codes:
            pool, scale = quantized(pool, codes)
            found[scales] = scale.transpose(0, 1, 3, 2)
        found[name] = write(layout, pool, dtype)
    return {name: np.ascontiguousarray(found[name]) for name in CACHES if name in found}


def pools_of(layout, caches):
    """(keys, values), [pages, kv_heads, PAGE, width], from the parameters CACHES by name. If there is no Vc, the values
    are the keys."""
    pools = [keys_of(layout, caches["Kc"])] + ([values_of(layout, caches["Vc"])] if "Vc" in caches else [])
    for i, name in enumerate(("Ks", "Vs")):
        if name in caches:  # [pages, kv_heads, d/KV_BLOCK, PAGE]
            scales = caches[name].transpose(0, 1, 3, 2).astype(np.float32)
            pools[i] = pools[i] * np.repeat(scales, KV_BLOCK, -1)
    return pools[0], pools[-1]


def stored(layout, caches, places, k, v) -> dict[str, np.ndarray]:
    """Copies of the caches, by parameter, in which k and v [rows, kv_heads, d] are stored. places: (page, key in the
    page) of the rows. v: None if there is no Vc."""
    (page, key), found = places, {}
    parts = (("Kc", "Ks", k, keys_of, packed_keys), ("Vc", "Vs", v, values_of, packed_values))
    for name, scales, rows, read, write in parts[: len(parts) if v is not None else 1]:
        pool, dtype = read(layout, caches[name]).copy(), caches[name].dtype
        if scales in caches:
            found[scales] = caches[scales].copy()
            rows, found[scales].transpose(0, 1, 3, 2)[page, :, key] = quantized(rows, STORED[str(dtype)])
        pool[page, :, key, : k.shape[-1]] = rows
        found[name] = pool if caches[name].ndim == 4 and read is keys_of else write(layout, pool, dtype)
    return {name: np.ascontiguousarray(x) for name, x in found.items()}


def places_of(pages, positions, slots):
    """(page, key in the page) where the rows' own keys are stored. pages: the page tables."""
    return pages[slots, positions // PAGE], positions % PAGE


def of_slot(pooled, pages, slot, end):
    """Keys or values of a slot, [kv_heads, at least `end`, width], in the order of positions. pooled: of all pages,
    [pages, kv_heads, PAGE, width]."""
    mine = pooled[pages[slot, : -(-end // PAGE)]]
    return mine.transpose(1, 0, 2, 3).reshape(pooled.shape[1], -1, pooled.shape[3])
