"""The inner part of the CPU's matrix products: `Products.emit_tile` multiplies 16 rows of a weight by the tokens of an
activation tile, and passes the results to a function of the caller, the epilogue (linear.py).

A vector lane is a row of the weight. The weight registers of a block of columns are used for all tokens of the
activation tile. Activations are broadcast from memory; sums stay in registers if there are enough.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tvm import DataType
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.base.arch import QUADS, Arch, Isa
from mlc_amd.schedules.cpu.base.kernel import live_rows
from mlc_amd.schedules.cpu.base.vector import (
    LINE,
    at,
    bf16,
    largest_divisor,
    local,
    prefetch,
    registers,
    splat,
    store,
    widen,
)
from mlc_amd.schedules.cpu.linear.linear_plan import (
    UNROLLED,
    AnyPlan,
    MatrixProduct,
    Plan,
    default_plan,
    float_tokens,
    interleave_of,
    loops_over_tokens,
    parts,
    prefetch_plan,
    token_tile,
    unpacks,
)
from mlc_amd.schedules.cpu.linear.load import Block, Unpacked, UnpackedTile, groups, load, step, zero_point
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS, emit_planes, planes
from mlc_amd.schedules.cpu.linear.quantize import act_args
from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.tir import Buffer, Expr

FLOAT_UNROLL = 4  # columns in a loop step of a float kernel; in decode with 16-bit weights, also independent sums


class Matrix(NamedTuple):
    """A weight: its format, and its planes by name, which are parameters of the kernel."""

    fmt: Format
    planes: dict[str, Buffer]


def weight_args(fmt: Format, n: int, k: int, prefix: str) -> Matrix:
    """Declares the planes of an n x k matrix. Raises UserError for planes with too many elements for 32-bit indices."""
    if max(prod(shape) for shape, _ in planes(fmt, n, k).values()) >= 1 << 31:
        raise UserError(
            f"a weight of {n} x {k} is too large as {fmt.name} for one kernel; use a smaller quantization of the model"
        )
    return Matrix(fmt, emit_planes(fmt, n, k, prefix))


class _Columns(NamedTuple):
    """A view of a buffer: indices of its second dimension count from `first`."""

    buffer: Buffer
    first: Expr

    def __getitem__(self, index):  # type: ignore[override]
        row, column, *rest = index
        return self.buffer[(row, self.first + column, *rest)]


class Acts(NamedTuple):
    """The activations of m tokens in tiles of p. int8 formats: `quads` int32 [MT,KB,P,8] is A of quantize.py viewed as
    int32; `s` float32 [MT,KB,8,P] is S, `si` the same viewed as int32. Float formats: `x` float32 [m,k]."""

    p: int
    k: int
    quads: Buffer = None
    s: Buffer = None
    si: Buffer = None
    x: Buffer = None

    def columns(self, first: Expr, count: int) -> "Acts":
        """The activations of `count` columns from `first` on. For int8 both are multiples of 32."""
        if self.x is not None:
            return Acts(self.p, count, x=_Columns(self.x, first))
        block = first // BLOCK
        return Acts(self.p, count, *(_Columns(buffer, block) for buffer in (self.quads, self.s, self.si)))


def act_params(op: MatrixProduct, arch: Arch, rows: int, columns: int) -> tuple[Buffer, ...]:
    """Declares the parameters of the activations: (A, S), or (X,) for float formats. Raises ValueError if weights are
    of both kinds, and unless the rows are whole tiles."""
    kinds, p = {fmt.kind for fmt, _ in op.weights}, token_tile(op, arch)
    if len(kinds) > 1 or rows % p:
        raise ValueError(f"weights of formats {op.formats} and {rows} rows in tiles of {p} cannot share a launch")
    return act_args(rows, columns, p) if "int8" in kinds else (T.arg("X", T.buffer((rows, columns), "float32")),)


class TokenTiles(NamedTuple):
    """The tiles of tokens of a task. count: their number. each(body): emits the loop over them, in which it calls
    body(number of the tile, number of its live tokens)."""

    count: Expr
    each: Callable[[Callable[[Expr, Expr], None]], None]


def token_tiles(state: Buffer, m: int, p: int) -> TokenTiles:
    """The tiles of a step that have live tokens; in decode one tile with one token."""
    live = live_rows(state, m)
    count = 1 if m == 1 else T.Bind((live + (p - 1)) // p)

    def each(body: Callable[[Expr, Expr], None]) -> None:
        with T.serial(count) as tile:
            body(tile, 1 if m == 1 else T.Bind(T.min(live - tile * p, T.int32(p))))

    return TokenTiles(count, each)


class Parts(NamedTuple):
    """The parts of a tile of tokens for which a kernel has code. sizes: numbers of first tokens, ascending; their sums
    are in registers. rest: the number of tokens of a larger part; None: a loop over the live tokens instead."""

    sizes: list[int]
    rest: int | None

    def emit(self, live: Expr, emit: Callable[[Expr], None]) -> None:
        """Emits the code that selects the smallest part that holds the live tokens. emit(tokens): emits the code of a
        part."""
        if not self.sizes:
            emit(live if self.rest is None else self.rest)
            return
        size, *others = self.sizes
        with T.If(live <= size):
            with T.Then():
                emit(size)
            with T.Else():
                Parts(others, self.rest).emit(live, emit)


class Packed(NamedTuple):
    """A tile of a weight in planes."""

    fmt: Format
    planes: dict[str, Buffer]
    tile: Expr
    isa: Isa

    def load(self, row: int, b: Expr) -> Block:
        """The Block number b of the rows from `row` on of the tile."""
        return load(self.fmt, self.planes, self.tile, row, b, self.isa)

    def prefetch(self, b: Expr, plan: Plan) -> None:
        """Prefetches the codes that are plan.ahead bytes after those of block b."""
        for plane in self.fmt.codes:
            buffer = self.planes[plane]
            _prefetch(buffer, self.tile, b, int(buffer.shape[2]), plan)


Tile = Packed | UnpackedTile
Source = Callable[[Expr], Tile]  # source(t): tile number t of a task
Epilogue = Callable[[Expr, Expr, Expr], None]  # see `Products.emit_tile`
EmitTask = Callable[[Sequence[Source], Parts], None]  # see `Products.emit_task`


@dataclass(frozen=True)
class Products:
    """The products of a kernel's weights and activations.

    acts    the activations
    plan    the kernel's plan
    ahead   the plan from which prefetches of packed weights take `ahead` and `locality`
    shared  all tokens use the activations of the first token
    """

    acts: Acts
    plan: AnyPlan
    ahead: Plan
    isa: Isa
    shared: bool = False

    def emit_task(self, weights: list[Matrix], first: Expr, held: int, tiles: TokenTiles, emit: EmitTask) -> None:
        """Emits a task of `held` tiles of rows. weights: of one kind, int8 or float. emit(sources, parts): emits the
        products; sources[i](t) is tile first + t of weights[i], for `emit_tile`. emit is called twice if the kernel
        has code for packed and for unpacked weights."""
        packed = [lambda t, matrix=matrix: Packed(*matrix, T.Bind(first + t), self.isa) for matrix in weights]
        *sizes, whole = parts(self.acts.p)
        loops = all(loops_over_tokens(matrix.fmt, self.plan) for matrix in weights)
        some = Parts([size for size in sizes if size <= UNROLLED], None) if loops else Parts(sizes, whole)
        if isinstance(self.plan, Plan) or not all(unpacks(matrix.fmt, self.plan) for matrix in weights):
            emit(packed, some)
            return
        with T.If(tiles.count >= self.plan.unpack):
            with T.Then():
                # With so many tiles it does not matter that unused tokens of the last tile are computed.
                unpacked = [Unpacked(*matrix, first, held, self.acts.k, self.isa) for matrix in weights]
                emit([functools.partial(UnpackedTile, all_) for all_ in unpacked], Parts([], some.rest))
            with T.Else():
                emit(packed, some)

    def emit_tile(self, weights: Tile, token_tile: Expr, tokens: Expr, epilogue: Epilogue) -> None:
        """Emits the products of a tile of 16 rows and the first `tokens` tokens of a tile of acts.p tokens. tokens: a
        number, or an expression if `Parts.rest` is None. For each token i and each register of rows it calls
        epilogue(i, row, x): x is a float32 vector, the results of isa.lanes rows from `row` on. The order of a token's
        additions does not depend on `tokens`."""
        lanes, plan, whole = self.isa.lanes, self.plan, weights.fmt.kind == "int8"
        emit = self._emit_int8 if whole else self._emit_float
        token_tile = T.int32(0) if self.shared else token_tile
        if isinstance(plan, Plan):
            for token in range(tokens):
                emit(weights, token_tile, range(token, token + 1), list(range(0, ROWS, lanes)), epilogue)
            return
        if not isinstance(tokens, int):
            size = largest_divisor(interleave_of(weights.fmt, plan), self.acts.p)
            self._emit_int8_loop(weights, token_tile, tokens, size, epilogue)
            return
        count = plan.tokens or UNROLLED if whole else float_tokens(plan)
        with T.serial(ROWS // lanes) as register:
            row = register * lanes
            for first in range(0, tokens, count):
                emit(weights, token_tile, range(first, min(first + count, tokens)), [row], epilogue)

    def _emit_int8_loop(self, weights: Tile, token_tile: Expr, tokens: Expr, size: int, epilogue: Epilogue) -> None:
        """`emit_tile` with the sums in memory. If there are too few registers for the sums of a tile, this is as fast,
        and less code. A step of the loop over tokens has `size` tokens and all 16 rows; the last step may include
        tokens that are not live."""
        lanes, rows = self.isa.lanes, range(0, ROWS, self.isa.lanes)
        sums, each = _StackSums(self.acts.p * len(rows), lanes), size * len(rows)
        steps = T.Bind((tokens + (size - 1)) // size)
        with T.serial(steps * each) as i:
            sums.put(i, splat(T.float32(0), lanes))
        with T.serial(self.acts.k // BLOCK) as b:
            if isinstance(weights, Packed):
                weights.prefetch(b, self.ahead)
            blocks = [weights.load(row, b) for row in rows]
            with T.serial(steps) as i:
                place = token_tile, b, [i * size + j for j in range(size)]
                self._emit_dots(weights.fmt, blocks, place, sums, i * each)
        with T.serial(tokens) as i:
            for r, row in enumerate(rows):
                epilogue(i, row, sums.get(i * len(rows) + r))

    def _emit_int8(self, weights: Tile, token_tile: Expr, tokens: range, rows: list[Expr], epilogue: Epilogue) -> None:
        plan, blocks = self.plan, self.acts.k // BLOCK
        unroll = largest_divisor(plan.unroll, blocks) if isinstance(plan, Plan) else 1
        interleave = 1 if isinstance(plan, Plan) else interleave_of(weights.fmt, plan)
        sums, count = _Sums(len(tokens) * len(rows), self.isa.lanes), len(rows)
        with T.serial(blocks // unroll) as step:
            for j in range(unroll):
                b = step * unroll + j if unroll > 1 else step
                if isinstance(weights, Packed):
                    weights.prefetch(b, self.ahead)
                loaded = [weights.load(row, b) for row in rows]
                for i in range(0, len(tokens), interleave):
                    place = token_tile, b, tokens[i : i + interleave]
                    self._emit_dots(weights.fmt, loaded, place, sums, i * count)
        for i, token in enumerate(tokens):
            for r, row in enumerate(rows):
                epilogue(token, row, sums.get(i * count + r))

    def _emit_dots(
        self, fmt: Format, blocks: list[Block], place: tuple[Expr, Expr, Sequence[Expr]], sums: "_Sums", first: Expr
    ) -> None:
        """Adds the products of a block to sums [token, register of rows], from number `first` on. The dot products of
        the tokens are interleaved. blocks: the Block of each register of rows. place: (tile, block, tokens) of the
        activations."""
        acts, isa, (token_tile, b, tokens) = self.acts, self.isa, place
        lanes, parts, size, zero = isa.lanes, groups(fmt), step(fmt, isa), zero_point(fmt, isa)
        # the rows of S with d*sum(q) of each group, and those with -sum(q) as int32
        scaled_sum, minus_sum = ([1], [2]) if parts == 1 else ([3, 4], [5, 6])
        quads = [[acts.quads[token_tile, b, token, j] for j in range(QUADS)] for token in tokens]
        totals: list[list[Expr]] = [[None] * len(blocks) for _ in tokens]
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

    def _emit_float(self, weights: Tile, token_tile: Expr, tokens: range, rows: list[Expr], epilogue: Epilogue) -> None:
        assert isinstance(weights, Packed)
        W, tile, acts = weights.planes["W"], weights.tile, self.acts
        lanes, count, name = self.isa.lanes, len(rows), weights.fmt.name
        # Independent sums hide the latency of additions. For float32 weights, as routers have, there is one sum: a
        # column is a cache line, whose load takes longer than an addition. And with one sum, a row's result has the
        # same bits for p = 1 and p > 1.
        chains = FLOAT_UNROLL if acts.p == 1 and name != "f32" else 1
        sums = _Sums(len(tokens) * count * chains, lanes)
        read = {"f32": widen, "f16": self.isa.half, "bf16": bf16}[name]

        def columns(base: Expr, width: int) -> None:
            for c in range(width):
                x = [splat(acts.x[token_tile * acts.p + i, base + c], lanes) for i in tokens]
                for r, row in enumerate(rows):
                    w = read(W[tile, base + c, at(row, lanes)], lanes)
                    for i, factor in enumerate(x):
                        slot = (i * count + r) * chains + c % chains
                        sums.put(slot, sums.get(slot) + w * factor)

        whole, rest = divmod(acts.k, FLOAT_UNROLL)
        with T.serial(whole) as b:
            _prefetch(W, tile, b * FLOAT_UNROLL, FLOAT_UNROLL * ROWS, self.ahead)
            columns(b * FLOAT_UNROLL, FLOAT_UNROLL)
        columns(whole * FLOAT_UNROLL, rest)
        for i, token in enumerate(tokens):
            for r, row in enumerate(rows):
                first, *others = (sums.get((i * count + r) * chains + c) for c in range(chains))
                epilogue(token, row, sum(others, first))


def emit_products(op: MatrixProduct, arch: Arch, plan: AnyPlan | None, params: Sequence[Buffer]) -> Products:
    """The Products of an operator. params: from `act_params`. plan: None for the default. To be called after the last
    parameter is declared, because it declares views."""
    p, plan = token_tile(op, arch), plan or default_plan(op, arch)
    if len(params) == 1:
        acts = Acts(p, int(params[0].shape[1]), x=params[0])
    else:
        A, S = params
        quads = T.decl_buffer((*A.shape[:-1], QUADS), "int32", data=A.data)
        acts = Acts(p, int(A.shape[1]) * BLOCK, quads, S, T.decl_buffer(S.shape, "int32", data=S.data))
    return Products(acts, plan, prefetch_plan(op, arch.isa, plan), arch.isa)


class _Sums:
    """`count` float32 vectors of sums in registers: each is a buffer of its own, which LLVM promotes to a register.
    Indices are known at compile time."""

    def __init__(self, count: int, lanes: int):
        self.index, self.lanes = at(0, lanes), lanes
        self.bufs = [local(lanes) for _ in range(count)]
        for i in range(count):
            self.put(i, splat(T.float32(0), lanes))

    def get(self, i: Expr) -> Expr:
        return self.bufs[i][self.index]

    def put(self, i: Expr, x: Expr) -> None:
        store(self.bufs[i], x, self.index)


class _StackSums(_Sums):
    """`count` float32 vectors of sums on the stack. Indices may be expressions."""

    def __init__(self, count: int, lanes: int):
        self.lanes, self.buffer = lanes, registers(count, lanes)

    def get(self, i: Expr) -> Expr:
        return self.buffer[i, at(0, self.lanes)]

    def put(self, i: Expr, x: Expr) -> None:
        store(self.buffer, x, i, at(0, self.lanes))


def _prefetch(buf: Buffer, tile: Expr, block: Expr, size: int, plan: Plan) -> None:
    """Prefetches `size` elements that are plan.ahead bytes after buf[tile, block, 0]."""
    width = DataType(buf.dtype).bits // 8
    for line in range(0, size if plan.ahead else 0, LINE // width):
        prefetch(buf, tile, block, line, ahead=plan.ahead // width, locality=plan.locality)
