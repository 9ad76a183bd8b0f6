"""Linear layers on the CPU: y[m, n] = sum over k of w[n, k] * x[m, k], decode (m = 1) and prefill from one packed
weight.

In: `state` int32[4] (position, live tokens, 0, 0), activations (int8 formats: the planes A and S of `quantize.py`;
float formats: X float32 [m, k]), weights in planes of 16-row tiles (`planes.py`). Out: Y float32 [m, n padded to 16],
bias and residual added.

A lane is a row of the weight. The tile routine (`emit_tile`) computes 16 rows by P tokens: weight registers of a block
of columns serve P tokens, activations are broadcast from memory, accumulators stay in registers. It hands them to an
epilogue, so `gate_up.py` shares it. Decode is bound by memory: one pass over the weight with prefetches. In prefill a
task holds several row tiles, whose weights stay in the L2 cache while the token tiles pass by.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from tvm import DataType
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.isa import QUADS
from mlc_amd.schedules.cpu.kernel import kernel, live_rows
from mlc_amd.schedules.cpu.load import groups, load, step, zero_point
from mlc_amd.schedules.cpu.planes import BLOCK, ROWS, emit_planes, plane_bytes, planes
from mlc_amd.schedules.cpu.quantize import act_args
from mlc_amd.schedules.cpu.unpack import Unpacked, unpacked_bytes
from mlc_amd.schedules.cpu.vector import at, bf16, local, opaque, prefetch, registers, splat, store, widen
from mlc_amd.schedules.formats import Format, lookup

FLOAT_UNROLL = 4  # columns of a float kernel's loop step, and in decode independent sums
FLOAT_TOKENS = 8  # tokens of a float kernel's tile: rows of X a power of two apart share the 8 ways of a level 1 cache
LARGE = 512 << 10  # bytes of weights from which on a decode kernel prefetches further ahead


@dataclass(frozen=True)
class Plan:
    """How a linear layer of one row, or a gate/up, goes through its weights. No plan changes the order of additions.

    unroll    blocks of 32 columns in a step of the loop
    ahead     bytes that are prefetched ahead of the loads, 0: none
    locality  cache levels that the prefetch fills, see `vector.prefetch`; 0 leaves L2 and L3 to the rest of the model
    """

    unroll: int
    ahead: int
    locality: int


@dataclass(frozen=True)
class PrefillPlan:
    """How a linear layer of many rows, or a gate/up, is divided into tasks and register blocks. No plan changes the
    order of additions.

    tokens      rows whose sums are in registers at once, at most a tile of the activations; float formats: at most
                FLOAT_TOKENS
    interleave  of these, rows whose int8 dot products are interleaved, a divisor of `tokens`: independent sums hide the
                latency of multiply-add instructions where the out-of-order window is too short; float formats: of no
                effect; formats with two scales a block: at most 2, for they need more registers and have two dot
                products for each row to begin with
    task        KB of weights of a task, unpacked ones if they are: a share of the L2 cache
    tasks       tasks below which they become smaller than `task`; gate/up: its tasks are always 32 rows of both weights
    unpack      tiles of tokens from which on int8 weights of a task are unpacked once for all of them, and not for
                each; 0: never
    """

    tokens: int
    interleave: int
    task: int
    tasks: int
    unpack: int


def default_plan(isa, m, p, segments, k):
    """The plan for m tokens in activation tiles of p and weights of these (format, rows) by k columns: a Plan in decode
    (m = 1), else a PrefillPlan."""
    if m == 1:
        # Prefetches past the end of a thread's share are wasted: they should be few of all.
        large = sum(plane_bytes(fmt, n, k) for fmt, n in segments) >= LARGE
        return Plan(unroll=1, ahead=isa.ahead * 2 if large else isa.ahead, locality=2)
    return PrefillPlan(
        tokens=p, interleave=min(isa.interleave, p), task=isa.task, tasks=32, unpack=_unpack_choices(isa, m, p)[-1]
    )


def _unpack_choices(isa, m, p):
    """Values of PrefillPlan.unpack: never, and, where m tokens are ever enough, the machine's number of tiles."""
    return (0, isa.unpack) if m >= isa.unpack * p else (0,)


