"""The table of operators against the kernels: each kernel's parameters are those of its operator, in order."""

import json
from dataclasses import replace

import architectures
import encoders
import pytest
from samples import sample

from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.lowering import lower
from mlc_amd.compiler.models.shards import ShardedModel
from mlc_amd.compiler.work import buffers
from mlc_amd.schedules.cpu import registry as on_cpu
from mlc_amd.schedules.gpu import registry as on_gpu
from mlc_amd.schedules.operators import (
    OPERATORS,
    CausalAttention,
    DeltaNet,
    Linear,
    NormRoute,
    RopeAttention,
    costs,
    from_json,
    parameters,
)
from mlc_amd.schedules.operators.attention import Attention

LINEAR = Linear(segments=(("q4_0", 40), ("q6_k", 8)), k=256, m=4, layout="rows", biases=(False, True))
BUFFERS = [
    ("state", (4,), "int32"),
    ("A", (4, 8, 32), "int8"),
    ("S", (4, 8, 4), "float32"),
    ("W0_Q4", (48, 128), "uint8"),
    ("W0_D", (48, 8), "float16"),
    ("W1_Q4", (16, 128), "uint8"),
    ("bias1", (16,), "float32"),
    ("Y0", (4, 48), "float32"),
    ("Y1", (4, 16), "float32"),
]


TARGETS = [("cpu", "x86-64-v3"), ("vulkan", "generic"), ("rocm", "gfx1100")]  # the last two have the same operators


@pytest.mark.parametrize(("kind", "arch"), sample(TARGETS, TARGETS[:2]))
def test_every_kernel_has_the_parameters_of_its_operator(kind, arch):
    backend, seen = make_target(kind, arch), set()
    models = [("qwen3", "q4_k"), ("starcoder2", "f16"), ("llama4", "f16"), ("qwen35", "f16"), ("deepseek2", "q4_0")]
    models += [("mamba2", "f16"), ("kimi-linear", "f16"), ("deepseek32", "f16"), ("deepseek4", "f16")]
    for name, form in models:
        lower(architectures.tiny(name, form), backend, 64)
    lower(encoders.tiny("bert"), backend, 64)
    lower(ShardedModel(architectures.tiny("qwen2", "f16"), 2), backend, 64)
    for name, workload in backend.workloads.items():
        found = parameters(workload, buffers(backend.kernels[name]))
        seen.add(workload.name)
        assert from_json(json.loads(workload.text)) == workload
        assert found[0].role == "state" and found[-1].role in ("output", "work")
        roles = [param["role"] for param in backend.facts(name)["params"]]
        assert roles == [param.role for param in found]
    of_gpus = {"norm_route", "rope_attention"}
    assert seen >= OPERATORS.keys() - {"quantize"} - (of_gpus if kind == "cpu" else set())


def test_parameters_in_their_order():
    found = parameters(LINEAR, BUFFERS)
    assert [param.role for param in found] == ["state", *["input"] * 2, *["weight"] * 4, *["output"] * 2]
    assert [param.slot.matrix for param in found[3:7]] == [("q4_0", 256), ("q4_0", 256), ("q6_k", 256), None]
    assert [param.slot.columns for param in found[-2:]] == [40, 8]


@pytest.mark.parametrize("wrong", [[*BUFFERS, ("Y2", (4, 16), "float32")], BUFFERS[:3] + BUFFERS[5:], BUFFERS[1:]])
def test_other_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match="linear: "):
        parameters(LINEAR, wrong)


def test_costs_of_a_linear_layer():
    found = costs(LINEAR, parameters(LINEAR, BUFFERS))
    weights = 48 * 128 + 48 * 8 * 2 + 16 * 128 + 16 * 4
    activations = 4 * 8 * 32 + 4 * 8 * 4 * 4 + 4 * 64 * 4
    assert (found.weights, found.activations, found.rows, found.position) == (weights, activations, 0, 0)
    assert found.bytes(4, 100) == weights + activations
    assert found.operations(4, 100) == 2 * 4 * 256 * 48


def test_costs_of_attention_with_a_window():
    op = CausalAttention(layer=Attention(4, 2, 64, 1024, window=128), m=4, single=0, layout="")
    cache = [(name, (16, 2, 64, 64), "float16") for name in ("Kc", "Vc")]
    tables = [("rows", (4, 2), "int32"), ("pages", (64, 16), "int32")]
    buffers = [("state", (4,), "int32"), *tables, ("Qo", (4, 4, 64), "float16"), *cache, ("X", (4, 256), "float32")]
    found = costs(op, parameters(op, buffers))
    assert found.position == 2 * 2 * 64 * 2
    assert found.bytes(4, 1000) - found.bytes(4, 0) == 128 * found.position
    assert found.operations(2, 1000) == 2 * 128 * 4 * 4 * 64
    op = replace(op, layer=replace(op.layer, window=0))
    whole = costs(op, parameters(op, buffers))
    assert whole.operations(2, 1000) == (1001 + 1002) * 4 * 4 * 64
    # three sequences of 1000 tokens: two single rows, and a chunk of one row
    assert whole.bytes(3, 1000, 2) - whole.bytes(3, 0, 2) == 3 * 1000 * whole.position
    assert whole.operations(3, 1000, 2) == 3 * 1001 * 4 * 4 * 64


def test_costs_of_a_delta_net():
    """Of any number of cells, a call moves those of one sequence, there and back."""
    op = DeltaNet(key_heads=2, value_heads=4, d=32, single=1, m=1, grouped=False, eps=1e-6)
    buffers = [
        ("state", (4,), "int32"), ("rows", (1, 2), "int32"), ("cells", (64, 9), "int32"), ("X", (1, 256), "float32"),
        ("Beta", (1, 16), "float32"), ("Alpha", (1, 16), "float32"), ("A", (16,), "float32"), ("Dt", (16,), "float32"),
        ("States", (64, 4, 32, 32), "float32"), ("Y", (1, 128), "float32"),
    ]  # fmt: skip
    found = costs(op, parameters(op, buffers))
    assert found.bytes(1, 100) == 2 * 4 * 32 * 32 * 4 + 2 * 16 * 4 + found.activations
    assert found.operations(1, 100) == 8 * 4 * 32 * 32


@pytest.mark.parametrize("target", [on_cpu, on_gpu])
def test_every_operator_has_a_builder(target):
    only_gpu = {NormRoute, RopeAttention} if target is on_cpu else set()
    assert (
        target.builders.keys() == set(OPERATORS.values()) - only_gpu and target.spaces.keys() <= target.builders.keys()
    )


@pytest.mark.parametrize(
    "wrong",
    [{"op": "lineal", "args": {}}, {"op": "quantize", "args": {"k": 32, "m": 1}},
     {"op": "quantize", "args": {"k": "32", "m": 1, "layout": ""}},
     {"op": "attention", "args": {"m": 1, "single": 1, "layout": "", "layer": {"heads": 4}}}],
)  # fmt: skip
def test_json_that_is_no_operator_is_refused(wrong):
    with pytest.raises(ValueError, match=wrong["op"]):
        from_json(wrong)


def test_a_key_does_not_depend_on_the_capacity():
    op = CausalAttention(layer=Attention(4, 2, 64, 1024), m=4, single=0, layout="")
    longer = replace(op, layer=replace(op.layer, ctx=4096))
    assert op.key == longer.key and op.text != longer.text
    assert op.key != replace(op, layer=replace(op.layer, sinks=True)).key
