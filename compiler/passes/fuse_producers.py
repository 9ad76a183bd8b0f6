"""Fusion passes whose rule looks at a call and at the calls that produce its arguments."""

from dataclasses import replace
from typing import cast

from mlc_amd.compiler import ops
from mlc_amd.compiler.passes.rewrite import rewrite
from mlc_amd.schedules.formats import FORMATS
from mlc_amd.schedules.operators import (
    Activate,
    CausalAttention,
    Combine,
    ExpertDown,
    ExpertGateUp,
    ExpertLinear,
    Gate,
    GateUp,
    Gather,
    HeadLinear,
    Linear,
    Norm,
    Quantize,
    RopeAttention,
    RopeKvWrite,
)

BLOCK = 32  # columns that share a scale
LINEARS = (Linear, HeadLinear, ExpertGateUp, ExpertLinear, ExpertDown)
ADDING = (Linear, ExpertDown, Combine)
QUANTIZING = (Activate, Norm, CausalAttention, Quantize, Gate, GateUp, Gather, ExpertGateUp)
BLOCKS = ("tiles", "rows")  # layouts of int8 blocks
# Relax's name of an activation function: its name in schedules
ACTIVATIONS = {"relax.nn.silu": "silu", "relax.nn.gelu_tanh": "gelu"}


def quantize_activations(mod, target):
    """Inserts `quantize` before every linear whose kernel does not take float32 activations, in the layout that the
    target's linears take."""

    def rule(call, producer):
        op = ops.operator_of(call)
        if not isinstance(op, LINEARS) or (isinstance(op, Linear) and op.exact):
            return None
        if isinstance(op, Linear | HeadLinear) and op.k % BLOCK:
            return None  # float weights; layouts consist of whole blocks
        formats = [FORMATS[fmt] for fmt in op.formats]
        if isinstance(op, Linear):
            layout = target.act_layout(op.m, formats[0].kind)
        elif isinstance(op, HeadLinear):
            layout = target.head_layout(op.m, formats[0].kind, op.k)
        else:
            layout = target.expert_layout(op.m, formats)
        if not layout:
            return None
        state, x, *rest = call.args
        m, k = ops.shape_of(x)
        quantized = ops.call(Quantize(m=m, k=k, layout=layout), [state, x])
        takes = replace(op, layout_in=layout) if isinstance(op, ExpertGateUp) else replace(op, layout=layout)
        return ops.call(takes, [state, quantized, *rest])

    return rewrite(mod, rule)


def fuse_gate_up(mod):
    """act(linear(h, gate)) * linear(h, up) becomes one `gate_up`, whose factors are never written to memory."""

    def rule(call, producer):
        if getattr(call.op, "name", "") != "relax.multiply":
            return None
        activated, up = (producer(arg) for arg in call.args)
        act = ACTIVATIONS.get(getattr(getattr(activated, "op", None), "name", ""))
        if act is None:
            return None
        gate = producer(activated.args[0])
        g, u = ops.operator_of(gate), ops.operator_of(up)
        if not (isinstance(g, Linear) and isinstance(u, Linear) and gate.args[1].same_as(up.args[1])):
            return None
        if g.biases[0] or u.biases[0]:
            return None
        state, x, gate_weight = gate.args
        ((gate_format, n),), ((up_format, _),) = g.segments, u.segments
        fused = GateUp(gate=gate_format, up=up_format, n=n, k=g.k, m=g.m, act=act, layout_in=g.layout, layout="")
        return ops.call(fused, [state, x, gate_weight, up.args[2]])

    return rewrite(mod, rule)


def fuse_residual(mod):
    """add(x, linear(h)) becomes a linear (or another operator of ADDING) with the residual x as its last argument."""

    def rule(call, producer):
        if getattr(call.op, "name", "") != "relax.add":
            return None
        for residual, other in (call.args, reversed(call.args)):
            linear = producer(other)
            op = ops.operator_of(linear)
            alike = ops.shape_of(residual) == ops.shape_of(call)
            single = not (isinstance(op, Linear) and len(op.segments) > 1)
            if alike and isinstance(op, ADDING) and not op.residual and single:
                return ops.call(replace(op, residual=True), [*linear.args, residual])
        return None

    return rewrite(mod, rule)


def fuse_quantize(mod, target):
    """quantize(f(x)) becomes f with a quantized result, where f is an activation or an operator of QUANTIZING. The
    heads of gates with a norm must be whole blocks. For layouts of int8 blocks, so must those of attention, and the
    target's attention kernels must support it."""

    def rule(call, producer):
        quantize = ops.operator_of(call)
        if not isinstance(quantize, Quantize) or quantize.rotation:
            return None
        value = producer(call.args[1])
        if act := ACTIVATIONS.get(getattr(getattr(value, "op", None), "name", "")):
            activate = Activate(act=act, k=quantize.k, m=quantize.m, layout=quantize.layout)
            return ops.call(activate, [call.args[0], value.args[0]])
        op = ops.operator_of(value)
        if not isinstance(op, QUANTIZING):
            return None
        if isinstance(op, Gate) and op.eps is not None and op.size % BLOCK:
            return None
        if isinstance(op, CausalAttention) and not _attends_in(op, quantize.layout, target):
            return None
        return ops.call(replace(op, layout=quantize.layout), value.args)

    return rewrite(mod, rule)


def _attends_in(op: CausalAttention, layout: str, target) -> bool:
    """Whether the kernel of this attention can write its result in the layout."""
    whole = op.layer.value_d % BLOCK == 0
    return not layout.startswith(BLOCKS) or (whole and target.attends_in_blocks(op.m > op.single))


def fuse_rotation(mod, target):
    """quantize(attention(x)) whose quantize multiplies by Hadamard matrices becomes an attention that multiplies by
    them itself; for single rows only, and for targets whose kernels can."""

    def rule(call, producer):
        op = ops.operator_of(call)
        if not isinstance(op, Quantize) or not op.rotation:
            return None
        value = producer(call.args[1])
        attention = ops.operator_of(value)
        if not isinstance(attention, CausalAttention) or attention.m != attention.single:
            return None
        if not target.rotates_back(op.rotation):
            return None
        return ops.call(replace(attention, layout=op.layout, back=True), value.args)

    return rewrite(mod, rule)


def fuse_rope(mod, target):
    """attention(rope_kv_write(q, k, v)) of single rows becomes one `rope_attention`, for targets whose decode attention
    applies RoPE itself. Not for latent attention, which has its own kernel for this, nor for attention whose heads are
    multiplied by Hadamard matrices."""

    def rule(call, producer):
        op = ops.operator_of(call)
        if not isinstance(op, CausalAttention) or not target.fuses_rope or op.m != op.single:
            return None
        if op.layer.values or op.layer.rotation:
            return None
        state, rows, pages, rotated, *rest = call.args
        caches = len(op.layer.cache)
        cache, rest = rest[:caches], rest[caches:]  # [sinks], workspace
        rope = producer(rotated)
        if isinstance(ops.operator_of(rope), RopeKvWrite):
            inputs = [*rope.args[2:], *cache]
        else:  # q is the first result of rope_kv_write, and the caches are its last arguments
            rope = producer(rope.tuple_value)
            inputs = rope.args[3:]
        rotation = cast(RopeKvWrite, ops.operator_of(rope)).rope
        fused = RopeAttention(layer=op.layer, rope=rotation, layout=op.layout, m=op.m)
        return ops.call(fused, [state, rows, pages, *inputs, *rest])

    return rewrite(mod, rule)
