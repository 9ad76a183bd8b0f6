"""The numpy references of `selftest`: weights are gguf-py's, activations come back from their layouts, and every
operator agrees with the kernels of the CPU and of Mesa's CPU driver in models that have all of them."""

import gguf_blocks
import numpy as np
import pytest
from act_layouts import in_pairs
from vulkan_harness import gpu

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import OPERATORS
from mlc_amd.tools.checks import selftest_kernels
from mlc_amd.tools.reference import activations, operators, plan
from mlc_amd.tools.reference.weights import rows_of

LAYOUTS = {"cpu": "tile16", "gpu": "rows"}  # of compiler/quant


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_gguf(fmt, layout):
    """Any rows, bit for bit."""
    planes, exact = gguf_blocks.weights(fmt, 48, 512, 3, LAYOUTS[layout])
    rows = np.array([0, 47, 5, 16, 31])
    np.testing.assert_array_equal(rows_of(layout, fmt, planes, rows), exact[rows])


@pytest.mark.parametrize("layout", ["rows", "tiles:4"])
def test_quantized_activations_come_back(layout):
    x, m = np.random.default_rng(0).standard_normal((7, 96)).astype(np.float32), 8
    shapes = {"rows": ((m, 3, 32), (m, 3, 4)), "tiles:4": ((2, 3, 4, 32), (2, 3, 8, 4))}[layout]
    arrays = {"A_out": np.zeros(shapes[0], np.int8), "S_out": np.zeros(shapes[1], np.float32)}
    activations.write(layout, x, arrays, "_out", np.arange(7))
    found = activations.read(layout, arrays, "_out")
    step = np.abs(x.reshape(7, 3, 32)).max(-1).repeat(32, -1) / 127
    assert found.shape == (m, 96) and (np.abs(found[:7] - x) <= 0.501 * step).all() and not found[7:].any()


def test_float16_activations_come_back():
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)
    np.testing.assert_array_equal(activations.in_layout("pairs", x), in_pairs(x))
    np.testing.assert_array_equal(activations.read("pairs", {"H": activations.in_layout("pairs", x)}), x)
    assert (activations.in_layout("pairs", np.full((1, 32), 1e9)) == activations.HALF_MAX).all()


def test_every_operator_has_a_reference():
    assert operators.OPERATORS.keys() == set(OPERATORS.values())


@pytest.mark.parametrize(
    ("name", "form", "kind", "arch"),
    [
        ("gpt-oss", "mxfp4", "cpu", "native"),  # biases, sinks, windows, experts
        ("starcoder2", "f16", "cpu", "native"),  # layer norms
        ("qwen35", "q8_0", "cpu", "native"),  # states of sequences, gates
        pytest.param("qwen3moe", "q4_k", "vulkan", "lavapipe", marks=pytest.mark.full),  # norms of heads
        pytest.param("qwen35", "q4_k", "vulkan", "lavapipe", marks=pytest.mark.full),
        pytest.param("kimi-linear", "q4_k", "cpu", "native", marks=pytest.mark.full),  # states that decay by channel
        pytest.param("deepseek4", "q8_0", "cpu", "native", marks=pytest.mark.full),  # compressed keys
        pytest.param("hy_v4", "q8_0", "cpu", "native", marks=pytest.mark.full),  # sinks of chosen keys
        pytest.param("kimi-k3", "q8_0", "cpu", "native", marks=pytest.mark.full),  # activations with numbers
        pytest.param("minimax-m3", "q8_0", "cpu", "native", marks=pytest.mark.full),  # blocks of keys of each head
        pytest.param("qwen4exp", "q8_0", "cpu", "native", marks=pytest.mark.full),  # blocks of keys
    ],
)
def test_kernels_agree(compiled_for, name, form, kind, arch):
    if kind == "vulkan":
        gpu("llvmpipe")
    made = Artifact.open(compiled_for(kind, arch, (name, form), 64))
    code = made.manifest["target"]["arch"]
    found = list(selftest_kernels.check_all(made, code, "2" if kind == "cpu" else None, runs=2))
    assert sorted(one["kernel"] for one in found) == sorted(entry["name"] for entry in made.manifest["kernels"])
    assert [one for one in found if one["problem"]] == []
    assert all(one["deviation"] < 0.5 for one in found if "note" not in one)
    if kind == "cpu":  # a step of all rows, by kernels and by numpy
        unknown = plan.without_reference(made)
        assert {one["kernel"] for one in found if "note" in one} == set(unknown)
