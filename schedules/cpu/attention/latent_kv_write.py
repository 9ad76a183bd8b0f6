"""Latent attention's queries and keys on the CPU: what comes between the projections and attention.

In: the queries' columns for the latent and those that rotate, the key's latent before its norm and its rotating
columns, all float32. Out: rotated and scaled queries, and the keys in the cache;
`schedules.operators.attention.Attention` says what they are. Without rotation (rope.rotary 0) these columns are taken
as they are.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.attention.cache import Cache, RowTable, is_position
from mlc_amd.schedules.cpu.attention.rope_kv_write import Rotation, loader, normalized, vectors
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, row_loop
from mlc_amd.schedules.cpu.base.vector import at, f32, store
from mlc_amd.schedules.operators import LatentKvWrite
from mlc_amd.schedules.operators.attention import padded_columns


@registry.builds(LatentKvWrite)
def latent_kv_write(op: LatentKvWrite, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], rows int32 [m, 2], pages as in `cache.py`, Q float32 [m, heads*(d-values)], L float32 [m,
    heads*values], K float32 [m, d], KN float32 [values], [CS float32 [ctx, rotary] with CS[pos, 2i] = cos, CS[pos,
    2i+1] = sin of pair i, unless rotary is 0], Kc as in `cache.py` (in place), Qo float32 [m, heads, width], scaled by
    spec.query_scale).

    A head's query is [L | rotated Q], a key [K's first columns normalized, times KN | the others rotated]. Q, K and KN
    are padded to multiples of 16 columns. Rows that are not live, or have no place in the cache, write nothing.
    UserError for shapes that `cache_types` refuses, ValueError unless the key has values and others, of which all or
    none rotate.
    """
    spec, rope, m = op.layer, op.rope, op.m
    heads, values, shared = spec.heads, spec.values, spec.d - spec.values
    if rope.rotary not in (0, shared) or rope.eps is None:
        raise ValueError(f"keys of {spec.d} columns are not {values} normalized and {rope.rotary} rotating ones")
    with kernel(name) as (builder, state):
        table, cache = RowTable(m), Cache(spec, arch.isa).declare_pages()
        shapes = {"Q": padded_columns(heads * shared), "L": heads * values, "K": spec.width}
        Q, L, K = (T.arg(which, T.buffer((m, columns), "float32")) for which, columns in shapes.items())
        KN = T.arg("KN", T.buffer((padded_columns(values),), "float32"))
        CS = T.arg("CS", T.buffer((spec.ctx, shared), "float32")) if rope.rotary else None
        cache.declare()
        Qo = T.arg("Qo", T.buffer((m, heads, spec.width), "float32"))
        with row_loop(state, m) as row:
            position = T.Bind(table.position(row))
            with T.If(is_position(spec, position)), T.Then():
                rotation = Rotation(CS, position, shared, rope)
                with T.serial(heads) as h:
                    for e, n, y in vectors(loader(L, row, h, values), values):
                        store(Qo, y * f32(spec.query_scale, n), row, h, at(e, n))
                    for e, n, y in rotation.vectors(loader(Q, row, h, shared)):
                        store(Qo, y * f32(spec.query_scale, n), row, h, at(values + e, n))
                latent = normalized(loader(K, row, 0, values), values, rope.eps, KN)
                with cache.key_writer(0, cache.place(table.slot(row), position)) as write:
                    for e, n, y in vectors(latent, values):
                        write(e, n, y)
                    for e, n, y in rotation.vectors(lambda e, n: K[row, at(values + e, n)]):
                        write(values + e, n, y)
    return builder.get()
