"""The results of a call of each operator of schedules/operators, as numbers.

In: a `Case`. Out: a `Result` for each output. The activations that a kernel writes in a layout have the name ""; the
result has the numbers before they are converted to that layout.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mlc_amd.runtime.sampling.layout import FIELDS, LOGPROB
from mlc_amd.schedules import operators as declared
from mlc_amd.schedules.operators import Operator
from mlc_amd.schedules.operators.attention import PAGE, Attention, Rope
from mlc_amd.schedules.operators.layouts import SUMMED, kind_of, output_rows
from mlc_amd.tools.reference import activations, experts, mixture, states, weights
from mlc_amd.tools.reference import attention as kv
from mlc_amd.tools.reference.case import Case, Result, live_rows, rms

NORM_MARGIN = 2.0**-6  # schedules/gpu/linear/deferred_norm.py


def results(case: Case) -> dict[str, Result]:
    """The result of each output, by name. Raises KeyError for an operator without a reference."""
    with np.errstate(invalid="ignore", over="ignore"):  # unused rows and slots may contain any numbers
        return OPERATORS[type(case.op)](case)


def has_reference(name: str) -> bool:
    """Whether the operator of this name has a reference."""
    return declared.OPERATORS.get(name) in OPERATORS


def wanted_rows(op: Operator, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """All rows that a call computes: live rows, or used slots."""
    live = live_rows(op, arrays)
    return mixture.used_slots(arrays, op, live) if type(op) in mixture.OF_SLOTS else np.arange(live)


# ---- rows of numbers


def _embed(c: Case) -> dict[str, Result]:
    tokens = c.arrays["tokens"][c.rows]
    planes = {name: array for name, array in c.arrays.items() if name not in ("state", "tokens", "features", "X")}
    x = weights.rows_of(c.layout, c.op.fmt, planes, np.clip(tokens, 0, c.op.vocab - 1)) * np.float32(c.op.scale)
    if c.op.features:
        x = np.where(tokens[:, None] < 0, c.arrays["features"][c.rows][:, : c.op.k], x)
    return {"": Result(x, c.rows)}


def _norm_rows(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """(rows that a norm reads, rows that it writes); see schedules/operators/layouts.py."""
    if c.op.rows == "all":
        return c.rows, c.rows
    if c.op.rows == "last":
        return np.array([c.live - 1]), np.array([0])
    count = min(c.single + (c.single < c.live), output_rows(c.op.rows, c.op.m))
    answers = np.arange(count)
    return np.where(answers < c.single, answers, c.live - 1), answers


def _rms_norm(c: Case) -> dict[str, Result]:
    (source, target), k = _norm_rows(c), c.op.k
    x = c.arrays["X"][source].astype(np.float64)
    found = {"": Result(rms(x, c.op.eps) * c.arrays["G"][:k], target)}
    if c.op.scale_out:
        found["NewScale"] = Result(1 / np.sqrt((x * x).mean(-1) + c.op.eps), target)
    return found


def _layer_norm(c: Case) -> dict[str, Result]:
    (source, target), k = _norm_rows(c), c.op.k
    x = c.arrays["X"][source].astype(np.float64)
    y = rms(x - x.mean(-1, keepdims=True), c.op.eps) * c.arrays["G"][:k]
    return {"": Result(y + c.arrays["B"][:k] if c.op.bias else y, target)}


def _quantize(c: Case) -> dict[str, Result]:
    return {"": Result(kv.multiplied(c.arrays["X"][c.rows], c.op.rotation), c.rows)}


def _activations(c: Case) -> np.ndarray:
    """The activations of a linear layer: those that it reads, or the norm that it computes itself; after rounding to
    int8 blocks if it makes such blocks."""
    if (eps := c.op.eps) is None:
        return c.read(c.rows)
    return activations.rounded(rms(c.arrays["X"][c.rows], eps) * c.arrays["G"][: c.op.k])


def _completed(c: Case) -> tuple[np.ndarray, dict[str, Result]]:
    """For a kernel that completes the norm of its input (schedules/gpu/linear/deferred_norm.py): (factor for the
    products of each row, the scales that it stores)."""
    if (eps := c.op.norm_in) is None:
        return np.ones((len(c.rows), 1)), {}
    total = c.arrays["Squares"][c.rows].astype(np.float64).sum(-1)
    scale = 1 / np.sqrt(total / c.op.k + eps)
    if kind_of(c.op.layout_read) != "lanes":
        return scale[:, None], {}
    factors = scale / (c.arrays["Scale"][c.rows] * NORM_MARGIN)
    return factors[:, None], {"NewScale": Result(scale, c.rows)}


def _prepared(c: Case, y: np.ndarray, columns: np.ndarray) -> dict[str, Result]:
    """The results that an operator stores for the norm after it, from these columns of its result. columns: whole
    blocks."""
    if not c.op.norm_out:
        return {}
    summed, scaled = SUMMED[kind_of(c.op.norm_out)], y * c.arrays["NG"][columns]
    squares = (y.astype(np.float64) ** 2).reshape(len(y), -1, summed).sum(-1)
    found = {"NewSquares": Result(squares, c.rows, columns[::summed] // summed)}
    if kind_of(c.op.norm_out) != "lanes":
        return found | {"": Result(scaled, c.rows, columns)}
    factor = c.arrays["NS"][c.rows].astype(np.float64)[:, None] * NORM_MARGIN
    return found | {"Hn": Result(scaled * factor, c.rows, columns)}


def _linear(c: Case) -> dict[str, Result]:
    x, (factors, found) = _activations(c), _completed(c)
    for i, ((fmt, n), biased) in enumerate(zip(c.op.segments, c.op.biases, strict=True)):
        columns = c.pick(n)
        y = x @ c.matrix(f"W{i}_", fmt, columns).T * factors
        y = y + c.arrays[f"bias{i}"][columns] if biased else y
        y = y + c.arrays["R"][c.rows][:, columns] if c.op.residual else y
        found[f"Y{i}"] = Result(y, c.rows, columns)
        found |= _prepared(c, y, columns)
    return found


def _head_linear(c: Case) -> dict[str, Result]:
    a, columns = c.op, c.pick(c.op.heads * c.op.n)
    x = c.read(c.rows).reshape(len(c.rows), a.heads, a.k)[:, columns // a.n]
    return {"Y": Result((x * c.matrix("W_", a.fmt, columns)).sum(-1), c.rows, columns)}


def _gate_up(c: Case) -> dict[str, Result]:
    x, (factors, found), columns = _activations(c), _completed(c), c.pick(c.op.n)
    gate, up = (x @ c.matrix(prefix, fmt, columns).T * factors for prefix, fmt in (("G_", c.op.gate), ("U_", c.op.up)))
    return found | {"": Result(experts.activate(c.op.act, gate, up), c.rows, columns)}


# ---- attention


def _heads(c: Case, name: str, rows: np.ndarray, d: int, count: int) -> np.ndarray:
    return c.arrays[name][rows][:, : count * d].reshape(len(rows), count, d)


def _placed(c: Case, layer: Attention, rows: np.ndarray) -> np.ndarray:
    """Those of the rows that have a place in the cache."""
    positions, _ = c.places(rows)
    return rows[(positions >= 0) & (positions < layer.ctx)]


def _rotated(c: Case, rows: np.ndarray, layer: Attention, rope: Rope, name: str, count: int) -> np.ndarray:
    """Q or K of these rows: normalized and rotated heads."""
    positions, _ = c.places(rows)
    cs = c.arrays["CS"][rows if rope.by_row else positions] if rope.rotary else np.zeros((len(rows), 0))
    weight = c.arrays[name + "N"][: layer.d] if rope.eps is not None else None
    return kv.rope_reference(_heads(c, name, rows, layer.d, count), cs, rope, weight)


def _caches(c: Case) -> dict[str, np.ndarray]:
    return {name: c.arrays[name] for name in kv.CACHES if name in c.arrays}


def _own(c: Case, layer: Attention, rope: Rope, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys and values of these rows, in the form for the cache."""
    k = _rotated(c, rows, layer, rope, "K", layer.kv_heads)
    v = kv.value_reference(_heads(c, "V", rows, layer.d, layer.kv_heads), rope)
    return kv.multiplied(k, layer.rotation), kv.multiplied(v, layer.rotation)


