"""The CPU's weight layout "tile16": how a weight matrix is stored in memory, as planes.

In: a format (name or Format), and the shape of the matrix: N rows (outputs) by K columns (inputs). Out: the shapes and
dtypes of its planes (`planes`), a TensorIR expression for one weight (`decode`), and kernels that decode rows of an
embedding table (`embed`) or a whole matrix (`dequantize`).

Rows are in NT tiles of 16; N is padded to a multiple of 16 with zeros. Columns are in KB blocks of 32. The tile is the
first dimension of every plane, so a matrix is the concatenation of its tiles. A vector lane is a row: 64 bytes of a
code plane are 4 consecutive columns of each of 16 rows, an operand of an instruction for dot products of bytes. No
reduction crosses lanes. In a block, for row r of the tile and column 4*j + i (i < 4, j < 8):

    Q4 uint8 [NT, KB, 256]      byte (j % 4)*64 + r*4 + i: low nibble for j < 4, high nibble for j >= 4
    Q2 uint8 [NT, KB, 128]      byte (j // 4)*64 + r*4 + i: bits 2*(j % 4) and the next
    Q1 uint8 [NT, KB, 64]       byte r*4 + i: bit j
    Q8 uint8 [NT, KB, 512]      byte j*64 + r*4 + i (the bits of an int8)
    D, DM float16               [NT, KB, 16]: one for each block; for formats with GGUF blocks of 256 columns
                                [NT, K/256, 16]: one for each of these
    M float16 [NT, KB, 16]      minimums
    S [NT, K/group, 16]         sub-scales: uint8 (q4_k, q5_k, iq1 to iq3; q2_k: low nibble scale, high nibble
                                minimum), int8 (q3_k, q6_k, iq4_xs) or minifloats as uint8 (mxfp4, nvfp4)
    Z uint8 [NT, K/group, 16]   sub-minimums
    W [NT, K, 16]               the weights of f32, f16 and bf16 (bf16: its bits as uint16); any K
"""

from math import prod

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu import registry
from mlc_amd.schedules.cpu.base.arch import Arch
from mlc_amd.schedules.cpu.base.kernel import kernel, live_rows
from mlc_amd.schedules.decode import float_weight, int8_weight
from mlc_amd.schedules.formats import PLANE_BITS, Format, lookup
from mlc_amd.schedules.operators import Embed
from mlc_amd.schedules.tir import Buffer, Expr

ROWS, BLOCK = 16, 32


