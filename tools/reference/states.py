"""The operators of layers that keep a state for each sequence, in float64, and the gate after them.

In: a `Case`. Out: `Result`s. A run is the rows of one slot: consecutive tokens of one sequence.
"""

from collections.abc import Callable, Iterator

import numpy as np

from mlc_amd.schedules.operators import CausalConv, ChannelDecay, DeltaNet, Gate, Operator, Sinkhorn, SsmScan
from mlc_amd.tools.reference import experts
from mlc_amd.tools.reference.case import Case, Result, rms


def runs(c: Case) -> Iterator[tuple[np.ndarray, np.ndarray | None, list[int]]]:
    """For each run: (rows, the state before them or None at position 0, the cells of the states after each row)."""
    positions, slots = c.places(np.arange(c.live))
    for slot in dict.fromkeys(slots.tolist()):
        rows = np.flatnonzero(slots == slot)
        source, *targets = c.arrays["cells"][slot].tolist()
        before = c.arrays["States"][source].astype(np.float64) if positions[rows[0]] else None
        yield rows, before, [targets[min(i, len(targets) - 1)] for i in range(len(rows))]


def causal_conv(c: Case) -> dict[str, Result]:
    a, states = c.op, c.arrays["States"].astype(np.float64)
    channels, taps = a.channels, a.taps
    own = channels // (parts := a.parts)
    of = [""] if parts == 1 else [str(i) for i in range(parts)]
    w = np.concatenate([c.arrays["W" + i][: own * taps].reshape(own, taps) for i in of]).astype(np.float64)
    x, gate = np.concatenate([c.arrays["X" + i][: c.live] for i in of], axis=1).astype(np.float64), 1.0
    if a.gated:
        b, gate, x = (x[:, i * channels : (i + 1) * channels] for i in range(3))
        x = b * x
    y = np.empty((c.live, channels))
    for rows, before, targets in runs(c):
        seen = np.concatenate([np.zeros((taps - 1, channels)) if before is None else before, x[rows]])
        y[rows] = sum(seen[t : t + len(rows)] * w[:, t] for t in range(taps))
        for i, target in enumerate(targets, 1):
            states[target] = seen[i : i + taps - 1]
    y = y + c.arrays["B"][:channels] if a.bias else y
    y = experts.ACTIVATIONS[a.act](y, 1.0) if a.act else y
    return _with_states(c, y * gate, states)


def channel_decay(c: Case) -> dict[str, Result]:
    heads, d = c.op.heads, c.op.d
    x = c.arrays["X"][c.rows, : heads * d] + c.arrays["Dt"][: heads * d].astype(np.float64)
    return {"Y": Result(np.exp(c.arrays["A"][:heads].repeat(d) * np.logaddexp(0.0, x)), c.rows)}


def delta_net(c: Case) -> dict[str, Result]:
    """The delta net. A cell has a matrix for each value head: [columns of v, columns of k] on GPUs, transposed on
    CPUs."""
    a, states = c.op, c.arrays["States"].astype(np.float64)
    keys, values, d = a.key_heads, a.value_heads, a.d
    parts = np.split(c.arrays["X"][: c.live].astype(np.float64), [keys * d, 2 * keys * d], axis=1)
    q, k, v = (part.reshape(c.live, -1, d) for part in parts)
    heads = np.arange(values) // (values // keys) if a.grouped else np.arange(values) % keys
    q, k = ((x / np.sqrt((x * x).sum(-1, keepdims=True) + a.eps))[:, heads] for x in (q, k))
    beta = c.arrays["Beta"][: c.live, :values].astype(np.float64)
    if a.by_channel:
        decay = c.arrays["Decay"][: c.live].astype(np.float64).reshape(c.live, values, d, 1)
    else:
        alpha = c.arrays["Alpha"][: c.live, :values].astype(np.float64)
        decay = np.exp(c.arrays["A"][:values] * np.logaddexp(0.0, alpha + c.arrays["Dt"][:values]))[..., None, None]
    y = np.empty((c.live, values, d))
    for rows, before, targets in runs(c):
        matrix = np.zeros((values, d, d)) if before is None else before
        matrix = matrix if c.layout == "cpu" else matrix.transpose(0, 2, 1)
        for row, target in zip(rows, targets, strict=True):
            matrix = matrix * decay[row]
            change = (v[row] - np.einsum("hij,hi->hj", matrix, k[row])) * experts.sigmoid(beta[row])[:, None]
            matrix = matrix + k[row][:, :, None] * change[:, None]
            y[row] = np.einsum("hij,hi->hj", matrix, q[row]) / np.sqrt(d)
            states[target] = matrix if c.layout == "cpu" else matrix.transpose(0, 2, 1)
    return _with_states(c, y.reshape(c.live, -1), states)


