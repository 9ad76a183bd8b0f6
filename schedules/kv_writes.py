"""The parameters of `RopeKvWrite`, `RopeAttention` and `LatentKvWrite` before the cache, which are the same on all
targets. Q, K, V and the norms' weights are padded to multiples of 16 columns, as all results of linear layers and all
vectors of weights are."""

from typing import NamedTuple

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators.attention import Attention, LatentKvWrite, Rope, padded_columns
from mlc_amd.schedules.tir import Buffer, declared


class Sources(NamedTuple):
    """Q float32 [m, heads*d], K and V [m, kv_heads*d], the norms' weights QN and KN [d], the table CS [ctx, rotary]:
    CS[position, 2i] is the cosine of pair i, CS[position, 2i+1] its sine. With `Rope.by_row` CS is [m, rotary], with a
    row for each row of the step. None: the kernel has no such parameter."""

    Q: Buffer
    K: Buffer
    V: Buffer
    QN: Buffer
    KN: Buffer
    CS: Buffer


def rope_args(attention: Attention, m: int, rope: Rope) -> Sources:
    """Declares the parameters; K, V and KN only with rope.writes. Raises UserError if rope.rotary is odd or larger than
    a head."""
    d, normed = attention.d, rope.eps is not None
    if rope.rotary % 2 or not 0 <= rope.rotary <= d:
        raise UserError(f"rotary embedding needs an even number of elements, at most the head's {d}, not {rope.rotary}")
    key = (m, padded_columns(attention.kv_heads * d)) if rope.writes else None
    norm = (padded_columns(d),) if normed else None
    shapes = {"Q": (m, padded_columns(attention.heads * d)), "K": key, "V": key, "QN": norm, "KN": key and norm}
    table = (m if rope.by_row else attention.ctx, rope.rotary) if rope.rotary else None
    return Sources(*declared(**shapes, CS=table))


def latent_args(op: LatentKvWrite) -> list[Buffer]:
    """Declares Q float32 [m, heads*(d-values)], L [m, heads*values], K [m, d], KN [values], and CS as in `Sources`
    (None if rotary is 0). The query of a head is the columns of L, then those of Q, rotated. A key is the norm of the
    first `values` columns of K, times KN, then its other columns, rotated."""
    layer, m = op.layer, op.m
    shared = layer.d - layer.values
    inputs = {
        "Q": (m, padded_columns(layer.heads * shared)),
        "L": (m, layer.heads * layer.values),
        "K": (m, layer.width),
    }
    table = (layer.ctx, shared) if op.rope.rotary else None
    return declared(**inputs, KN=(padded_columns(layer.values),), CS=table)
