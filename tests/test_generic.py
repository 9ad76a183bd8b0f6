"""Operators without a kernel of their own: fused with one another, compiled and right on every target."""

import math

import numpy as np
import pytest
from relax_kernels import compiled, execute, module
from tvm import relax
from vulkan_harness import gpu

R = relax.op
RNG = np.random.default_rng
TARGETS = [
    ("cpu", "native"),
    ("cpu", "x86-64-v2"),
    ("vulkan", "lavapipe"),
    ("vulkan", "generic"),
    ("rocm", "gfx1100"),
    ("rocm", "gfx942"),
]


@pytest.fixture(params=TARGETS, ids="-".join)
def target(request):
    kind, arch = request.param
    if kind == "vulkan":
        gpu()
    if kind == "rocm":
        request.getfixturevalue("emulator")
    return kind, arch


def run(target, tmp_path, inputs, body, shape, dtype="float32"):
    """(result, kernels' names) of a function on a target."""
    made = compiled(module(inputs, body), inputs, *target, tmp_path)
    return execute(made, inputs, shape, dtype), made.names


def normal(*shape, seed=0, scale=1.0):
    return (RNG(seed).standard_normal(shape) * scale).astype(np.float32)


def chain(bb, *steps):
    """The last of `steps`, each a function of what the one before gave."""
    value = None
    for step in steps:
        value = bb.emit(step(value))
    return value


def float_const(x):
    return relax.const(x, "float32")


def softcap(bb, x):
    """tanh(x * 0.3) * 7: of two constants, so that no simplification joins them."""
    return chain(
        bb,
        lambda _: R.multiply(x, float_const(0.3)),
        R.tanh,
        lambda y: R.multiply(y, float_const(7.0)),
    )


def softcap_reference(x):
    return np.tanh(x.astype(np.float64) * 0.3) * 7


@pytest.mark.parametrize("shape", [(1, 1024), (5, 37), (3, 515)])
def test_a_chain_is_one_kernel(target, shape, tmp_path):
    x = normal(*shape, scale=5)
    got, names = run(target, tmp_path, {"x": x}, softcap, shape)
    assert names == [f"multiply_tanh_multiply_{shape[1]}_m{shape[0]}"]
    np.testing.assert_allclose(got, softcap_reference(x), rtol=2e-6, atol=7e-6)


@pytest.mark.parametrize("shape", [(1, 1024), (5, 37), (3, 515)])
def test_row_maximum(target, shape, tmp_path):
    x = normal(*shape, scale=5)
    got, names = run(target, tmp_path, {"x": x}, lambda bb, x: R.max(softcap(bb, x), axis=-1), shape[:1])
    assert len(names) <= 2
    np.testing.assert_allclose(got, softcap_reference(x).max(-1), rtol=2e-6, atol=7e-6)
