"""Activation functions of feed-forward layers: y = f(gate) * up, of float32 values in registers."""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import LOG2E
from mlc_amd.schedules.gpu.device import exp2, maximum, rcp


def _silu(x):
    """x / (1 + exp(-x))"""
    return x * rcp(T.float32(1) + exp2(x * T.float32(-LOG2E)))


def _gelu(x):
    """0.5 * x * (1 + tanh(z)), the approximation of GGML, which is x / (1 + exp(-2 * z))."""
    z = T.Bind(T.float32(0.79788456) * (x + T.float32(0.044715) * x * x * x))
    return x * rcp(T.float32(1) + exp2(z * T.float32(-2 * LOG2E)))


def _relu(x):
    return maximum(x, T.float32(0))


def _relu_sq(x):
    x = _relu(x)
    return x * x


ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "relu": _relu, "relu_sq": _relu_sq}


def gated(act_fn, gate, up):
    """f(gate) * up, in a register. ValueError for a name that ACTIVATIONS does not have."""
    if act_fn not in ACTIVATIONS:
        raise ValueError(f"unknown activation {act_fn!r}; known are {', '.join(ACTIVATIONS)}")
    return T.Bind(ACTIVATIONS[act_fn](gate) * up)
