"""The GPU's weight layout "rows": how the weights of a linear layer are stored, how one weight is read, and the kernel
that looks up rows of an embedding table.

In: a format (name or Format) and the shape of the matrix: N rows (outputs) by K columns (inputs). Out: the shapes and
dtypes of the planes (`planes`), and a TensorIR expression for one weight (`decode`).

A plane is a tensor with one part of the weights' data (codes or scales). The names are those of
`schedules/cpu/linear/planes.py`, but here planes are ordered by rows: N is padded with zeros to a multiple of 16, KB is
the number of blocks of 32 columns, and the columns of a row are contiguous, so that neighbouring lanes of a wave read
neighbouring blocks, 16 bytes each. The contents of a block, for column 4*j + i (i < 4, j < 8); words are four bytes,
byte 0 is the lowest:

    Q4 uint32 [N, KB, 4]        word j % 4, byte i: low nibble for j < 4, high nibble for j >= 4
    Q2 uint32 [N, KB, 2]        word j // 4, byte i: bits 2*(j % 4) and the next
    Q1 uint32 [N, KB]           byte i: bit j
    Q8 uint32 [N, KB, 8]        word j, byte i (the bits of an int8)
    D, DM float16               [N, KB], one per block; [N, K/256] for formats with super-blocks of 256 columns
    M float16 [N, KB]           minimums
    S [N, K/group]              sub-scales: uint8 (q4_k, q5_k, iq1 to iq3; q2_k: low nibble scale, high nibble
                                minimum), int8 (q3_k, q6_k, iq4_xs) or minifloats as uint8 (mxfp4, nvfp4)
    Z uint8 [N, K/group]        sub-minimums
    W [N, K]                    the weights of f32, f16 and bf16 (bf16: its bits as uint16); any K
"""

from collections.abc import Mapping
from math import prod

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.decode import float_weight, int8_weight
from mlc_amd.schedules.formats import PLANE_BITS, Format, lookup
from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.base.device import launch
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import ThreadsPlan, builds, columns_space, live_rows, threads_of
from mlc_amd.schedules.operators import Embed
from mlc_amd.schedules.tir import Buffer, Expr

ROWS, BLOCK = 16, 32

Planes = Mapping[str, Buffer]  # {name: plane} of a weight


