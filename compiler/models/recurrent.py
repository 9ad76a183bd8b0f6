"""Emits mixers that keep a state for each sequence. In: a layer's normed rows. Out: the terms that are added to the
residual stream.

    short_conv  W_out (C * conv(B * X))     [B, C, X] = W_in h
    mamba2      W_out norm(scan(silu(conv(W_x h)), W_dt h) * silu(W_z h))
    delta_net   W_out (norm(delta(silu(conv(W_qkv h)))) * silu(W_gate h))
    mamba       W_out (scan(silu(conv(W_x h)), softplus(W_dt ..)) * silu(W_z h))
    linear_attention   W_out (norm(scan(silu(W_qkv h))) * sigmoid(W_gate h))
    channel_delta   W_out (norm(delta(silu(conv(W_q h, W_k h, W_v h)))) * sigmoid(W_g W_g' h))
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tvm import relax

from mlc_amd.compiler.models.recurrent_config import (
    NORMS,
    ChannelDeltaConfig,
    DeltaNetConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MambaConfig,
    ShortConvConfig,
)
from mlc_amd.schedules.operators import CausalConv, ChannelDecay, DeltaNet, SsmScan
from mlc_amd.schedules.operators.layouts import padded

if TYPE_CHECKING:
    from mlc_amd.compiler.models.graph import Graph

OPS: Any = relax.op


def causal_conv(g: Graph, x: list, names: list[str], layer: int, gated: bool = False, act: str = ""):
    """The convolution of each column over the last positions of its sequence, then an activation. x: the inputs, whose
    results are concatenated. gated: x is [B, C, X], and the result C * conv(B * X). names: of the weight of each input,
    without ".weight"; a bias of the same name is added."""
    shapes = [g.model.tensors[f"{name}.weight"].shape for name in names]
    weights = [g.vector(f"{name}.weight") for name in names]
    biases = [g.vector(f"{name}.bias") for name in names if g.has(f"{name}.bias")]
    op = CausalConv(
        channels=sum(prod(shape[:-1]) for shape in shapes), taps=shapes[0][-1], single=g.spec.single, m=g.m,
        gated=gated, act=act, bias=bool(biases), parts=len(names),
    )  # fmt: skip
    return g.run(op, [*x, *weights, *biases], layer, "conv")


def short_conv(g: Graph, h, i: int) -> list:
    block = f"blk.{i}.shortconv."
    y = causal_conv(g, [g.linear(h, block + "in_proj.weight")], [block + "conv"], i, gated=True)
    return [g.linear(y, block + "out_proj.weight")]


def delta_net(g: Graph, h, i: int) -> list:
    d, block = g.config.layers[i].mixer, f"blk.{i}."
    assert isinstance(d, DeltaNetConfig)
    qkv, gate, beta, alpha = (
        g.linear(h, f"{block}{name}.weight") for name in ("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha")
    )
    x = causal_conv(g, [qkv], [block + "ssm_conv1d"], i, act="silu")
    factors = [g.vector(block + name) for name in ("ssm_a", "ssm_dt.bias")]
    op = DeltaNet(
        key_heads=d.key_heads, value_heads=d.value_heads, d=d.head_dim, single=g.spec.single, m=g.m, grouped=d.grouped,
        eps=g.config.norm_eps,
    )  # fmt: skip
    y = g.run(op, [x, beta, alpha, *factors], i, "delta")
    y = g.gate(y, gate, d.head_dim, silu=not d.sigmoid, norm=block + "ssm_norm.weight")
    return [g.linear(y, block + "ssm_out.weight")]


def channel_delta(g: Graph, h, i: int) -> list:
    d, block = g.config.layers[i].mixer, f"blk.{i}."
    assert isinstance(d, ChannelDeltaConfig)
    names = [*(f"attn_{which}" for which in "qkv"), "ssm_beta", d.decays[0], d.gates[0]]
    *qkv, beta, decay, gate = (g.linear(h, f"{block}{name}.weight") for name in names)
    x = causal_conv(g, qkv, [f"{block}ssm_conv1d_{which}" for which in "qkv"], i, act="silu")
    for name in d.decays[1:]:
        decay = g.linear(decay, f"{block}{name}.weight")
    for name in d.gates[1:]:
        gate = g.linear(gate, f"{block}{name}.weight")
    if d.bound:
        decay = bounded_decay(g, decay, d, block)
    else:
        factors = [g.vector(block + name) for name in ("ssm_a", "ssm_dt.bias")]
        decay = g.emit(ChannelDecay(heads=d.heads, d=d.head_dim, m=g.m), [decay, *factors])
    op = DeltaNet(
        key_heads=d.heads, value_heads=d.heads, d=d.head_dim, single=g.spec.single, m=g.m, grouped=False,
        eps=g.config.norm_eps, by_channel=True,
    )  # fmt: skip
    y = g.run(op, [x, beta, decay], i, "delta")
    y = g.gate(y, gate, d.head_dim, norm=block + "ssm_norm.weight")
    return [g.linear(y, block + "attn_output.weight")]


def bounded_decay(g: Graph, x, d: ChannelDeltaConfig, block: str):
    """exp(bound * sigmoid(sign * ssm_a * (x + ssm_dt))), for each column."""
    x = g.bb.emit(OPS.add(g.columns(x, 0, d.columns), g.vector(block + "ssm_dt.bias", exact=True)))
    factors = g.bb.emit(OPS.reshape(g.vector(block + "ssm_a", exact=True), (d.heads, 1)))
    y = g.multiply(g.bb.emit(OPS.reshape(x, (g.m, d.heads, d.head_dim))), factors)
    y = g.scaled(y, d.sign) if d.sign != 1.0 else y
    y = g.bb.emit(OPS.exp(g.scaled(g.bb.emit(OPS.sigmoid(y)), d.bound)))
    return g.bb.emit(OPS.reshape(y, (g.m, d.columns)))


def mamba2(g: Graph, h, i: int) -> list:
    s, block = g.config.layers[i].recurrent, f"blk.{i}."
    assert isinstance(s, Mamba2Config)
    z, x, dt = (g.linear(h, f"{block}ssm_in_{which}.weight") for which in ("z", "x", "dt"))
    x = causal_conv(g, [x], [block + "ssm_conv1d"], i, act="silu")
    factors = [g.vector(block + name) for name in ("ssm_a", "ssm_d", "ssm_dt.bias")]
    op = SsmScan(heads=s.heads, d=s.head_dim, size=s.state, groups=s.groups, single=g.spec.single, m=g.m)
    y = g.run(op, [x, z, dt, *factors], i, "ssm")
    if s.norm_eps:
        y = g.group_norm(y, block + "ssm_norm.weight", s.groups, s.norm_eps)
    return [g.linear(y, block + "ssm_out.weight")]


def mamba(g: Graph, h, i: int) -> list:
    s, block = g.config.layers[i].mixer, f"blk.{i}."
    assert isinstance(s, MambaConfig)
    x, z = (g.linear(h, f"{block}ssm_in_{which}.weight") for which in "xz")
    x = causal_conv(g, [x], [block + "ssm_conv1d"], i, act="silu")
    made, sizes = g.linear(x, block + "ssm_x.weight"), {"dt": s.rank, "b": s.state, "c": s.state}
    parts, first = {}, 0
    for which in ("b", "c", "dt") if s.heads else ("dt", "b", "c"):
        part = g.columns(made, first, sizes[which])
        first += sizes[which]
        if s.norms:
            name = f"{block}ssm_{which}_norm{NORMS.get(s.norms, '')}"
            weight = g.vector(name, exact=True) if s.norms in NORMS else g.ones(sizes[which])
            part = g.bb.emit(OPS.nn.rms_norm(part, weight, -1, g.config.norm_eps))
        parts[which] = part
    rank, heads = g.model.tensors[block + "ssm_dt.weight"].shape[1], s.heads or 1
    t = parts["dt"]
    if rank > s.rank:
        t = g.joined(t, g.bb.emit(OPS.zeros((g.m, rank - s.rank), "float32")))
    dt = g.bb.emit(OPS.nn.softplus(g.linear(t, block + "ssm_dt.weight")))
    joined = g.joined(g.joined(x, parts["b"]), parts["c"])
    op = SsmScan(
        heads=heads, d=s.inner // heads, size=s.state, groups=1, single=g.spec.single, m=g.m, given=True,
        by_state=not s.heads,
    )  # fmt: skip
    y = g.run(op, [joined, z, dt, g.vector(block + "ssm_a"), g.vector(block + "ssm_d")], i, "ssm")
    return [g.linear(y, block + "ssm_out.weight")]


def linear_attention(g: Graph, h, i: int) -> list:
    a, block = g.config.layers[i].mixer, f"blk.{i}."
    assert isinstance(a, LinearAttentionConfig)
    x = g.activation(g.linear(h, block + "attn_qkv.weight"), "silu")
    steps = g.bb.emit(OPS.ones((g.m, padded(a.heads)), "float32"))
    op = SsmScan(
        heads=a.heads, d=a.head_dim, size=a.head_dim, groups=a.heads, single=g.spec.single, m=g.m, given=True,
        gated=False,
    )  # fmt: skip
    y = g.run(op, [x, steps, g.vector(block + "attn_decay")], i, "ssm")
    gate = g.linear(h, block + "attn_gate.weight")
    y = g.gate(g.rms_norm(y, block + "attn_norm_2.weight"), gate, a.head_dim)
    return [g.linear(y, block + "attn_output.weight")]


MIXERS = {
    ShortConvConfig: short_conv,
    DeltaNetConfig: delta_net,
    ChannelDeltaConfig: channel_delta,
    Mamba2Config: mamba2,
    MambaConfig: mamba,
    LinearAttentionConfig: linear_attention,
}
