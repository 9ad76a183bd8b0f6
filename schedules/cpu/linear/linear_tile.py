"""The tile routine of the CPU's linear layers: 16 rows of a weight by the rows of an activation tile.

A lane is a row of the weight. Weight registers of a block of columns serve all rows of the activation tile, activations
are broadcast from memory, accumulators stay in registers. Results go to an epilogue, which `linear.py` and `gate_up.py`
each have.
"""

from math import prod
from typing import Any, NamedTuple

from tvm import DataType
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.base.isa import QUADS
from mlc_amd.schedules.cpu.base.kernel import live_rows
from mlc_amd.schedules.cpu.base.vector import LINE, at, bf16, largest_divisor, local, prefetch, splat, store, widen
from mlc_amd.schedules.cpu.linear.linear_plan import FLOAT_TOKENS, interleave_of, parts, unpacks
from mlc_amd.schedules.cpu.linear.load import groups, load, step, zero_point
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS, emit_planes, planes
from mlc_amd.schedules.cpu.linear.quantize import act_args
from mlc_amd.schedules.cpu.linear.unpack import Unpacked
from mlc_amd.schedules.formats import Format

FLOAT_UNROLL = 4  # columns of a float kernel's loop step, and in decode independent sums of 16-bit weights


def check_tiles(m, p):
    """ValueError unless m tokens make whole tiles of p."""
    if m % p:
        raise ValueError(f"{m} tokens do not make whole tiles of {p}")


def check_rows(n):
    """UserError unless matrices of n rows, one after the other, begin where tiles do."""
    if n % ROWS:
        raise UserError(f"heads need matrices of a multiple of {ROWS} rows, this model has {n}; use another model")


class _Columns(NamedTuple):
    """A buffer of activations from entry `first` of its second axis on."""

    buffer: Any
    first: Any

    def __getitem__(self, index):  # type: ignore[override]
        row, column, *rest = index
        return self.buffer[(row, self.first + column, *rest)]


class Acts(NamedTuple):
    """The activations of m tokens in tiles of p. Int8: `quads` int32 [MT,KB,P,8] (A seen as int32), `s` float32 and
    `si` int32 [MT,KB,8,P]. Float: `x` float32 [m,k]."""

    p: int
    k: int
    quads: Any = None
    s: Any = None
    si: Any = None
    x: Any = None

    def columns(self, first, count):
        """Those of `count` columns from `first` on, whole blocks of int8 ones."""
        if self.x is not None:
            return Acts(self.p, count, x=_Columns(self.x, first))
        block = first // BLOCK
        return Acts(self.p, count, *(_Columns(buffer, block) for buffer in (self.quads, self.s, self.si)))


def act_params(m, k, p, kind):
    """Declares the activations' parameters: the buffers (A, S), or (X,) for float formats."""
    return act_args(m, k, p) if kind == "int8" else (T.arg("X", T.buffer((m, k), "float32")),)


def emit_acts(params, p, k):
    """Acts of `act_params`. To be called after the last parameter: it declares views."""
    if len(params) == 1:
        return Acts(p, k, x=params[0])
    A, S = params
    return Acts(
        p,
        k,
        T.decl_buffer((*A.shape[:-1], QUADS), "int32", data=A.data),
        S,
        T.decl_buffer(S.shape, "int32", data=S.data),
    )


def weight_args(fmt, n, k, prefix):
    """`emit_planes`. UserError for planes of more elements than 32-bit indices reach."""
    if max(prod(shape) for shape, _ in planes(fmt, n, k).values()) >= 1 << 31:
        raise UserError(
            f"a weight of {n} x {k} is too large as {fmt.name} for one kernel; use a smaller quantization of the model"
        )
    return emit_planes(fmt, n, k, prefix)


