"""The tensors of layers that keep a state. In: a mixer's configuration. Out: `TENSORS`, its tensors in the file, and
`PARTS`, the parts into which merged tensors are divided."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mlc_amd.compiler.models.compressed.config import CompressedConfig
from mlc_amd.compiler.models.recurrent_config import (
    NGRAM_NORMS,
    NORMS,
    ChannelDeltaConfig,
    DeltaNetConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MambaConfig,
    Shape,
    ShortConvConfig,
)

BLOCK = 32  # kernels need a multiple of this number of columns; also for rows that are columns of the next matrix
Listed = Iterator[tuple[bool, str, Shape]]  # (whether the model has the tensor, name within the layer, shape)


class Part(NamedTuple):
    """A tensor that the graph uses, made of rows of a tensor `source` in the file.

    first: the first of its rows (in each expert, in each head). pieces: used instead of `first` if the source has
    `groups` equal groups of rows; for each piece (first, count), the part has the rows first .. first + count - 1 of
    all groups, then those of the next piece. transposed: rows become columns. filled: the shape after rows and columns
    of zeros are added at the end; () if none are.
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
    if n := d.ngrams:
        columns = n.streams * hidden
        yield True, "ple_key.weight", (columns, len(n.sizes) * n.dim)
        yield True, "ple_value.weight", (hidden, len(n.sizes) * n.dim)
        yield True, "ple_conv1d.weight", (columns, n.taps)
        for name in NGRAM_NORMS:
            yield True, f"ple_norm_{name}.weight", (n.streams, hidden)


def _channel_delta(hidden: int, d: ChannelDeltaConfig) -> Listed:
    for which in "qkv":
        yield True, f"attn_{which}.weight", (d.columns, hidden)
        yield True, f"ssm_conv1d_{which}.weight", (d.columns, d.taps)
    for first, *second in (d.decays, d.gates):
        yield True, f"{first}.weight", (d.head_dim if second else d.columns, hidden)
        for name in second:
            yield True, f"{name}.weight", (d.columns, d.head_dim)
    yield True, "ssm_beta.weight", (d.heads, hidden)
    yield True, "ssm_dt.bias", (d.columns,)
    yield True, "ssm_a", (d.heads, 1) if d.sign > 0 else (d.heads,)
    yield True, "ssm_norm.weight", (d.head_dim,)
    yield True, "attn_output.weight", (hidden, d.columns)


def _mamba(hidden: int, s: MambaConfig) -> Listed:
    steps = s.heads or s.inner
    yield True, "ssm_in.weight", (2 * s.inner, hidden)
    yield True, "ssm_conv1d.weight", (s.inner, s.taps)
    yield not s.heads, "ssm_conv1d.bias", (s.inner,)
    yield True, "ssm_x.weight", (s.rank + 2 * s.state, s.inner)
    yield True, "ssm_dt.weight", (steps, s.rank)
    yield True, "ssm_dt.bias", (steps,)
    for which, size in (("dt", s.rank), ("b", s.state), ("c", s.state)):
        yield s.norms in NORMS, f"ssm_{which}_norm{NORMS.get(s.norms, '')}", (size,)
    yield True, "ssm_a", (steps,) if s.heads else (steps, s.state)
    yield True, "ssm_d", (steps,)
    yield True, "ssm_out.weight", (hidden, s.inner)


def _linear_attention(hidden: int, a: LinearAttentionConfig) -> Listed:
    yield True, "attn_qkv.weight", (3 * a.columns, hidden)
    yield True, "attn_gate.weight", (a.columns, hidden)
    yield True, "attn_norm_2.weight", (a.columns,)
    yield True, "attn_output.weight", (hidden, a.columns)


TENSORS: dict[type, Callable[[int, Any], Listed]] = {
    ShortConvConfig: _short_conv,
    DeltaNetConfig: _delta_net,
    ChannelDeltaConfig: _channel_delta,
    Mamba2Config: _mamba2,
    MambaConfig: _mamba,
    LinearAttentionConfig: _linear_attention,
    CompressedConfig: lambda hidden, a: a.tensors(hidden),
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
    """Adds rows and columns of zeros where the columns between two matrices are not whole blocks."""
    filled = -(-d.head_dim // BLOCK) * BLOCK
    for first, *second in (d.decays, d.gates) if filled != d.head_dim else ():
        for after in second:
            a, b = f"{first}.weight", f"{after}.weight"
            yield Part(a, a, 0, (d.head_dim, hidden), filled=(filled, hidden))
            yield Part(b, b, 0, (d.columns, d.head_dim), filled=(d.columns, filled))


def _mamba2_parts(hidden: int, s: Mamba2Config) -> Iterator[Part]:
    first = 0
    for which, rows in (("z", s.inner), ("x", s.channels), ("dt", s.heads)):
        yield Part(f"ssm_in_{which}.weight", "ssm_in.weight", first, (rows, hidden))
        first += rows


def _mamba_parts(hidden: int, s: MambaConfig) -> Iterator[Part]:
    size = s.inner // s.heads if s.heads else s.inner
    for i, which in enumerate("zx" if s.heads else "xz"):
        pieces = ((i * size, size),)
        yield Part(f"ssm_in_{which}.weight", "ssm_in.weight", 0, (s.inner, hidden), s.heads or 1, pieces)
    if s.rank % BLOCK:
        rows, filled = s.heads or s.inner, -(-s.rank // BLOCK) * BLOCK
        yield Part("ssm_dt.weight", "ssm_dt.weight", 0, (rows, s.rank), filled=(rows, filled))


def _linear_attention_parts(hidden: int, a: LinearAttentionConfig) -> Iterator[Part]:
    pieces = tuple((i * a.head_dim, a.head_dim) for i in (2, 1, 0))  # in the order of SsmScan's x, B and C
    yield Part("attn_qkv.weight", "attn_qkv.weight", 0, (3 * a.columns, hidden), a.heads, pieces)


PARTS: dict[type, Callable[[int, Any], Iterator[Part]]] = {
    DeltaNetConfig: _delta_parts,
    ChannelDeltaConfig: _channel_delta_parts,
    Mamba2Config: _mamba2_parts,
    MambaConfig: _mamba_parts,
    LinearAttentionConfig: _linear_attention_parts,
}
