"""A mixture of experts in numpy, float64: what the kernels of all targets are checked against. Meaning of ids, slots,
pairs and groups: schedules/experts.py."""

import numpy as np

MIN_SUM = 6.103515625e-5


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def route(logits, used, gating="softmax", normalize=False, scale=1.0, bias=None, factors=None, groups=1, groups_used=1):
    """(ids [m, used], weights [m, used]) of logits [m, count]; of equal scores the lower expert is first."""
    logits = logits.astype(np.float64)
    p = {"softmax": softmax, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "softmax_used": lambda x: x}[gating](logits)
    scores = p if bias is None else p + bias
    if groups > 1:
        parts = scores.reshape(len(scores), groups, -1)
        ranks = np.sort(parts, -1)[..., -2:].sum(-1)
        best = np.argsort(-ranks, -1, kind="stable")[:, :groups_used]
        open_ = np.zeros((len(scores), groups), bool)
        np.put_along_axis(open_, best, True, -1)
        scores = np.where(open_[..., None], parts, -np.inf).reshape(scores.shape)
    ids = np.argsort(-scores, -1, kind="stable")[:, :used]
    weights = np.take_along_axis(p, ids, -1)
    if gating == "softmax_used":
        weights = softmax(weights)
    elif normalize:
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), MIN_SUM)
    weights = weights * scale
    return ids, weights if factors is None else weights * np.asarray(factors, np.float64)[ids]


def order(ids, live, count, tile, tiles):
    """(slots [m, used], pairs [tiles * tile], groups [tiles + count + 1]) of ids [m, used]; the first `live` rows
    count."""
    flat = ids[:live].ravel()
    slots, pairs = np.zeros(ids.size, np.int32), np.full(tiles * tile, -1, np.int32)
    groups, first = np.full(tiles + count + 1, -1, np.int32), 0
    for expert in range(count):
        mine = np.flatnonzero(flat == expert)
        wanted = -(-len(mine) // tile)
        place = first * tile + np.arange(len(mine))
        slots[mine], pairs[place] = place, mine
        groups[first : first + wanted], groups[tiles + expert] = expert, first
        first += wanted
    groups[-1] = first
    return slots.reshape(ids.shape), pairs, groups


def activation(name, gate, up):
    if name == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    if name == "gelu":
        return 0.5 * gate * (1 + np.tanh(0.79788456 * (gate + 0.044715 * gate**3))) * up
    return gate / (1 + np.exp(-gate)) * up


def gate_up(x, ids, gate, up, name="silu", gate_bias=None, up_bias=None):
    """act(x G^T) * (x U^T) of each slot: x [slots, k], ids [slots], gate and up [count, n, k], biases [count, n]."""
    g, u = (np.einsum("sk,snk->sn", x.astype(np.float64), w.astype(np.float64)[ids]) for w in (gate, up))
    if gate_bias is not None:
        g, u = g + gate_bias[ids], u + up_bias[ids]
    return activation(name, g, u)


def linear(x, ids, w, bias=None):
    """x W^T of each slot; arguments as of `gate_up`."""
    y = np.einsum("sk,snk->sn", x.astype(np.float64), w.astype(np.float64)[ids])
    return y if bias is None else y + bias[ids]
