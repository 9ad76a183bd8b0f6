"""Latent attention's queries and keys on the GPU: what stands between the projections and attention.

In: the queries' columns for the latent and those that rotate, the key's latent before its norm and its rotating
columns, float32. Out: rotated queries as float16, times `Attention.query_scale`, and the keys in the cache, for live
rows. `schedules.operators.attention.Attention` says what they are. Without rotation (rope.rotary 0) these columns are
taken as they are. A wave has one head of one row, or its key.
"""

from collections.abc import Iterator

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention.cache import (
    Cache,
    own_elements,
    pages_arg,
    row_position,
    row_slot,
    rows_arg,
    store_valid,
)
from mlc_amd.schedules.gpu.attention.rope_kv_write import Heads, Sources, WavesPlan, norm_scale
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import is_live, kernel, state_arg
from mlc_amd.schedules.operators.attention import LatentKvWrite, padded_columns
from mlc_amd.schedules.tir import Expr


@registry.builds(LatentKvWrite)
def latent_kv_write(op: LatentKvWrite, arch: Device, name: str, plan: WavesPlan | None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32[m, 2], pages of `pages_arg`, Q float32 [m, heads*(d-values)], L float32 [m,
    heads*values], K float32 [m, d], KN float32 [values], [CS float32 [ctx, rotary] with CS[pos, 2i] = cos, CS[pos,
    2i+1] = sin of pair i, unless rotary is 0], Kc as in `cache.py` (in place), Qo float16 [m, heads, width], whose
    padding becomes 0).

    A head's query is [L | rotated Q], a key [K's first columns normalized, times KN | the others rotated]. Q, K and KN
    are padded to multiples of 16 columns. Rows that are not live, or whose position is at or beyond ctx, write nothing.
    UserError for shapes that `cache_types` refuses, ValueError unless the key has values and others, of which all or
    none rotate.
    """
    attention, m, rope = op.layer, op.m, op.rope
    heads, values, width = attention.heads, attention.values, attention.width
    shared = attention.d - values
    if rope.rotary not in (0, shared) or rope.eps is None:
        raise ValueError(f"keys of {attention.d} columns do not consist of {values} and {rope.rotary} that rotate")
    waves, scale = (plan or WavesPlan()).fitted(arch), T.float32(attention.query_scale)
    with kernel(name) as ir:
        state, rows, pages = state_arg(), rows_arg(m), pages_arg(attention)
        shapes = {"Q": padded_columns(heads * shared), "L": heads * values, "K": width}
        Q, L, K = (T.arg(which, T.buffer((m, columns), "float32")) for which, columns in shapes.items())
        KN = T.arg("KN", T.buffer((padded_columns(values),), "float32"))
        CS = T.arg("CS", T.buffer((attention.ctx, shared), "float32")) if rope.rotary else None
        cache = Cache(attention, pages)
        sources = Sources(Q, K, None, None, None, CS)
        Qo = T.arg("Qo", T.buffer((m, heads, width), "float16"))
        with launch((-(-(heads + 1) // waves), m), (arch.wave, waves)) as (block, row, lane, wave):
            own = Heads(arch, attention, rope, sources, lane, shared)
            head, position = T.Bind(block * waves + wave), T.Bind(row_position(rows, row))

            def turned(X: Expr, column: Expr) -> Iterator[Expr]:
                """The `rotated` columns of X from `column` on, as elements of a key."""
                for valid, pair in own.rotated(X, row, column, position):
                    yield valid, [(values + e, y) for e, y in pair]

            def write_query() -> None:
                for valid, e in own_elements(arch, lane, 0, values):
                    store_valid(valid, Qo, [((row, head, e), T.cast(L[row, head * values + e] * scale, "float16"))])
                for valid, pair in turned(Q, head * shared):
                    store_valid(valid, Qo, [((row, head, e), T.cast(y * scale, "float16")) for e, y in pair])
                for valid, e in own_elements(arch, lane, attention.d, width):
                    store_valid(valid, Qo, [((row, head, e), T.float16(0))])

            def write_key() -> None:
                latent = [(valid, e, T.Bind(K[row, e])) for valid, e in own_elements(arch, lane, 0, values)]
                factor = T.Bind(norm_scale(arch, [(valid, [x]) for valid, _, x in latent], values, rope.eps))
                key = [(valid, [(e, x * factor * KN[e])]) for valid, e, x in latent]
                cache.store_key(0, row_slot(rows, row), position, [*key, *turned(K, values)])

            live = tirx.all(is_live(state, row), position >= 0, position < attention.ctx, head <= heads)
            with T.If(live), T.Then(), T.If(head < heads):
                with T.Then():
                    write_query()
                with T.Else():
                    write_key()
    return ir.get()
