"""An independent decoder in numpy float64: what the compiled model must agree with. Shares no code with compiler/ or
schedules/.

Weights come from the GGUF model, dequantized by gguf-py; activations are never quantized, the KV cache is never
rounded.
"""

import gguf
import numpy as np


def forward(model, ids) -> np.ndarray:
    """Logits float64 [len(ids), vocab] of a GGUFModel (llama, qwen2, qwen3) without RoPE scaling other than frequency
    factors."""
    c = model.config
    x = _matrix(model, "token_embd.weight")[np.asarray(ids)]
    cos, sin = _rotation(c, len(ids), model)
    for layer in range(c.layers):
        block = f"blk.{layer}."
        h = _rms_norm(x, _vector(model, block + "attn_norm.weight"), c.norm_eps)
        q, k, v = (_linear(model, f"{block}attn_{which}", h).reshape(len(ids), -1, c.head_dim) for which in "qkv")
        if c.qk_norm:
            q = _rms_norm(q, _vector(model, block + "attn_q_norm.weight"), c.norm_eps)
            k = _rms_norm(k, _vector(model, block + "attn_k_norm.weight"), c.norm_eps)
        a = _attention(_rotate(q, cos, sin, c.rope.neox), _rotate(k, cos, sin, c.rope.neox), v)
        x = x + _linear(model, block + "attn_output", a)
        h = _rms_norm(x, _vector(model, block + "ffn_norm.weight"), c.norm_eps)
        gate = _linear(model, block + "ffn_gate", h)
        x = x + _linear(model, block + "ffn_down", gate / (1 + np.exp(-gate)) * _linear(model, block + "ffn_up", h))
    h = _rms_norm(x, _vector(model, "output_norm.weight"), c.norm_eps)
    return h @ _matrix(model, "token_embd.weight" if c.tied else "output.weight").T


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


def _rotation(c, n, model):
    theta = c.rope.base ** (-np.arange(0, c.rope.dim, 2) / c.rope.dim)
    if c.rope.freq_factors:
        theta = theta / _vector(model, "rope_freqs.weight")
    angle = np.arange(n)[:, None, None] * theta
    return np.cos(angle), np.sin(angle)


def _rotate(x, cos, sin, neox) -> np.ndarray:
    half = cos.shape[-1]
    first, second = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def _attention(q, k, v) -> np.ndarray:
    n, heads, d = q.shape
    k, v = (np.repeat(t, heads // t.shape[1], axis=1) for t in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(d)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)