def _written(c: Case, layer: Attention, rope: Rope) -> dict[str, np.ndarray]:
    """The caches after the keys and values of all live rows are stored."""
    rows = _placed(c, layer, np.arange(c.live))
    k, v = _own(c, layer, rope, rows)
    return kv.stored(c.layout, _caches(c), kv.places_of(c.arrays["pages"], *c.places(rows)), k, v)


def _of_caches(caches: dict[str, np.ndarray]) -> dict[str, Result]:
    return {name: Result(cache) for name, cache in caches.items()}


def _rope_kv_write(c: Case) -> dict[str, Result]:
    layer, rope = c.op.layer, c.op.rope
    rows = _placed(c, layer, c.rows)
    q = kv.multiplied(_rotated(c, rows, layer, rope, "Q", layer.heads), layer.rotation) * layer.query_scale
    return {"Qo": Result(q, rows)} | (_of_caches(_written(c, layer, rope)) if rope.writes else {})


def _latent_kv_write(c: Case) -> dict[str, Result]:
    layer, rope = c.op.layer, c.op.rope
    plain = replace(rope, eps=None)
    eps, weight = rope.eps, c.arrays["KN"][: layer.values]

    def written(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(queries, keys) of these rows, [rows, heads, d]."""
        cs = c.arrays["CS"][c.places(rows)[0]] if rope.rotary else np.zeros((len(rows), 0))
        key = c.arrays["K"][rows][:, None, : layer.d]
        q = kv.rope_reference(_heads(c, "Q", rows, layer.d - layer.values, layer.heads), cs, plain, None)
        k = kv.rope_reference(key[..., layer.values :], cs, plain, None)
        latent = rms(key[..., : layer.values], eps) * weight
        queries = np.concatenate([_heads(c, "L", rows, layer.values, layer.heads), q], -1)
        return queries * layer.query_scale, np.concatenate([latent, k], -1)

    rows, live = _placed(c, layer, c.rows), _placed(c, layer, np.arange(c.live))
    places = kv.places_of(c.arrays["pages"], *c.places(live))
    caches = kv.stored(c.layout, _caches(c), places, written(live)[1], None)
    return {"Qo": Result(written(rows)[0], rows)} | _of_caches(caches)


def _attended(c: Case, layer: Attention, rows: np.ndarray, q: np.ndarray, caches, own=None) -> dict[str, Result]:
    """The attention of queries q [rows, heads, d], each row in its own sequence. own: keys and values [rows, kv_heads,
    d] that are used for the rows' own positions instead of the cache's."""
    sinks = c.arrays["Sinks"][: layer.heads].astype(np.float64) if layer.sinks else None
    pools = kv.pools_of(c.layout, caches)
    (positions, slots), found = c.places(rows), np.empty((len(rows), layer.heads * layer.value_d))
    for slot in np.unique(slots):
        mine = slots == slot
        image = _image_end(c, layer, slot)
        end = max(int(positions[mine].max()) + 1, image)
        pooled = zip(pools, (layer.d, layer.value_d), strict=True)
        k, v = (kv.of_slot(x, c.arrays["pages"], slot, end)[:, :end, :d].astype(np.float64) for x, d in pooled)
        for pool, exact in zip((k, v), own or (), strict=False):
            pool[:, positions[mine]] = exact[mine].transpose(1, 0, 2)
        found[mine] = kv.attention_reference(layer, q[mine], k, v, positions[mine], sinks, image)
    return {"": Result(found, rows)}


def _image_end(c: Case, layer: Attention, slot: int) -> int:
    """The position after the image with which the chunk begins, if it belongs to this slot; otherwise 0."""
    rows = np.arange(c.single, min(c.single + int(c.arrays["state"][2]), c.live)) if layer.images else np.arange(0)
    positions, slots = c.places(rows)
    return int(positions.max()) + 1 if len(rows) and slots[0] == slot else 0


def _attention(c: Case) -> dict[str, Result]:
    layer = c.op.layer
    rows = _placed(c, layer, c.rows)
    q = c.arrays["Qo"][rows][..., : layer.d].astype(np.float64) / layer.query_scale
    found = _attended(c, layer, rows, q, _caches(c))[""].value
    return {"": Result(kv.multiplied(found, layer.rotation if c.op.back else 0), rows)}


def _rope_attention(c: Case) -> dict[str, Result]:
    layer, rope = c.op.layer, c.op.rope
    rows = _placed(c, layer, c.rows)
    caches = _written(c, layer, rope) if rope.writes else _caches(c)
    # kernels round keys and values of the row itself only to float16
    own = _own(c, layer, rope, rows) if rope.writes and layer.quantized else None
    found = _attended(c, layer, rows, _rotated(c, rows, layer, rope, "Q", layer.heads), caches, own)
    return found | (_of_caches(caches) if rope.writes else {})


def _select_keys(c: Case) -> dict[str, Result]:
    a, rows = c.op, np.arange(c.live)
    cache, pages = c.arrays["Ik"].astype(np.float64), c.arrays["pages"]
    positions, slots = c.places(rows)
    for row, position, slot in zip(rows, positions, slots, strict=True):
        key = c.arrays["K"][row, : a.d].astype(np.float16)
        cache[pages[slot, position // PAGE], position % PAGE] = key
    found = np.full((c.live, a.sets, a.used), -1)
    for row, position, slot in zip(rows, positions, slots, strict=True):
        keys, own = cache[pages[slot]].reshape(-1, a.d)[: position + 1], position // a.block
        products = c.arrays["Q"][row, : a.heads * a.d].reshape(a.heads, a.d).astype(np.float64) @ keys.T
        most, whole = a.used, (position + 1) % a.block == 0
        if a.by_head:
            scores = np.maximum.reduceat(products, np.arange(0, position + 1, a.block), axis=1)
            scores[:, max(own - a.local + 1, 0) :] = np.inf
        elif a.block == 1:
            scores = (c.arrays["W"][row, : a.heads] @ np.maximum(products, 0))[None]
        else:
            ends = np.minimum(np.arange(own + 1) * a.block + a.block - 1, position)
            scores, most = np.maximum(products, 0).sum(0)[None, ends], a.used - whole
            scores[:, own:] = scores[:, own:] if whole else np.inf
        for i, of_set in enumerate(scores):
            # rounded, because BLAS may add the products of equal keys in different orders
            order = np.argsort(-of_set.astype(np.float32), kind="stable")[:most]
            found[row, i, : len(order)] = np.sort(order)
    return {"Ids": Result(found.reshape(c.live, -1)[c.rows], c.rows), "Ik": Result(cache)}


def _selected_attention(c: Case) -> dict[str, Result]:
    layer, rows = c.op.layer, c.rows
    positions, slots = c.places(rows)
    pools, pages = kv.pools_of(c.layout, _caches(c)), c.arrays["pages"]
    sinks = c.arrays["Sinks"][: layer.heads].astype(np.float64) if layer.sinks else np.full(layer.heads, -np.inf)
    found = np.empty((len(rows), layer.heads, layer.value_d))
    for i, (row, position, slot) in enumerate(zip(rows, positions, slots, strict=True)):
        k, v = (kv.of_slot(pool, pages, slot, position + 1).astype(np.float64) for pool in pools)
        chosen = c.arrays["Ids"][row].reshape(c.op.sets, -1)
        for head in range(layer.heads):
            group = head // layer.group
            most = c.op.used - (c.op.tail and (position + 1) % c.op.block == 0)
            blocks = chosen[group // (layer.kv_heads // c.op.sets)][: min(position // c.op.block + 1, most)]
            ids = (blocks[:, None] * c.op.block + np.arange(c.op.block)).reshape(-1)
            unseen = max((blocks[-1] + 1) * c.op.block - 1 - position, 0) if c.op.block > 1 else 0
            ids = ids[: len(ids) - unseen].clip(0, position)
            scores = k[group, ids, : layer.d] @ c.arrays["Qo"][row, head, : layer.d].astype(np.float64)
            top = scores.max()
            weights = np.exp2(scores - top)
            total = weights.sum() + np.exp(sinks[head] - top * np.log(2))
            found[i, head] = weights @ v[group, ids, : layer.value_d] / total
    return {"Y": Result(found.reshape(len(rows), -1), rows)}


def _compressed_attention(c: Case) -> dict[str, Result]:
    a, layer, pages, live = c.op, c.op.layer, c.arrays["pages"], np.arange(c.live)
    caches = {name: c.arrays[name].astype(np.float64) for name in ("Kc", "Cc") if name in c.arrays}
    for row, position, slot in zip(live, *c.places(live), strict=True):
        page, place = pages[slot, position // PAGE], position % PAGE
        caches["Kc"][page, place] = c.arrays["K"][row, : layer.d].astype(np.float16)
        if a.ratio and (position + 1) % a.ratio == 0:
            caches["Cc"][page, place // a.ratio] = c.arrays["C"][row, : layer.d].astype(np.float16)
    found = np.empty((len(c.rows), layer.heads, layer.d))
    for i, (row, position, slot) in enumerate(zip(c.rows, *c.places(c.rows), strict=True)):
        last = np.arange(max(position + 1 - layer.window, 0), position + 1)
        keys = [caches["Kc"][pages[slot, last // PAGE], last % PAGE]]
        if a.ratio:
            ends = np.arange(a.ratio - 1, position + 1, a.ratio)
            ends = ends[np.isin(ends, c.arrays["Ids"][row])] if a.used else ends
            keys.append(caches["Cc"][pages[slot, ends // PAGE], ends % PAGE // a.ratio])
        joined = np.concatenate(keys)
        scores = c.arrays["Q"][row].astype(np.float64) @ joined.T * np.log(2)
        sinks = c.arrays["Sinks"][: layer.heads, None].astype(np.float64)
        found[i] = experts.softmax(np.concatenate([scores, sinks], 1))[:, :-1] @ joined
    return {"Y": Result(found.reshape(len(c.rows), -1), c.rows)} | _of_caches(caches)


def _packed_attention(c: Case) -> dict[str, Result]:
    a, rows, live = c.op, c.rows, np.arange(c.live)
    q = _heads(c, "Q", rows, a.d, a.heads).astype(np.float64) * (a.scale or a.d**-0.5)
    k, v = (_heads(c, which, live, a.d, a.kv_heads).astype(np.float64).repeat(a.group, 1) for which in "KV")
    first, last = c.arrays["segments"][rows].T[..., None]
    distance = np.abs(rows[:, None] - live)
    seen = (live >= first) & (live < last)
    seen &= distance <= a.window if a.window else True
    seen &= live <= rows[:, None] if a.causal else True
    scores = np.einsum("nhd,mhd->hnm", q, k)
    if a.alibi:
        slopes = [2.0 ** a.exponent(head, lambda condition, x, y: x if condition else y) for head in range(a.heads)]
        scores = scores - np.array(slopes)[:, None, None] * distance
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    y = np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), v)
    return {"Y": Result(y.reshape(len(rows), -1), rows)}


def _activate(c: Case) -> dict[str, Result]:
    x = c.arrays["X"][c.rows].astype(np.float64)
    return {"": Result(experts.ACTIVATIONS[c.op.act](x, 1.0), c.rows)}


def _pool(c: Case) -> dict[str, Result]:
    x = c.arrays["X"].astype(np.float64)
    return {"Y": Result(np.stack([x[first:end].mean(0) for first, end in c.arrays["pooled"][c.rows]]), c.rows)}


# ---- mixtures of experts


def _all_reduce(c: Case) -> dict[str, Result]:
    y = c.arrays["P"].astype(np.float64).sum(0)[c.rows]
    y = y + c.arrays["R"][c.rows] if c.op.residual else y
    return {"Y": Result(y, c.rows)} | _prepared(c, y, np.arange(c.op.n))


def _all_gather(c: Case) -> dict[str, Result]:
    return {"Y": Result(np.concatenate(c.arrays["P"], axis=1)[c.rows], c.rows)}


def _sample(c: Case) -> dict[str, Result]:
    """The chosen tokens of rows that take the largest logit."""
    if (c.arrays["sampling"][c.rows, FIELDS.index("flags")] & ~LOGPROB).any():
        raise ValueError("there are rows with draws or changed logits")
    wanted = c.arrays["sampling"][c.rows, FIELDS.index("flags")] > 0
    logits = c.arrays["Logits"][c.rows][:, : c.op.vocab].astype(np.float64)
    ids, top = logits.argmax(1), logits.max(1, keepdims=True)
    probabilities = np.where(wanted, -np.log(np.exp(logits - top).sum(1)), 0.0)
    return {"Sampled": Result(ids, c.rows), "LogProbs": Result(probabilities, c.rows)}


OPERATORS: dict[type[Operator], Callable[[Case], dict[str, Result]]] = {
    declared.Embed: _embed, declared.RmsNorm: _rms_norm, declared.LayerNorm: _layer_norm, declared.Quantize: _quantize,
    declared.Linear: _linear, declared.HeadLinear: _head_linear, declared.GateUp: _gate_up, declared.RopeKvWrite:
    _rope_kv_write, declared.LatentKvWrite: _latent_kv_write, declared.CausalAttention: _attention,
    declared.RopeAttention: _rope_attention, declared.PackedAttention: _packed_attention,
    declared.SelectKeys: _select_keys, declared.SelectedAttention: _selected_attention,
    declared.CompressedAttention: _compressed_attention, declared.Pool: _pool, declared.Activate: _activate,
    declared.AllReduce: _all_reduce, declared.AllGather: _all_gather, declared.Sample: _sample, **mixture.OPERATORS,
    **states.OPERATORS,
}  # fmt: skip
