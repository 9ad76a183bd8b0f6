"""The computations of a mixture of experts: the router, the order of rows by expert, gate/up and down of one expert;
and activation functions.

Arrays are float64 or int. Only `order` depends on the layout of slots; it follows schedules/operators/experts.py.
"""

import math

import numpy as np

from mlc_amd.schedules.operators.experts import CUT, SITU, numbers_of


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


PROBABILITIES = {"softmax": softmax, "sigmoid": sigmoid, "softmax_used": lambda x: x} | {
    "sqrt_softplus": lambda x: np.sqrt(np.logaddexp(x, 0))
}


def route(logits, used, gating, normalize=False, scale=1.0, bias=None, factors=None, groups=1, groups_used=1):
    """(ids [m, used], weights [m, used]) for logits [m, experts]."""
    probabilities = PROBABILITIES[gating](logits.astype(np.float64))
    scores = probabilities if bias is None else probabilities + bias
    if groups > 1:
        of_group = scores.reshape(len(scores), groups, -1)
        best = np.argsort(-np.sort(of_group, -1)[..., -2:].sum(-1), axis=1, kind="stable")[:, :groups_used]
        stays = (np.arange(groups) == best[..., None]).any(1)
        scores = np.where(np.repeat(stays, of_group.shape[-1], 1), scores, -np.inf)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :used]
    weights = np.take_along_axis(probabilities, ids, 1)
    if gating == "softmax_used":
        weights = softmax(weights)
    if normalize:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), 6.103515625e-5)
    weights = weights * scale
    return ids, weights if factors is None else weights * factors[ids]


def order(ids, count, tile, tiles):
    """Sorts rows by expert. ids: experts of the live rows, [rows, used]. Returns (slots [rows, used], pairs [tiles *
    tile], expert of each tile [tiles], first tile of each expert, then the number of used tiles [count + 1], number of
    pairs of each expert [count])."""
    numbers = np.bincount(ids.ravel(), minlength=count)
    needed = -(-numbers // tile)
    first = np.concatenate([[0], np.cumsum(needed)])
    experts = np.full(tiles, -1)
    experts[: first[-1]] = np.repeat(np.arange(count), needed)
    pairs, slots = np.full(tiles * tile, -1), np.empty(ids.size, int)
    for expert in range(count):
        mine = np.flatnonzero(ids.ravel() == expert)
        slots[mine] = first[expert] * tile + np.arange(len(mine))
        pairs[slots[mine]] = mine
    return slots.reshape(ids.shape), pairs, experts, first, numbers


def _gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _swiglu_oai(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate * sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS = {
    "silu": lambda gate, up: gate * sigmoid(gate) * up,
    "gelu": lambda gate, up: _gelu(gate) * up,
    "gelu_alone": lambda gate, up: _gelu(gate),
    "relu": lambda gate, up: np.maximum(gate, 0) * up,
    "relu_sq": lambda gate, up: np.maximum(gate, 0) ** 2 * up,
    "swiglu_oai": _swiglu_oai,
}


def activate(act, gate, up):
    kind, numbers = numbers_of(act)
    if not numbers:
        return ACTIVATIONS[act](gate, up)
    limit = numbers[0]
    if kind == SITU:
        up = numbers[1] * np.tanh(up / numbers[1]) if numbers[1] else up
        return limit * np.tanh(gate / limit) * sigmoid(gate) * up
    up = np.clip(up, -limit, limit)
    if kind == CUT:
        return np.minimum(gate * sigmoid(gate), limit) * up
    return ACTIVATIONS["silu"](np.minimum(gate, limit), up)


def linear(x, w, bias=None):
    """The product of x [rows, k] and a matrix [n, k], plus the bias."""
    y = x.astype(np.float64) @ w.astype(np.float64).T
    return y if bias is None else y + bias


def gate_up(x, gate, up, act, biases=(None, None)):
    return activate(act, linear(x, gate, biases[0]), linear(x, up, biases[1]))
