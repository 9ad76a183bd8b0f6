"""Fusion on the real models: which operators are left, and that each fusion happens only where it may."""

from collections import Counter

import architectures
import pytest
from tvm import relax

from mlc_amd.compiler import ops
from mlc_amd.compiler.codegen.cpu import CpuTarget
from mlc_amd.compiler.codegen.rocm_target import RocmTarget
from mlc_amd.compiler.codegen.vulkan_target import VulkanTarget
from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.models.build import build_module
from mlc_amd.compiler.models.shards import ShardedModel
from mlc_amd.compiler.passes import fuse
from mlc_amd.schedules.gpu.linear.norm_place import LANES_ROWS
from mlc_amd.schedules.operators import (
    AllReduce,
    CausalAttention,
    GateUp,
    Linear,
    Operator,
    RmsNorm,
    RopeAttention,
    RopeKvWrite,
)


def operators(model, m: int = 1, target=None) -> tuple[Counter, list]:
    """Operator counts and calls of the fused function of m tokens, by default on the CPU."""
    target = target or CpuTarget("x86-64-v3")
    module, _ = build_module(model, target, [FunctionSpec("main", m, int(m == 1), "last")], 64)
    calls = [
        b.value
        for block in fuse(module, target)["main"].body.blocks
        for b in block.bindings
        if isinstance(b.value, relax.Call)
    ]
    return Counter(op.name if (op := ops.operator_of(call)) else call.op.name for call in calls), calls


def of(calls, *kinds) -> list:
    """The operators of these kinds."""
    return [op for call in calls if isinstance(op := ops.operator_of(call), kinds)]


@pytest.mark.parametrize("spec", ["tiny:q4_0", "tiny-qwen2:q4_k", "tiny-qwen3:q6_k"])
@pytest.mark.parametrize("m", [1, 64])
def test_a_layer_is_eight_operators(spec, m):
    model = synthetic(spec)
    counts, calls = operators(model, m)
    layers = len(model.config.layers)
    assert counts == {
        "embed": 1, "rms_norm": 2 * layers + 1, "linear": 3 * layers + 1, "rope_kv_write": layers, "attention": layers,
        "gate_up": layers, "sample": 1,
    }  # fmt: skip
    fused = [op for op in of(calls, Linear) if len(op.segments) == 3]
    assert len(fused) == layers
    assert fused[0].biases == (model.config.architecture == "qwen2",) * 3


def test_norms_in_the_kernels_behind_them():
    """Of one token, where a launch costs more than a norm in every workgroup: five operators a layer."""
    model, target = synthetic("tiny:q4_0"), VulkanTarget("nvidia")
    counts, calls = operators(model, target=target)
    layers = len(model.config.layers)
    assert counts == {
        "embed": 1, "rms_norm": 1, "linear": 3 * layers + 1, "rope_attention": layers, "gate_up": layers,
        "sample": 1,
    }  # fmt: skip
    assert sum(op.eps is not None for op in of(calls, Linear, GateUp)) == 2 * layers
    # a chunk's last norm is of its last row, and so stays
    several, more = operators(model, 8, target)[0], operators(model, LANES_ROWS + 64, target)[0]
    assert (several["rms_norm"], more["rms_norm"]) == (2, 2 * layers + 1)


@pytest.mark.parametrize(("kind", "arch"), [(RocmTarget, "gfx1100"), (VulkanTarget, "nvidia")])
def test_norms_that_linears_prepare_and_complete(kind, arch):
    """Each one is scaled like the norm before it: the first one's scales come from its own kernel."""
    model, target = synthetic("tiny:q4_0"), kind(arch)
    _, calls = operators(model, 8, target)
    first, *others = of(calls, RmsNorm)
    assert first.scale_out and not any(op.scale_out for op in others)
    layers = len(model.config.layers)
    assert sum(op.norm_in is not None for op in of(calls, Linear, GateUp)) == 2 * layers - 1
    prepared = [op for op in of(calls, Linear) if op.norm_out]
    assert len(prepared) == 2 * layers - 1 and all(op.residual for op in prepared)
    others = of(operators(model, 8, VulkanTarget("lavapipe"))[1], Linear)
    assert others and all(op.norm_in is None for op in others)


@pytest.mark.parametrize(("kind", "arch"), [(RocmTarget, "gfx1030"), (VulkanTarget, "vangogh")])
def test_norms_that_int8_blocks_hold(kind, arch):
    """They have scales of their own: five operators a layer. The first norm has no linear before it."""
    model = synthetic("tiny:q4_0")
    counts, calls = operators(model, 8, kind(arch))
    layers = len(model.config.layers)
    assert (counts["rms_norm"], counts["linear"], counts["gate_up"]) == (2, 3 * layers + 1, layers)
    assert not any(op.scale_out for op in of(calls, RmsNorm)) and not counts["quantize"]
    prepared = [op for op in of(calls, Linear) if op.norm_out]
    assert len(prepared) == 2 * layers - 1 and {op.norm_out for op in prepared} == {"rows"}
    assert sum(op.norm_in is not None for op in of(calls, Linear, GateUp)) == len(prepared)


@pytest.mark.parametrize("m", [1, 8])
def test_norms_that_sums_of_several_gpus_prepare(m):
    """All but the first, whose input is an embedding, and that of the last row."""
    model = ShardedModel(synthetic("tiny:q4_0"), 2)
    _, calls = operators(model, m, VulkanTarget("nvidia"))
    sums, layers = of(calls, AllReduce), len(model.config.layers)
    assert [op.norm_out for op in sums] == ["rows" if m == 1 else "lanes:4"] * (2 * layers - 1) + [""]
    assert sum(op.norm_in is not None for op in of(calls, Linear, GateUp)) == 2 * layers - 1
    assert not any(op.norm_out for op in of(calls, Linear))


