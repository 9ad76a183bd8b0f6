"""The embedding lookup: rows of the embedding table, decoded to float32 and scaled.

In: `state`, tokens int32[m], the table's planes in the "tile16" layout. Out: X float32 [m, k]. The table stays in its
file format; a row's weights lie 16 rows apart there, so they are decoded one by one.
"""

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.linear.planes import decode, emit_planes
from mlc_amd.schedules.operators import Embed

COLUMNS = 32  # of a block, of which four are adjacent in memory
# Unrolled here, because a loop whose addresses contain column % 4 is miscompiled: LLVM 22's vectorizer takes eight
# bytes in a row.
QUAD = 4


@registry.builds(Embed)
def embed(op: Embed, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], tokens int32[m], planes of the [vocab, k] table, X float32 [m, k]): X[i] =
    table[tokens[i]] * scale for live i.

    Token ids outside the vocabulary read its first or last row (nothing out of bounds). UserError when the format does
    not allow k.
    """
    k, m = op.k, op.m
    step, quad = (COLUMNS, QUAD) if k % COLUMNS == 0 else (1, 1)
    # tasks of a row: a single row keeps several threads busy
    chunks = next(n for n in (16, 8, 4, 2, 1) if k // step % n == 0)
    with kernel(name) as (builder, state):
        tokens = T.arg("tokens", T.buffer((m,), "int32"))
        table = emit_planes(op.fmt, op.vocab, k)
        X = T.arg("X", T.buffer((m, k), "float32"))
        with T.parallel(live_rows(state, m) * chunks) as task:
            token, chunk = T.Bind(task // chunks), T.Bind(task % chunks)
            row = T.Bind(T.max(T.min(tokens[token], T.int32(op.vocab - 1)), T.int32(0)))
            with T.serial(k // step // chunks) as block, T.serial(step // quad) as j:
                for i in range(quad):
                    column = (chunk * (k // step // chunks) + block) * step + j * quad + i
                    x = decode(op.fmt, table, row, column)
                    T.buffer_store(X, x if op.scale == 1.0 else x * T.float32(op.scale), [token, column])
    return builder.get()
