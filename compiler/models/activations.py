"""Activation functions as Relax operators, by the names that configurations use."""

from typing import Any

from tvm import relax

OPS: Any = relax.op  # Any: TVM declares that arguments must be expressions, but accepts numbers too


def _relu_sq(x):
    return OPS.power(OPS.nn.relu(x), relax.const(2.0, "float32"))


def _quick_gelu(x):
    return OPS.multiply(x, OPS.sigmoid(OPS.multiply(x, relax.const(1.702, "float32"))))


# the values of FeedForwardConfig.act and VisionConfig.act
ACTIVATIONS = {
    "silu": relax.op.nn.silu, "gelu": relax.op.nn.gelu_tanh, "relu_sq": _relu_sq, "gelu_erf": relax.op.nn.gelu,
    "quick_gelu": _quick_gelu, "tanh": relax.op.tanh,
}  # fmt: skip
