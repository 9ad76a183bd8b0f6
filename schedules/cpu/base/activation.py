"""Activation functions of feed-forward layers.

`activation(name)` returns a function f(gate, up, isa, n), which returns act(gate) * up. gate, up and the result are
float32 vectors of `n` lanes; isa is an instruction set of arch.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.base.vector import LANES, f32
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.operators.experts import CUT, LIMITED, SITU, numbers_of

OAI_LIMIT, OAI_SLOPE = 7.0, 1.702  # constants of gpt-oss


def times_sigmoid(x, t, isa, n):
    """x * sigmoid(t) = x / (1 + 2**(-t * log2(e)))."""
    return T.Bind(x / (f32(1.0, n) + isa.exp2(t * f32(-LOG2E, n), n)))


def silu(gate, up, isa, n=LANES):
    """gate * sigmoid(gate) * up."""
    return times_sigmoid(gate, gate, isa, n) * up


def gelu(gate, up, isa, n=LANES):
    """gelu(gate) * up, in GGML's tanh approximation: gelu(x) = 0.5 * x * (1 + tanh(u)), u = sqrt(2/pi) * (x + 0.044715
    * x**3). It is computed as x * sigmoid(2u), the same function without cancellation for negative x."""
    x = T.Bind(gate)
    u = f32(0.79788456, n) * (x + f32(0.044715, n) * x * x * x)
    return times_sigmoid(x, f32(2.0, n) * u, isa, n) * up


def relu(gate, up, isa, n=LANES):
    """max(gate, 0) * up."""
    return T.Bind(T.max(gate, f32(0.0, n))) * up


def relu_sq(gate, up, isa, n=LANES):
    """max(gate, 0)**2 * up."""
    x = T.Bind(T.max(gate, f32(0.0, n)))
    return T.Bind(x * x) * up


def swiglu_oai(gate, up, isa, n=LANES):
    """gpt-oss: g * sigmoid(1.702 g) * (u + 1), g = min(gate, 7) and u = up clamped to -7 .. 7."""
    g = T.Bind(T.min(gate, f32(OAI_LIMIT, n)))
    u = T.Bind(T.max(T.min(up, f32(OAI_LIMIT, n)), f32(-OAI_LIMIT, n)))
    return times_sigmoid(g, f32(OAI_SLOPE, n) * g, isa, n) * (u + f32(1.0, n))


def silu_limited(limit, cut):
    """silu(min(gate, limit)) * u, or with `cut` min(silu(gate), limit) * u, where u = up clamped to -limit .. limit."""

    def activate(gate, up, isa, n=LANES):
        u = T.Bind(T.max(T.min(up, f32(limit, n)), f32(-limit, n)))
        if cut:
            return T.Bind(T.min(silu(gate, f32(1.0, n), isa, n), f32(limit, n))) * u
        return silu(T.Bind(T.min(gate, f32(limit, n))), u, isa, n)

    return activate


def situ(gate_bound, up_bound):
    """a tanh(gate / a) sigmoid(gate) * b tanh(up / b), with a = gate_bound and b = up_bound; a bound of 0 means no
    tanh."""

    def bounded(x, bound, isa, n):
        """bound * tanh(x / bound), computed by tanh(z) = 2 sigmoid(2z) - 1; x if bound is 0."""
        t = T.Bind(x * f32(2.0 / bound, n))
        return T.Bind(times_sigmoid(f32(2.0 * bound, n), t, isa, n) - f32(bound, n)) if bound else x

    def activate(gate, up, isa, n=LANES):
        return times_sigmoid(bounded(gate, gate_bound, isa, n), gate, isa, n) * bounded(up, up_bound, isa, n)

    return activate


def activation(act):
    """The function of an activation's name, which may end in numbers (schedules/operators/experts.py)."""
    kind, numbers = numbers_of(act)
    return NUMBERED[kind](*numbers) if numbers else ACTIVATIONS[act]


def gelu_alone(gate, up, isa, n=LANES):
    """gelu(gate), for experts without a gate: up is not read."""
    return gelu(gate, f32(1.0, n), isa, n)


NUMBERED: dict[str, Callable[..., Any]] = {
    LIMITED: partial(silu_limited, cut=False), CUT: partial(silu_limited, cut=True), SITU: situ,
}  # fmt: skip
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": silu, "gelu": gelu, "gelu_alone": gelu_alone, "relu": relu, "relu_sq": relu_sq, "swiglu_oai": swiglu_oai,
}  # fmt: skip
