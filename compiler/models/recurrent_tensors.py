"""The tensors of a layer that keeps a state, by its configuration: those in the file, and the parts of merged ones."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mlc_amd.compiler.models.recurrent_config import (
    ChannelDeltaConfig,
    DeltaNetConfig,
    Mamba2Config,
    Shape,
    ShortConvConfig,
)

BLOCK = 32  # rows and columns of the matrices of feed-forward blocks come in so many
Listed = Iterator[tuple[bool, str, Shape]]  # whether the model has it, name within the layer, shape


class Part(NamedTuple):
    """A tensor that the graph uses, made of rows of one in the file: `first`.. (of each expert, of each head).

    pieces: instead of `first`, the source is so many `groups` of rows alike, and the part is, one piece after the
    other, the rows first .. first + count of each group. transposed: the rows become columns.
    filled: the shape with zeros at the end of rows and columns; (): there are none.
    """

    name: str
    source: str
    first: int
    shape: Shape
    groups: int = 0
    pieces: tuple[tuple[int, int], ...] = ()
    transposed: bool = False
    filled: Shape = ()


def _mamba2(hidden: int, s: Mamba2Config) -> Listed:
    yield True, "ssm_in.weight", (s.inner + s.channels + s.heads, hidden)
    yield True, "ssm_conv1d.weight", (s.channels, s.taps)
    yield True, "ssm_conv1d.bias", (s.channels,)
    yield True, "ssm_dt.bias", (s.heads,)
    yield True, "ssm_a", (s.heads, 1)
    yield True, "ssm_d", (s.heads, 1)
    yield s.norm_eps > 0, "ssm_norm.weight", (s.groups, s.inner // s.groups)
    yield True, "ssm_out.weight", (hidden, s.inner)


def _short_conv(hidden: int, c: ShortConvConfig) -> Listed:
    yield True, "shortconv.conv.weight", (hidden, c.taps)
    yield True, "shortconv.in_proj.weight", (3 * hidden, hidden)
    yield True, "shortconv.out_proj.weight", (hidden, hidden)


def _delta_net(hidden: int, d: DeltaNetConfig) -> Listed:
    yield d.merged_inputs, "ssm_in.weight", (d.channels + d.values, hidden)
    yield not d.merged_inputs, "attn_qkv.weight", (d.channels, hidden)
    yield not d.merged_inputs, "attn_gate.weight", (d.values, hidden)
    yield True, "ssm_conv1d.weight", (d.channels, d.taps)
    yield d.merged_gates, "ssm_ba.weight", (2 * d.value_heads, hidden)
    yield not d.merged_gates, "ssm_beta.weight", (d.value_heads, hidden)
    yield not d.merged_gates, "ssm_alpha.weight", (d.value_heads, hidden)
    yield True, "ssm_dt.bias", (d.value_heads,)
    yield True, "ssm_a", (d.value_heads,)
    yield True, "ssm_norm.weight", (d.head_dim,)
    yield True, "ssm_out.weight", (hidden, d.values)


def _channel_delta(hidden: int, d: ChannelDeltaConfig) -> Listed:
    for which in "qkv":
        yield True, f"attn_{which}.weight", (d.columns, hidden)
        yield True, f"ssm_conv1d_{which}.weight", (d.columns, d.taps)
    for which in "fg":
        yield True, f"ssm_{which}_a.weight", (d.head_dim, hidden)
        yield True, f"ssm_{which}_b.weight", (d.columns, d.head_dim)
    yield True, "ssm_beta.weight", (d.heads, hidden)
    yield True, "ssm_dt.bias", (d.columns,)
    yield True, "ssm_a", (d.heads, 1)
    yield True, "ssm_norm.weight", (d.head_dim,)
    yield True, "attn_output.weight", (hidden, d.columns)


TENSORS: dict[type, Callable[[int, Any], Listed]] = {
    ShortConvConfig: _short_conv,
    DeltaNetConfig: _delta_net,
    ChannelDeltaConfig: _channel_delta,
    Mamba2Config: _mamba2,
}


def _delta_parts(hidden: int, d: DeltaNetConfig) -> Iterator[Part]:
    each, size = d.value_heads // d.key_heads, d.head_dim
    if d.merged_inputs:
        qkv, gate = ((0, size), (size, size), (2 * size, each * size)), (((2 + each) * size, each * size),)
        yield Part("attn_qkv.weight", "ssm_in.weight", 0, (d.channels, hidden), d.key_heads, qkv)
        yield Part("attn_gate.weight", "ssm_in.weight", 0, (d.values, hidden), d.key_heads, gate)
    if d.merged_gates:
        for name, first in (("ssm_beta.weight", 0), ("ssm_alpha.weight", each)):
            yield Part(name, "ssm_ba.weight", 0, (d.value_heads, hidden), d.key_heads, ((first, each),))


def _channel_delta_parts(hidden: int, d: ChannelDeltaConfig) -> Iterator[Part]:
    """With zeros where what is between two matrices is no whole number of blocks."""
    filled = -(-d.head_dim // BLOCK) * BLOCK
    if filled == d.head_dim:
        return
    for name in ("ssm_f_a.weight", "ssm_g_a.weight"):
        yield Part(name, name, 0, (d.head_dim, hidden), filled=(filled, hidden))
    for name in ("ssm_f_b.weight", "ssm_g_b.weight"):
        yield Part(name, name, 0, (d.columns, d.head_dim), filled=(d.columns, filled))


def _mamba2_parts(hidden: int, s: Mamba2Config) -> Iterator[Part]:
    first = 0
    for which, rows in (("z", s.inner), ("x", s.channels), ("dt", s.heads)):
        yield Part(f"ssm_in_{which}.weight", "ssm_in.weight", first, (rows, hidden))
        first += rows


PARTS: dict[type, Callable[[int, Any], Iterator[Part]]] = {
    DeltaNetConfig: _delta_parts,
    ChannelDeltaConfig: _channel_delta_parts,
    Mamba2Config: _mamba2_parts,
}