def ssm_scan(c: Case) -> dict[str, Result]:
    """The SSM scan. A cell has a matrix for each head: [columns of x, columns of B] on GPUs, transposed on CPUs."""
    a, states = c.op, c.arrays["States"].astype(np.float64)
    heads, d, size, groups = (a.heads, a.d, a.size, a.groups)
    live, inner = c.live, heads * d
    x, b, to_y = np.split(c.arrays["X"][:live].astype(np.float64), [inner, inner + groups * size], axis=1)
    x = x.reshape(live, heads, d)
    b, to_y = (part.reshape(live, groups, size).repeat(heads // groups, axis=1) for part in (b, to_y))
    of = (1, d) if a.by_state else (heads, 1)
    own = np.prod(of)
    dt = c.arrays["Dt"][:live, :own].astype(np.float64)
    dt = (dt if a.given else np.logaddexp(0.0, dt + c.arrays["Bias"][:own])).reshape(live, *of)
    factor = c.arrays["A"][: own * (size if a.by_state else 1)].astype(np.float64).reshape(*of, -1)
    skip = c.arrays["D"][:own].reshape(of) if a.gated else 0.0
    y, z = np.empty((live, heads, d)), c.arrays["Z"][:live, :inner].astype(np.float64) if a.gated else 0.0
    shape = (heads, d, size) if c.layout == "gpu" else (heads, size, d)
    for rows, before, targets in runs(c):
        matrix = np.zeros((heads, d, size))
        if before is not None:
            matrix = before.reshape(shape) if c.layout == "gpu" else before.reshape(shape).transpose(0, 2, 1)
        for row, target in zip(rows, targets, strict=True):
            matrix = matrix * np.exp(factor * dt[row][..., None])
            matrix = matrix + (x[row] * dt[row])[..., None] * b[row][:, None]
            y[row] = np.einsum("hdn,hn->hd", matrix, to_y[row]) + skip * x[row]
            kept = matrix if c.layout == "gpu" else matrix.transpose(0, 2, 1)
            states[target] = kept.reshape(heads, -1)
    return _with_states(c, y.reshape(live, inner) * (z * experts.sigmoid(z) if a.gated else 1.0), states)


def _with_states(c: Case, y: np.ndarray, kept: np.ndarray) -> dict[str, Result]:
    return {"Y": Result(y[c.rows], c.rows), "States": Result(kept)}


def gate(c: Case) -> dict[str, Result]:
    a = c.op
    x, z = (c.arrays[name][c.rows].astype(np.float64) for name in "XZ")
    if a.eps is not None:
        heads = x.reshape(len(x), -1, a.size)
        x = (rms(heads, a.eps) * c.arrays["G"][: a.size]).reshape(x.shape)
    return {"": Result(x * experts.sigmoid(z) * (z if a.silu else 1.0), c.rows)}


def sinkhorn(c: Case) -> dict[str, Result]:
    a, x = c.op, c.arrays["X"][c.rows].astype(np.float64)
    y = experts.softmax(x.reshape(-1, a.count, a.count)) + a.eps
    for axis in [1, *[2, 1] * (a.iterations - 1)]:
        y = y / (y.sum(axis, keepdims=True) + a.eps)
    return {"Y": Result(y.reshape(x.shape), c.rows)}


OPERATORS: dict[type[Operator], Callable[[Case], dict[str, Result]]] = {
    CausalConv: causal_conv,
    ChannelDecay: channel_decay,
    DeltaNet: delta_net,
    SsmScan: ssm_scan,
    Gate: gate,
    Sinkhorn: sinkhorn,
}