def padded(n: int) -> int:
    """The number of rows with padding."""
    return -(-n // ROWS) * ROWS


def planes(fmt: str | Format, n: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """{name: (shape, dtype)} of the planes of an n x k matrix, in the order of kernels' parameters. Raises UserError if
    k is not a multiple of the format's block."""
    fmt, rows = lookup(fmt), padded(n)
    if k % fmt.block:
        raise UserError(
            f"{fmt.name} needs rows of a multiple of {fmt.block} columns, this tensor has {k}; quantize it to another "
            "type"
        )
    if fmt.kind == "float":
        return {"W": ((rows, k), fmt.dtype)}
    words = {p: (PLANE_BITS[p],) if PLANE_BITS[p] > 1 else () for p in fmt.codes}  # 32 codes of b bits are b words
    codes = {p: ((rows, k // BLOCK, *words[p]), "uint32") for p in fmt.codes}
    scales = {p: fmt.scale_plane(p) for p in fmt.scales}
    return codes | {p: ((rows, k // columns), dtype) for p, (columns, dtype) in scales.items()}


def plane_args(fmt: str | Format, n: int, k: int, prefix: str = "") -> dict[str, Buffer]:
    """Declares parameters for the planes of a weight. prefix: of their names. Raises UserError as `planes` does, and
    for planes that are too large for 32-bit indices."""
    fmt = lookup(fmt)
    if max(prod(shape) for shape, _ in planes(fmt, n, k).values()) >= 1 << 31:
        raise UserError(
            f"a weight of {n} x {k} is too large as {fmt.name} for one kernel; use a smaller quantization of the model"
        )
    return {name: T.arg(prefix + name, T.buffer(shape, dtype)) for name, (shape, dtype) in planes(fmt, n, k).items()}


def _code(fmt: Format, bufs: Planes, n: Expr, k: Expr) -> Expr:
    """The integer code of weight (n, k) as int32."""
    code: Expr = None
    filled, j = 0, k % BLOCK // 4
    # (index of the word, first bit in the byte) of column 4*j + i in a block
    places = {"Q1": ((), j), "Q2": ((j // 4,), j % 4 * 2), "Q4": ((j % 4,), j // 4 * 4), "Q8": ((j,), 0)}
    for plane in fmt.codes:
        word, shift = places[plane]
        bits = bufs[plane][(n, k // BLOCK, *word)] >> tirx.Cast("uint32", k % 4 * 8 + shift)
        if fmt.signed:
            return bits.astype("int8").astype("int32")
        bits = (bits & tirx.const((1 << PLANE_BITS[plane]) - 1, "uint32")).astype("int32")
        code = bits if code is None else code | (bits << filled)
        filled += PLANE_BITS[plane]
    return code


def _lookup_table(table: tuple[int, ...], code: Expr) -> Expr:
    """table[code] as int32, for a table of 8 or 16 int8 values, without memory: the table is four 32-bit constants."""
    packed = bytes(v & 255 for v in table) * (16 // len(table))
    words = [tirx.const(int.from_bytes(packed[i : i + 4], "little", signed=True), "int32") for i in range(0, 16, 4)]
    word = tirx.Select(code < 8, tirx.Select(code < 4, words[0], words[1]), tirx.Select(code < 12, words[2], words[3]))
    return (word >> ((code & 3) * 8)).astype("int8").astype("int32")


def decode(fmt: str | Format, bufs: Planes, n: Expr, k: Expr) -> Expr:
    """Weight (n, k) as a float32 expression: the same bits as gguf-py's `dequantize`. bufs: {name: plane}, buffers of
    TVMScript's builder or TE tensors. n, k: ints, or int32 or int64 expressions."""
    fmt = lookup(fmt)
    n, k = (tirx.const(x, "int32") if isinstance(x, int) else x for x in (n, k))
    if fmt.kind == "float":
        return float_weight(fmt, bufs["W"][n, k])
    code = _code(fmt, bufs, n, k)
    value = _lookup_table(fmt.table, code) if fmt.table else code - fmt.zero
    return int8_weight(fmt, value, lambda plane, columns: bufs[plane][n, k // columns])


# ---- the embedding lookup
# A thread computes one column of a token. A token has a few thousand columns, whose planes stay in the cache.


@builds(Embed)
def embed(op: Embed, arch: Device, state: Buffer, plan: ThreadsPlan | None) -> None:
    """Kernel (state, tokens int32 [m], [features [m, op.features]], planes of the [vocab, k] table, X float32 [m, k]):
    for live rows i, X[i] = table[tokens[i]] * scale; or the first k columns of features[i] if op.features and tokens[i]
    is negative. Tokens outside the vocabulary read its first or last row. Raises UserError if the format does not
    allow k."""
    k, m, threads = op.k, op.m, threads_of(arch, plan)
    tokens = T.arg("tokens", T.buffer((m,), "int32"))
    features = T.arg("features", T.buffer((m, op.features), op.of)) if op.features else None
    table = plane_args(op.fmt, op.vocab, k)
    X = T.arg("X", T.buffer((m, k), "float32"))
    with launch((-(-k // threads), m), (threads,)) as (chunk, token, thread):
        column = T.Bind(chunk * threads + thread)
        with T.If((column < k) & (token < live_rows(state, m))), T.Then():
            row = T.Bind(T.max(T.min(tokens[token], T.int32(op.vocab - 1)), T.int32(0)))
            x = decode(op.fmt, table, row, column)
            x = x if op.scale == 1.0 else x * T.float32(op.scale)
            if features is not None:
                x = T.if_then_else(tokens[token] < 0, T.cast(features[token, column], "float32"), x)
            T.buffer_store(X, x, [token, column])


registry.plans(Embed)(columns_space(1))