def choices(isa, m, p):
    """Values of the plan's fields to try, by name."""
    if m == 1:
        return {"unroll": (1, 2, 4), "ahead": (0, 1024, 2048, 4096, 8192, 16384), "locality": (0, 2, 3)}
    return {
        "tokens": tuple(t for t in (4, 8, 16) if t <= p),
        "interleave": tuple(t for t in (1, 2, 4, 8) if t <= min(p, isa.registers // 4)),
        "task": (64, 128, 256, 512, 1024),
        "tasks": (8, 16, 32, 64),
        "unpack": _unpack_choices(isa, m, p),
    }


class Acts(NamedTuple):
    """The activations of m tokens in tiles of p. Int8: `quads` int32 [MT,KB,P,8] (A seen as int32), `s` float32 and
    `si` int32 [MT,KB,8,P]. Float: `x` float32 [m,k]."""

    p: int
    k: int
    quads: object = None
    s: object = None
    si: object = None
    x: object = None


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
    """The number of token tiles with live tokens, 1 in decode."""
    return 1 if m == 1 else T.Bind((live_rows(state, m) + (p - 1)) // p)


def _divisor(limit, count):
    """The largest divisor of `count` that is at most `limit`, at least 1."""
    return next(i for i in range(max(1, min(limit, count)), 0, -1) if count % i == 0)


def row_tiles(fmt, n, k, plan):
    """Tiles of 16 rows that a task works on, a divisor of all tiles. Decode: 1; prefill: as many as the plan's `task`
    holds, unless that makes too few tasks."""
    tiles = -(-n // ROWS)
    if isinstance(plan, Plan):
        return 1
    size = unpacked_bytes(fmt, ROWS, k) if unpacks(fmt, plan) else plane_bytes(fmt, ROWS, k)
    return _divisor(min((plan.task << 10) // size, tiles // plan.tasks), tiles)


def interleave_of(fmt, plan):
    """The plan's `interleave` for a format."""
    return min(plan.interleave, 2) if groups(fmt) > 1 else plan.interleave


def unpacks(fmt, plan):
    """Whether a weight may be unpacked before its products."""
    return fmt.kind == "int8" and isinstance(plan, PrefillPlan) and bool(plan.unpack)


def emit_tile(fmt: Format, weights, acts: Acts, token_tile, plan, isa, epilogue):
    """16 rows by acts.p tokens. weights: Packed or Unpacked.at. Calls epilogue(i, row, x) per token i of the tile and
    register: x are the results of isa.lanes rows, from row `row` of the tile on. Prefill makes one pass for each
    register of a tile, decode one for all."""
    registers = [r * isa.lanes for r in range(ROWS // isa.lanes)]
    passes, tokens = ([registers], 1) if acts.p == 1 else ([[r] for r in registers], plan.tokens)
    emit = {"int8": _emit_int8, "float": _emit_float}[fmt.kind]
    if fmt.kind == "float":
        tokens = min(tokens, FLOAT_TOKENS)
    for rows in passes:
        for first in range(0, acts.p, tokens):
            emit(fmt, weights, acts, token_tile, range(first, min(first + tokens, acts.p)), rows, plan, isa, epilogue)


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


def emit_weights(weights, first, held, k, plan, isa, tiles, emit):
    """Emits a task by emit(sources), where sources[i](t) is tile first + t of weights[i] in a form that `emit_tile`
    takes.

    weights: [(format, planes)], all of one kind; held: how many tiles of rows the task has; tiles: how many of tokens
    there are.
    """
    packed = [lambda t, fmt=fmt, bufs=bufs: Packed(fmt, bufs, T.Bind(first + t), isa) for fmt, bufs in weights]
    if not all(unpacks(fmt, plan) for fmt, _ in weights):
        emit(packed)
        return
    with T.If(tiles >= plan.unpack):
        with T.Then():
            emit([Unpacked(fmt, bufs, first, held, k, isa).at for fmt, bufs in weights])
        with T.Else():
            emit(packed)


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
    for line in range(0, size if plan.ahead else 0, 64 // width):
        prefetch(buf, tile, block, line, ahead=plan.ahead // width, locality=plan.locality)


def _emit_int8(fmt, weights, acts, token_tile, tokens, rows, plan, isa, epilogue):
    count, interleave = len(rows), 1 if acts.p == 1 else interleave_of(fmt, plan)
    sums = _Sums(len(tokens) * count, isa.lanes)

    def block(b):
        if acts.p == 1:
            weights.prefetch(b, plan)
        blocks = [weights.load(row, b) for row in rows]
        for i in range(0, len(tokens), interleave):
            _emit_dots(fmt, blocks, acts, token_tile, b, tokens[i : i + interleave], sums, i * count, isa)

    unroll = _divisor(plan.unroll, acts.k // BLOCK) if acts.p == 1 else 1
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


def _emit_float(fmt, weights, acts, token_tile, tokens, rows, plan, isa, epilogue):
    W, tile = weights.bufs["W"], weights.tile
    lanes, count = isa.lanes, len(rows)
    chains = FLOAT_UNROLL if acts.p == 1 else 1  # independent sums hide the latency of additions
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
        if acts.p == 1:
            _prefetch(W, tile, b * FLOAT_UNROLL, FLOAT_UNROLL * ROWS, plan)
        columns(b * FLOAT_UNROLL, FLOAT_UNROLL)
    columns(whole * FLOAT_UNROLL, rest)
    for i, token in enumerate(tokens):
        for r, row in enumerate(rows):
            first, *others = (sums.get((i * count + r) * chains + c) for c in range(chains))
            epilogue(token, row, sum(others, first))


def _bias(bias, first, n, lanes):
    """bias[first], ...: the last tile's index stays inside the n biases."""
    index = at(first, lanes)
    return bias[index if n % ROWS == 0 else T.min(index, splat(T.int32(n - 1), lanes))]


def _tasks(fmt, n, k, plan):
    """Steps of a segment's parallel loop."""
    return -(-n // ROWS) // row_tiles(fmt, n, k, plan)


def _emit_segment(fmt, n, bufs, bias, residual, Y, acts, state, m, plan, isa):
    held = row_tiles(fmt, n, acts.k, plan)
    with T.parallel(_tasks(fmt, n, acts.k, plan)) as task:
        tiles, first = token_tiles(state, m, acts.p), T.Bind(task * held)

        def emit(weights):
            with T.serial(tiles) as token_tile, T.serial(held) as t:
                _emit_results(fmt, n, weights[0](t), bias, residual, Y, acts, T.Bind(first + t), token_tile, plan, isa)

        emit_weights([(fmt, bufs)], first, held, acts.k, plan, isa, tiles, emit)


def _emit_results(fmt, n, weights, bias, residual, Y, acts, tile, token_tile, plan, isa):
    """A tile of rows for a tile of tokens."""

    def epilogue(i, row, x):
        token, column = token_tile * acts.p + i, tile * ROWS + row
        if bias is not None:
            x = x + _bias(bias, column, n, isa.lanes)
        if residual is not None:
            x = residual[token, at(column, isa.lanes)] + x
        store(Y, x, token, at(column, isa.lanes))

    if acts.p == 1:
        emit_tile(fmt, weights, acts, token_tile, plan, isa, epilogue)
        return
    # A loop of its own: LLVM would load the residual's rows, which are in no cache, before the products, and spill them
    # to the stack.
    made = registers(acts.p, ROWS)
    emit_tile(fmt, weights, acts, token_tile, plan, isa, lambda i, row, x: store(made, x, i, at(row, isa.lanes)))
    with T.serial(opaque(T.int32(acts.p))) as i:
        for row in range(0, ROWS, isa.lanes):
            epilogue(i, row, made[i, at(row, isa.lanes)])


def check_tiles(m, p):
    """ValueError unless m tokens make whole tiles of p."""
    if m % p:
        raise ValueError(f"{m} tokens do not make whole tiles of {p}")


def linear(segments, k, m, p, biases, residual, isa, name, plan=None):
    """PrimFunc (state, A, S | X, planes of segment 0, [bias f32 [n]], planes of segment 1, ..., [R f32 [m, npad]], Y_0
    f32 [m, npad], ...).

    segments: list of (format name or Format, n), all int8 or all float; they share the activations (q, k and v of a
    layer) and the launch. p: tokens of an activation tile, a divisor of m (1 in decode). biases: one flag per segment.
    residual: Y = R + result, for one segment. With m > 1, only the tiles that hold the first state[1] tokens are
    computed. npad = n rounded up to a multiple of 16; the columns from n on hold no meaning. plan: of `default_plan`'s
    type; None: that one. ValueError for segments that cannot share a launch.
    """
    segments = [(lookup(fmt), n) for fmt, n in segments]
    kinds = {fmt.kind for fmt, _ in segments}
    check_tiles(m, p)
    if len(kinds) != 1 or len(biases) != len(segments) or (residual and len(segments) > 1):
        raise ValueError(
            f"segments {[(f.name, n) for f, n in segments]}, biases {biases}, residual {residual} do not make one "
            "launch"
        )
    plan = plan or default_plan(isa, m, p, segments, k)
    padded = [-(-n // ROWS) * ROWS for _, n in segments]
    with kernel(name) as (builder, state):
        params = act_params(m, k, p, kinds.pop())
        weights = []
        for i, ((fmt, n), has_bias) in enumerate(zip(segments, biases, strict=True)):
            bufs = weight_args(fmt, n, k, f"W{i}_")
            weights.append((bufs, T.arg(f"bias{i}", T.buffer((n,), "float32")) if has_bias else None))
        R = T.arg("R", T.buffer((m, padded[0]), "float32")) if residual else None
        outputs = [T.arg(f"Y{i}", T.buffer((m, n), "float32")) for i, n in enumerate(padded)]
        acts = emit_acts(params, p, k)
        # loops of one launch of the thread pool; a loop of one step is none to TVM, and would run in every thread
        one_launch = len(segments) > 1 and all(_tasks(fmt, n, k, plan) > 1 for fmt, n in segments)
        with T.attr(T.int32(0), "pragma_parallel_launch_point", 1) if one_launch else nullcontext():
            for (fmt, n), (bufs, bias), Y in zip(segments, weights, outputs, strict=True):
                _emit_segment(fmt, n, bufs, bias, R, Y, acts, state, m, plan, isa)
    return builder.get()