def token_tiles(state, m, p):
    """(the number of token tiles with live tokens, tile -> its live tokens): 1 and 1 in decode."""
    if m == 1:
        return 1, lambda tile: 1
    live = live_rows(state, m)
    return T.Bind((live + (p - 1)) // p), lambda tile: T.Bind(T.min(live - tile * p, T.int32(p)))


def emit_part(live, sizes, emit):
    """Emits emit(size) for the smallest of the sizes (ascending) of parts of a tile that holds its live tokens."""
    size, *rest = sizes
    if not rest:
        emit(size)
        return
    with T.If(live <= size):
        with T.Then():
            emit(size)
        with T.Else():
            emit_part(live, rest, emit)


def emit_tile(fmt: Format, weights, acts: Acts, token_tile, tokens, plan, ahead, isa, epilogue):
    """16 rows by the first `tokens` of acts.p tokens. weights: Packed or Unpacked.at. Calls epilogue(i, row, x) per
    token i of the tile and register: x are the results of isa.lanes rows, from row `row` of the tile on. ahead: a
    Plan, whose prefetches packed weights get. A token's sums have one order whatever `tokens` is."""
    registers = [r * isa.lanes for r in range(ROWS // isa.lanes)]
    passes, count = ([registers], 1) if acts.p == 1 else ([[r] for r in registers], plan.tokens)
    emit = {"int8": _emit_int8, "float": _emit_float}[fmt.kind]
    if fmt.kind == "float":
        count = min(count, FLOAT_TOKENS)
    ahead = ahead if isinstance(weights, Packed) else None
    for rows in passes:
        for first in range(0, tokens, count):
            emit(
                fmt,
                weights,
                acts,
                token_tile,
                range(first, min(first + count, tokens)),
                rows,
                plan,
                isa,
                epilogue,
                ahead,
            )


class Packed(NamedTuple):
    """A tile of a weight in its planes."""

    fmt: Format
    bufs: dict
    tile: object
    isa: type

    def load(self, row, b):
        """The Block of the tile's rows `row`.. ."""
        return load(self.fmt, self.bufs, self.tile, row, b, self.isa)

    def prefetch(self, b, plan):
        """Prefetches the codes plan.ahead bytes ahead of block b."""
        for plane in self.fmt.codes:
            _prefetch(self.bufs[plane], self.tile, b, int(self.bufs[plane].shape[2]), plan)


def emit_weights(weights, first, held, acts: Acts, plan, isa, tiles, emit):
    """Emits a task by emit(sources, sizes), where sources[i](t) is tile first + t of weights[i] in a form that
    `emit_tile` takes, and sizes are those of the parts of a tile of tokens that are worth their code.

    weights: [(format, planes)], all of one kind; held: tiles of rows of the task; tiles: tiles of tokens.
    """
    packed = [lambda t, fmt=fmt, bufs=bufs: Packed(fmt, bufs, T.Bind(first + t), isa) for fmt, bufs in weights]
    if not all(unpacks(fmt, plan) for fmt, _ in weights):
        emit(packed, parts(acts.p))
        return
    with T.If(tiles >= plan.unpack):
        with T.Then():
            # Of that many tiles, the last one's unused tokens do not count.
            emit([Unpacked(fmt, bufs, first, held, acts.k, isa).at for fmt, bufs in weights], [acts.p])
        with T.Else():
            emit(packed, parts(acts.p))


class _Sums:
    """Float32 accumulators in registers: buffers of one vector each, which LLVM promotes."""

    def __init__(self, count, lanes):
        self.index, self.lanes = at(0, lanes), lanes
        self.bufs = [local(lanes) for _ in range(count)]
        for i in range(count):
            self.put(i, splat(T.float32(0), lanes))

    def get(self, i):
        return self.bufs[i][self.index]

    def put(self, i, x):
        store(self.bufs[i], x, self.index)


def _prefetch(buf, tile, block, size, plan):
    """Prefetches `size` elements, plan.ahead bytes ahead of [tile, block, 0]."""
    width = DataType(buf.dtype).bits // 8
    for line in range(0, size if plan.ahead else 0, LINE // width):
        prefetch(buf, tile, block, line, ahead=plan.ahead // width, locality=plan.locality)


def _emit_int8(fmt, weights, acts, token_tile, tokens, rows, plan, isa, epilogue, ahead):
    count, interleave = len(rows), 1 if acts.p == 1 else interleave_of(fmt, plan)
    sums = _Sums(len(tokens) * count, isa.lanes)

    def block(b):
        if ahead:
            weights.prefetch(b, ahead)
        blocks = [weights.load(row, b) for row in rows]
        for i in range(0, len(tokens), interleave):
            _emit_dots(fmt, blocks, acts, token_tile, b, tokens[i : i + interleave], sums, i * count, isa)

    unroll = largest_divisor(plan.unroll, acts.k // BLOCK) if acts.p == 1 else 1
    with T.serial(acts.k // BLOCK // unroll) as b:
        for i in range(unroll):
            block(b * unroll + i if unroll > 1 else b)
    for i, token in enumerate(tokens):
        for r, row in enumerate(rows):
            epilogue(token, row, sums.get(i * count + r))


def _emit_dots(fmt, blocks, acts, token_tile, b, tokens, sums, first, isa):
    """Adds the products of block b, the tokens' dot products interleaved, to `sums` from place `first` on: [token,
    register of rows]. blocks: the Block of each register of rows."""
    lanes, parts, size, zero = isa.lanes, groups(fmt), step(fmt, isa), zero_point(fmt, isa)
    # rows of S with d*sum(q) and the bits of -sum(q) of each group
    scaled_sum, minus_sum = ([1], [2]) if parts == 1 else ([3, 4], [5, 6])
    quads = [[acts.quads[token_tile, b, token, j] for j in range(QUADS)] for token in tokens]
    totals = [[None] * len(blocks) for _ in tokens]
    for g in range(parts):
        starts = [acts.si[token_tile, b, minus_sum[g], token] * zero if zero else T.int32(0) for token in tokens]
        dots = [[splat(start, lanes)] * len(blocks) for start in starts]
        for j in range(g * QUADS // parts, (g + 1) * QUADS // parts, size):
            dots = isa.dot(
                dots, [block.weights[j : j + size] for block in blocks], [mine[j : j + size] for mine in quads]
            )
        for total, dot in zip(totals, dots, strict=True):
            for r, block in enumerate(blocks):
                part = widen(dot[r], lanes) * block.scales[g]
                total[r] = T.Bind(part if total[r] is None else total[r] + part)
    for t, token in enumerate(tokens):
        d = splat(acts.s[token_tile, b, 0, token], lanes)
        for r, block in enumerate(blocks):
            total = sums.get(first + t * len(blocks) + r) + totals[t][r] * d
            for g, offset in enumerate(block.offsets):
                total = total + offset * splat(acts.s[token_tile, b, scaled_sum[g], token], lanes)
            sums.put(first + t * len(blocks) + r, total)


def _emit_float(fmt, weights, acts, token_tile, tokens, rows, plan, isa, epilogue, ahead):
    W, tile = weights.bufs["W"], weights.tile
    lanes, count = isa.lanes, len(rows)
    # Independent sums hide the latency of additions. With float32 weights, as routers have, there is one sum: a column
    # is a cache line, which takes longer to come than an addition, and a row's sum is the same alone and in a tile.
    chains = FLOAT_UNROLL if acts.p == 1 and fmt.name != "f32" else 1
    sums = _Sums(len(tokens) * count * chains, lanes)
    read = {"f32": widen, "f16": isa.half, "bf16": bf16}[fmt.name]

    def columns(base, width):
        for c in range(width):
            x = [splat(acts.x[token_tile * acts.p + i, base + c], lanes) for i in tokens]
            for r, row in enumerate(rows):
                w = read(W[tile, base + c, at(row, lanes)], lanes)
                for i, factor in enumerate(x):
                    slot = (i * count + r) * chains + c % chains
                    sums.put(slot, sums.get(slot) + w * factor)

    whole, rest = divmod(acts.k, FLOAT_UNROLL)
    with T.serial(whole) as b:
        if ahead:
            _prefetch(W, tile, b * FLOAT_UNROLL, FLOAT_UNROLL * ROWS, ahead)
        columns(b * FLOAT_UNROLL, FLOAT_UNROLL)
    columns(whole * FLOAT_UNROLL, rest)
    for i, token in enumerate(tokens):
        for r, row in enumerate(rows):
            first, *others = (sums.get((i * count + r) * chains + c) for c in range(chains))
            epilogue(token, row, sum(others, first))