def test_a_norm_that_a_router_reads_is_not_deferred():
    _, calls = operators(architectures.tiny("qwen3moe", "q4_k"), 8, VulkanTarget("nvidia"))
    assert not any(op.norm_out for op in of(calls, Linear))


def test_a_norm_that_others_read_stays_a_kernel():
    """Of experts: their router reads it in float32."""
    _, calls = operators(architectures.tiny("qwen3moe", "q4_k"), target=VulkanTarget("nvidia"))
    assert all(op.eps is None for op in of(calls, GateUp))


def test_rows_rotate_in_their_attention():
    """Where all rows of a step may be single ones; a chunk's are rotated apart."""
    model, target = synthetic("tiny:q4_0"), VulkanTarget("rdna3")
    module, _ = build_module(model, target, [FunctionSpec("s", 8, 8, "all"), FunctionSpec("c", 64, 0, "last")], 64)
    for name, fused in (("s", True), ("c", False)):
        calls = [b.value for block in fuse(module, target)[name].body.blocks for b in block.bindings]
        assert bool(of(calls, RopeAttention)) == fused and bool(of(calls, RopeKvWrite)) != fused


def test_heads_that_are_not_whole_blocks_are_quantized_apart():
    head = {"attention.key_length": 48, "attention.value_length": 48, "rope.dimension_count": 48}
    model = synthetic("tiny:q4_0", keys=head)
    counts, calls = operators(model)
    assert counts["quantize"] == counts["attention"] == len(model.config.layers)
    assert all(op.layout == "" for op in of(calls, CausalAttention))


def test_layers_that_read_the_cache_of_another_one_write_none():
    counts, calls = operators(architectures.tiny("gemma4"), target=VulkanTarget("generic"))
    assert counts["rope_attention"] == 4 and not counts["rope_kv_write"]
    attends = [call for call in calls if isinstance(ops.operator_of(call), RopeAttention)]
    assert [op.rope.writes for op in of(calls, RopeAttention)] == [True, True, False, False]
    caches = [[arg.name for arg in call.args if arg.name[:2] in ("k.", "v.")] for call in attends]
    assert caches == [["k.0", "v.0"], ["k.1", "v.1"]] * 2


def test_layers_with_a_state_beside_attention():
    """A delta net and its output gate are five operators; attention decodes in one, as elsewhere."""
    counts, calls = operators(architectures.tiny("qwen35", "q4_k"), target=VulkanTarget("generic"))
    assert counts == {
        "embed": 1, "rms_norm": 5, "linear": 7, "causal_conv": 1, "delta_net": 1, "gate": 2, "rope_attention": 1,
        "gate_up": 2, "sample": 1,
    }  # fmt: skip
    inputs = [len(op.segments) for op in of(calls, Linear)]
    assert inputs.count(4) == 2  # qkv, gate, beta and alpha; q, its gate, k and v


def test_states_that_decay_by_channel():
    """One launch for all that such a layer makes of its input, one for its three convolutions; attention without
    rotation has no table."""
    _, calls = operators(architectures.tiny("kimi-linear", "q4_k"), target=VulkanTarget("generic"))
    counts = Counter(op.name for op in of(calls, Operator))
    names = "causal_conv", "channel_decay", "delta_net", "gate", "latent_kv_write", "attention"
    assert [counts[name] for name in names] == [3, 3, 3, 3, 1, 1]
    assert [len(op.segments) for op in of(calls, Linear)].count(6) == 3
    assert not any(arg.name.endswith(".table") for call in calls for arg in call.args if isinstance(arg, relax.Var))


def test_float_weights_take_float_activations():
    counts, calls = operators(synthetic("tiny:f16"))
    assert "quantize" not in counts
    assert all(op.layout_read == getattr(op, "layout", "") == "" for op in of(calls, Operator))


def test_mixed_kinds_share_one_quantization():
    """k in float, q and v in integers: one norm in float, one quantization, q and v fused, k alone."""
    model = synthetic("tiny:q4_0")
    for layer in range(len(model.config.layers)):
        model.tensors[f"blk.{layer}.attn_k.weight"] = synthetic("tiny:f16").tensors[f"blk.{layer}.attn_k.weight"]
    _, calls = operators(model)
    siblings = [op.formats for op in of(calls, Linear)]
    assert siblings.count(["q4_0", "q4_0"]) == len(model.config.layers)
    assert siblings.count(["f16"]) == len(model.config.layers)


def test_gate_and_up_of_different_kinds_stay_apart():
    model = synthetic("tiny:q4_0")
    for layer in range(len(model.config.layers)):
        model.tensors[f"blk.{layer}.ffn_gate.weight"] = synthetic("tiny:f32").tensors[f"blk.{layer}.ffn_gate.weight"]
    counts, _ = operators(model)
    assert counts["gate_up"] == 0
    assert counts["relax.nn.silu"] == counts["relax.multiply"] == len(model.config.layers)


@pytest.mark.parametrize(("arch", "layout"), [("nvidia", ""), ("rdna2", "rows")])
def test_chunks_on_matrix_units_produce_no_blocks(arch, layout):
    """Even where what reads them, matrices too small for these units, takes int8 blocks."""
    model = architectures.tiny("deepseek2", "q4_k")
    _, calls = operators(model, 64, VulkanTarget(arch))
    assert {op.layout for op in of(calls, CausalAttention)} == {layout}
