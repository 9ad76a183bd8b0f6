"""Activation functions of feed-forward layers: y = f(gate) * up, of float32 values in registers."""

from functools import partial

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import exp2, maximum, minimum, rcp
from mlc_amd.schedules.operators.attention import LOG2E
from mlc_amd.schedules.operators.experts import CUT, LIMITED, SITU, numbers_of
from mlc_amd.schedules.tir import Expr

OAI_LIMIT, OAI_SLOPE = 7.0, 1.702  # of gpt-oss: transformers' GptOssExperts, llama.cpp's GGML_GLU_OP_SWIGLU_OAI


def _sigmoid(x: Expr, factor: float = 1.0) -> Expr:
    """1 / (1 + exp(-factor * x))"""
    return rcp(T.float32(1) + exp2(x * T.float32(-factor * LOG2E)))


def _gelu(x: Expr) -> Expr:
    """0.5 * x * (1 + tanh(z)), the approximation of GGML, which is x / (1 + exp(-2 * z))."""
    return x * _sigmoid(T.Bind(T.float32(0.79788456) * (x + T.float32(0.044715) * x * x * x)), 2)


def _relu_sq(x: Expr) -> Expr:
    x = maximum(x, T.float32(0))
    return x * x


def _swiglu_oai(gate: Expr, up: Expr) -> Expr:
    """g * sigmoid(1.702 * g) * (u + 1), both limited: gpt-oss."""
    gate = minimum(gate, T.float32(OAI_LIMIT))
    up = maximum(minimum(up, T.float32(OAI_LIMIT)), T.float32(-OAI_LIMIT))
    return gate * _sigmoid(gate, OAI_SLOPE) * (up + T.float32(1))


ACTIVATIONS = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "relu": lambda x: maximum(x, T.float32(0)),
    "relu_sq": _relu_sq,
}
GATED = {"swiglu_oai": _swiglu_oai, "gelu_alone": lambda gate, up: _gelu(gate)}  # not of the form f(gate) * up


def _limited(gate: Expr, up: Expr, limit: float, cut: bool = False) -> Expr:
    up, silu = maximum(minimum(up, T.float32(limit)), T.float32(-limit)), ACTIVATIONS["silu"]
    if cut:
        return minimum(T.Bind(silu(gate)), T.float32(limit)) * up
    return silu(minimum(gate, T.float32(limit))) * up


def _situ(gate: Expr, up: Expr, of_gate: float, of_up: float) -> Expr:
    """a * tanh(gate / a) * sigmoid(gate) * b * tanh(up / b), where a is of_gate and b is of_up; if b is 0, the factor
    is up instead of b * tanh(up / b)."""

    def bounded(x: Expr, bound: float) -> Expr:
        """bound * tanh(x / bound), by tanh(z) = 2 sigmoid(2z) - 1; x if bound is 0."""
        return T.Bind(_sigmoid(x, 2 / bound) * T.float32(2 * bound) - T.float32(bound)) if bound else x

    return bounded(gate, of_gate) * _sigmoid(gate) * bounded(up, of_up)


NUMBERED = {LIMITED: _limited, CUT: partial(_limited, cut=True), SITU: _situ}


def gated(act: str, gate: Expr, up: Expr) -> Expr:
    """The result of activation function `act`, in a register: f(gate) * up for those of ACTIVATIONS, otherwise that of
    GATED, or of NUMBERED with the numbers in the name. Raises ValueError for an unknown name."""
    kind, numbers = numbers_of(act)
    if numbers:
        return T.Bind(NUMBERED[kind](gate, up, *numbers))
    if act in GATED:
        return T.Bind(GATED[act](gate, up))
    if act not in ACTIVATIONS:
        raise ValueError(f"unknown activation {act!r}; known are {', '.join([*ACTIVATIONS, *GATED])}")
    return T.Bind(ACTIVATIONS[act](gate) * up)
