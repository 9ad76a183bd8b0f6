"""An independent decoder in numpy float64: what the compiled model must agree with. Shares no code with compiler/ or
schedules/.

Weights come from the GGUF model, dequantized by gguf-py; activations are never quantized, the KV cache is never
rounded.
"""

import gguf
import numpy as np


def forward(model, ids) -> np.ndarray:
    """Logits float64 [len(ids), vocab] of a GGUFModel without RoPE scaling other than frequency factors."""
    c = model.config
    x = _matrix(model, "token_embd.weight")[np.asarray(ids)] * c.embedding_scale
    for i, layer in enumerate(c.layers):
        h = _normed(model, f"blk.{i}.", layer.mixer_norms.before, x)
        y = _attention_block(model, f"blk.{i}.", layer.attention, h)
        x = x + _normed(model, f"blk.{i}.", layer.mixer_norms.after, y)
        h = _normed(model, f"blk.{i}.", layer.feed_forward_norms.before, x)
        y = _feed_forward_block(model, f"blk.{i}.", layer.feed_forward, h)
        x = x + _normed(model, f"blk.{i}.", layer.feed_forward_norms.after, y)
    h = _rms_norm(x, _vector(model, "output_norm.weight"), c.norm_eps)
    y = h @ _matrix(model, "token_embd.weight" if c.tied else "output.weight").T
    return c.logit_softcap * np.tanh(y / c.logit_softcap) if c.logit_softcap else y


def _normed(model, block, name, x) -> np.ndarray:
    return _rms_norm(x, _vector(model, f"{block}{name}.weight"), model.config.norm_eps) if name else x


def _attention_block(model, block, a, h) -> np.ndarray:
    q, k, v = (_linear(model, f"{block}attn_{which}", h).reshape(len(h), -1, a.head_dim) for which in "qkv")
    if a.head_norms:
        q = _rms_norm(q, _vector(model, block + "attn_q_norm.weight"), model.config.norm_eps)
        k = _rms_norm(k, _vector(model, block + "attn_k_norm.weight"), model.config.norm_eps)
    rope = model.config.ropes[a.rope]
    cos, sin = _rotation(rope, len(h), model)
    y = _attention(_rotate(q, cos, sin, rope.neox), _rotate(k, cos, sin, rope.neox), v, a)
    return _linear(model, block + "attn_output", y)


def _feed_forward_block(model, block, f, h) -> np.ndarray:
    gate = _linear(model, block + "ffn_gate", h)
    return _linear(model, block + "ffn_down", ACTIVATIONS[f.act](gate) * _linear(model, block + "ffn_up", h))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def _matrix(model, name) -> np.ndarray:
    tensor = model.tensors[name]
    kind = gguf.GGMLQuantizationType[tensor.format.upper()]
    return gguf.dequantize(np.array(tensor.blocks(0, tensor.shape[0])), kind).reshape(tensor.shape).astype(np.float64)


def _vector(model, name) -> np.ndarray:
    return np.asarray(model.tensors[name].dequantize(), np.float64)


def _linear(model, name, x) -> np.ndarray:
    y = x @ _matrix(model, name + ".weight").T
    return y + _vector(model, name + ".bias") if name + ".bias" in model.tensors else y


def _rms_norm(x, g, eps) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * g


def _rotation(rope, n, model):
    theta = rope.base ** (-np.arange(0, rope.dim, 2) / rope.dim)
    if rope.factors:
        theta = theta / _vector(model, rope.factors)
    angle = np.arange(n)[:, None, None] * theta
    return np.cos(angle), np.sin(angle)


def _rotate(x, cos, sin, neox) -> np.ndarray:
    half = cos.shape[-1]
    first, second = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def _attention(q, k, v, a) -> np.ndarray:
    n, heads, d = q.shape
    q, k, v = (np.repeat(t, heads // t.shape[1], axis=1).transpose(1, 0, 2) for t in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) * (a.scale or 1 / np.sqrt(d))
    if a.softcap:
        scores = a.softcap * np.tanh(scores / a.softcap)
    distance = np.arange(n)[:, None] - np.arange(n)
    seen = (distance >= 0) & (distance < (a.window or n))
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return (p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(n, -1)
