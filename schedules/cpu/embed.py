"""The embedding lookup: rows of the embedding table, decoded to float32.

In: `state` int32[4] (state[1]: live tokens), tokens int32[m], the table's planes in the "tile16" layout. Out: X float32 [m, k]. The table
stays in its file format; a row's weights lie 16 rows apart there, so they are decoded one by one.
"""
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.norm import live_tokens
from mlc_amd.schedules.cpu.planes import decode, planes

COLUMNS = 32                    # columns decoded in one go: they share their scales in every format


def embed(fmt, vocab, k, m, name) -> tirx.PrimFunc:
    """Kernel (state int32[4], tokens int32[m], planes of the [vocab, k] table, X float32 [m, k]): X[i] = table[tokens[i]] of the live tokens.

    Token numbers outside the vocabulary read its first or last row (nothing out of bounds). UserError when the format does not allow k.
    """
    step = COLUMNS if k % COLUMNS == 0 else 1
    chunks = next(n for n in (16, 8, 4, 2, 1) if k // step % n == 0)        # tasks of a token: a single token keeps several threads busy
    with IRBuilder() as ir, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True, "global_symbol": name})
        state, tokens = T.arg("state", T.buffer((4,), "int32")), T.arg("tokens", T.buffer((m,), "int32"))
        table = {plane: T.arg(plane, T.buffer(shape, dtype)) for plane, (shape, dtype) in planes(fmt, vocab, k).items()}
        X = T.arg("X", T.buffer((m, k), "float32"))
        with T.parallel(live_tokens(state, m) * chunks) as task:
            token, chunk = T.Bind(task // chunks), T.Bind(task % chunks)
            row = T.Bind(T.max(T.min(tokens[token], T.int32(vocab - 1)), T.int32(0)))
            with T.serial(k // step // chunks) as block, T.serial(step) as i:
                column = (chunk * (k // step // chunks) + block) * step + i
                T.buffer_store(X, decode(fmt, table, row, column), [token, column])
    return ir.get()
