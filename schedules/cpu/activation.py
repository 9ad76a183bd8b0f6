"""Activation functions of feed-forward layers, on vectors of float32.

`ACTIVATIONS`: name to f(x, isa, n), which gives the function of the `n` lanes of `x`, bound to a register.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.attention import LOG2E
from mlc_amd.schedules.cpu.vector import LANES, f32


def _times_sigmoid(x, t, isa, n):
    """x * sigmoid(t) = x / (1 + 2**(-t * log2(e)))."""
    return T.Bind(x / (f32(1.0, n) + isa.exp2(t * f32(-LOG2E, n), n)))


def silu(x, isa, n=LANES):
    """x * sigmoid(x)."""
    return _times_sigmoid(x, x, isa, n)


def gelu(x, isa, n=LANES):
    """GGML's tanh approximation 0.5 * x * (1 + tanh(u)), u = sqrt(2/pi) * (x + 0.044715 * x**3), as x * sigmoid(2u):
    the same function without cancellation for negative x."""
    x = T.Bind(x)
    u = f32(0.79788456, n) * (x + f32(0.044715, n) * x * x * x)
    return _times_sigmoid(x, f32(2.0, n) * u, isa, n)


def relu(x, isa, n=LANES):
    """max(x, 0)."""
    return T.Bind(T.max(x, f32(0.0, n)))


def relu_sq(x, isa, n=LANES):
    """max(x, 0)**2."""
    x = relu(x, isa, n)
    return T.Bind(x * x)


ACTIVATIONS = {"silu": silu, "gelu": gelu, "relu": relu, "relu_sq": relu_sq}