def planes(fmt: str | Format, n: int, k: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to (shape, dtype) of each plane of an n x k matrix, in the order of kernels' parameters. Raises UserError if
    k is not a multiple of the format's block."""
    fmt = lookup(fmt)
    if k % fmt.block:
        raise UserError(
            f"{fmt.name} needs rows of a multiple of {fmt.block} columns, this tensor has {k}; quantize it to another "
            "type"
        )
    tiles = -(-n // ROWS)
    if fmt.kind == "float":
        return {"W": ((tiles, k, ROWS), fmt.dtype)}
    codes = {p: ((tiles, k // BLOCK, ROWS * BLOCK * PLANE_BITS[p] // 8), "uint8") for p in fmt.codes}
    scales = {p: fmt.scale_plane(p) for p in fmt.scales}
    return codes | {p: ((tiles, k // columns, ROWS), dtype) for p, (columns, dtype) in scales.items()}


def plane_bytes(fmt: str | Format, n: int, k: int) -> int:
    """The bytes of all planes of an n x k matrix."""
    size = {"float32": 4, "float16": 2, "uint16": 2, "uint8": 1, "int8": 1}
    return sum(prod(shape) * size[dtype] for shape, dtype in planes(fmt, n, k).values())


def emit_planes(fmt: str | Format, n: int, k: int, prefix: str = "") -> dict[str, Buffer]:
    """Declares a parameter for each plane of a weight, named prefix + name of the plane. Returns name to buffer, in
    order."""
    return {name: T.arg(prefix + name, T.buffer(*plane)) for name, plane in planes(fmt, n, k).items()}


def _bits(plane: str, column: Expr) -> tuple[Expr, Expr]:
    """(number of the 64-byte group, number of the first bit in its byte) of a column, 0 to 31, in a code plane."""
    j = column // 4
    return {"Q1": (0, j), "Q2": (j // 4, j % 4 * 2), "Q4": (j % 4, j // 4 * 4), "Q8": (j, 0)}[plane]


def _code(fmt: Format, bufs: dict, n: Expr, k: Expr) -> Expr:
    """The integer code of weight (n, k) as int32."""
    code: Expr = None
    filled = 0
    for plane in fmt.codes:
        group, shift = _bits(plane, k % BLOCK)
        byte = bufs[plane][n // ROWS, k // BLOCK, group * 64 + n % ROWS * 4 + k % 4]
        if fmt.signed:
            return byte.astype("int8").astype("int32")
        bits = (byte.astype("int32") >> tirx.Cast("int32", shift)) & ((1 << PLANE_BITS[plane]) - 1)
        code = bits if code is None else code | (bits << filled)
        filled += PLANE_BITS[plane]
    return code


def _lookup_table(table: tuple[int, ...], code: Expr) -> Expr:
    """table[code] as int32, without a load: a byte of one of two 64-bit constants. table: 8 or 16 int8 values."""
    packed = bytes(v & 255 for v in table) * (16 // len(table))
    low, high = (tirx.const(int.from_bytes(packed[i : i + 8], "little", signed=True), "int64") for i in (0, 8))
    word = tirx.Select(code < 8, low, high)
    return (word >> ((code & 7) * 8).astype("int64")).astype("int8").astype("int32")


def decode(fmt: str | Format, bufs: dict, n: Expr, k: Expr) -> Expr:
    """Weight (n, k) as a float32 expression, equal to that of gguf-py's `dequantize`, bit for bit.

    bufs: name to plane, a buffer of TVMScript's builder or a TE tensor. n, k: int32 or int64 expressions, or ints.
    """
    fmt = lookup(fmt)
    n, k = (tirx.const(x, "int32") if isinstance(x, int) else x for x in (n, k))
    tile, row = n // ROWS, n % ROWS
    if fmt.kind == "float":
        return float_weight(fmt, bufs["W"][tile, k, row])
    code = _code(fmt, bufs, n, k)
    value = _lookup_table(fmt.table, code) if fmt.table else code - fmt.zero
    return int8_weight(fmt, value, lambda plane, columns: bufs[plane][tile, k // columns, row])


def dequantize(fmt: str | Format, n: int, k: int, name: str = "dequantize") -> tirx.PrimFunc:
    """PrimFunc (planes..., weights float32 [n, k]): the matrix decoded by `decode`. For tests, not fast."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True})
        bufs = emit_planes(fmt, n, k)
        out = T.arg("weights", T.buffer((n, k), "float32"))
        with T.parallel(n) as i, T.serial(k) as j:
            T.buffer_store(out, decode(fmt, bufs, i, j), [i, j])
    func = builder.get()
    assert isinstance(func, tirx.PrimFunc)
    return func


COLUMNS = 32  # columns of a block
# Columns that are adjacent in memory. Loops over them are unrolled here, because LLVM 22's vectorizer miscompiles a
# loop whose addresses contain column % 4: it loads eight consecutive bytes.
QUAD = 4


@registry.builds(Embed)
def embed(op: Embed, arch: Arch, name: str, plan: None = None) -> tirx.PrimFunc:
    """Kernel (state int32[4], tokens int32[m], [features [m, features]], planes of the [vocab, k] table, X
    float32 [m, k]): for live i, X[i] = table[tokens[i]] * scale, or the first k columns of features[i] if tokens[i] is
    negative. Token ids outside the vocabulary are clamped. Raises UserError if the format does not allow k."""
    k, m = op.k, op.m
    step, quad = (COLUMNS, QUAD) if k % COLUMNS == 0 else (1, 1)
    # tasks of a row, so that even a single row uses several threads
    chunks = next(n for n in (16, 8, 4, 2, 1) if k // step % n == 0)
    with kernel(name) as (builder, state):
        tokens = T.arg("tokens", T.buffer((m,), "int32"))
        features = T.arg("features", T.buffer((m, op.features), op.of)) if op.features else None
        table = emit_planes(op.fmt, op.vocab, k)
        X = T.arg("X", T.buffer((m, k), "float32"))
        with T.parallel(live_rows(state, m) * chunks) as task:
            token, chunk = T.Bind(task // chunks), T.Bind(task % chunks)
            row = T.Bind(T.max(T.min(tokens[token], T.int32(op.vocab - 1)), T.int32(0)))

            def store(value) -> None:
                with T.serial(k // step // chunks) as block, T.serial(step // quad) as j:
                    for i in range(quad):
                        column = (chunk * (k // step // chunks) + block) * step + j * quad + i
                        T.buffer_store(X, value(column), [token, column])

            def of_table(column):
                x = decode(op.fmt, table, row, column)
                return x if op.scale == 1.0 else x * T.float32(op.scale)

            if features is None:
                store(of_table)
            else:
                with T.If(tokens[token] < 0):
                    with T.Then():
                        store(lambda column: T.cast(features[token, column], "float32"))
                    with T.Else():
                        store(of_table)
    return builder.get()
