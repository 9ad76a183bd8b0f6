"""The products of rows of weights and the activations of a few tokens, by the lanes of a wave: the inner part of
`gemv.py`.

A group of lanes processes the units (`load.py`) of several rows of weights, interleaved, so that a load instruction
reads contiguous memory. At the end, lane shuffles reduce the sums. Each weight is loaded and decoded once for all
tokens.

`emit_norm` computes the norm of one token's activations in the same launch. Each workgroup computes the whole norm;
this takes less time than a launch of its own if there are few workgroups, fast caches and slow launches
(`norm_place.py`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.device import IN_ORDER, barrier, dot4, fma, schedule_fence, shuffle_xor, wave_sum
from mlc_amd.schedules.gpu.base.norm import row_scale, scaled, square, workgroup_sum
from mlc_amd.schedules.gpu.base.planes import BLOCK, Planes
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import FIELDS, WIDTH, load_columns, quantize_block
from mlc_amd.schedules.gpu.base.registers import at, filled, lane_of, put, vector
from mlc_amd.schedules.gpu.base.step import when
from mlc_amd.schedules.gpu.linear import load
from mlc_amd.schedules.gpu.linear.load import QUADS
from mlc_amd.schedules.tir import Buffer, Expr

COLUMNS = 16  # columns of a thread at a time, whose results are 16 bytes
NORM_WAVES = 8  # least number of waves of a workgroup with a norm, if the arch allows so many
STEPS = 4  # upper limit of a thread's steps, whose columns stay in registers


class Strip(NamedTuple):
    """One row of a weight, which the lanes of a group multiply."""

    fmt: Format
    planes: Planes
    row: Expr


class Acts(NamedTuple):
    """The activations of one token: row `token`; its fields of S begin at `first_block`. Int8: `quads` int32 [m, k / 4]
    and `s` float32 [m * KB, 4]. Float: `x` float32 [m, k]."""

    k: int
    quads: Buffer = None
    s: Buffer = None
    x: Buffer = None
    token: Expr = 0
    first_block: Expr | None = None

    def of(self, token: Expr) -> "Acts":
        """The activations of another token. token: an int or a register."""
        first = token * (self.k // BLOCK)
        return self._replace(token=token, first_block=first if isinstance(token, int) else T.Bind(first))

    def first(self, count: int) -> list["Acts"]:
        """The activations of the tokens 0 .. count-1."""
        return [self, *(self.of(token) for token in range(1, count))]

    def words(self, block: Expr) -> list[Expr]:
        """The eight words of a block's q."""
        quads = [T.Bind(self.quads[self.token, at(block * QUADS + j, 4)]) for j in (0, 4)]
        return [T.Bind(lane_of(x, j)) for x in quads for j in range(4)]

    def fields(self, block: Expr) -> list[Expr]:
        """A block's fields of S."""
        own = block if self.first_block is None else self.first_block + block
        found = T.Bind(self.s[own, at(0, FIELDS)])
        return [lane_of(found, j) for j in range(FIELDS)]


class Normed(NamedTuple):
    """`Acts` of one token in shared memory: uint32x4 [k / 16], and float32x4 [KB]."""

    k: int
    quads: Buffer
    s: Buffer

    def words(self, block: Expr) -> list[Expr]:
        found = [T.Bind(self.quads[block * 2 + j]) for j in range(2)]
        return [T.Bind(lane_of(x, j)) for x in found for j in range(4)]

    def fields(self, block: Expr) -> list[Expr]:
        found = T.Bind(self.s[block])
        return [lane_of(found, j) for j in range(FIELDS)]


Tokens = Sequence[Acts | Normed]
Places = Sequence[tuple[Expr, Expr | None]]  # (unit, whether this lane has it; None if all lanes do)


class Block(NamedTuple):
    """A block's activations in registers."""

    quads: list[Expr]  # eight words
    d: Expr
    sums: dict[int, list[Expr]]  # d * sum(q) of all 32 columns or of both halves


def emit_acts(params: Sequence[Buffer], k: int, m: int = 1) -> Acts:
    """The activations of the first of m tokens, from the parameters (A, S) or (X,). To be called after the last
    parameter is declared, because it declares views."""
    if len(params) == 1:
        return Acts(k, x=params[0])
    A, S = params
    quads = T.decl_buffer((m, k // 4), "int32", data=A.data)
    return Acts(k, quads, T.decl_buffer((m * (k // BLOCK), FIELDS), "float32", data=S.data))


def span_of(fmts: Sequence[Format], k: int) -> int:
    """The size of a unit that all formats share: for int8 formats its blocks of 32 columns, for float formats its
    columns."""
    return load.blocks(*fmts) if fmts[0].kind == "int8" else min(load.columns(fmt, k) for fmt in fmts)


def units_of(fmts: Sequence[Format], k: int) -> int:
    """The number of units of a row."""
    return k // (span_of(fmts, k) * (BLOCK if fmts[0].kind == "int8" else 1))


def emit_products(
    strips: Sequence[Strip], tokens: Tokens, lane: Expr, lanes: int, unroll: int, arch: Device
) -> tuple[list[tuple[Expr, Expr, Expr]], Expr]:
    """Computes the products of each strip's row with each token's activations. Returns ([(token, strip, float32
    register)] of this lane, whether it is the first of the lanes with the same ones). lane: number of the lane in its
    group of `lanes`. Strips must be all int8 or all float.

    With one token every lane has all products. With several, products are distributed over the lanes, which exchange
    halves of their sums: c sums over l lanes take about c shuffles instead of c * log2(l). The numbers of strips and
    tokens must then be powers of two."""
    sums = emit_sums(strips, tokens, lane, lanes, unroll, arch)
    if len(tokens) == 1:
        return [(0, i, wave_sum(arch, T.Bind(sums[i]), lanes)) for i in range(len(strips))], lane == 0
    values = [T.Bind(sums[i]) for i in range(len(strips) * len(tokens))]
    width, first = lanes, T.int32(0)
    while width > 1 and len(values) > 1:
        width, half = width // 2, len(values) // 2
        upper = T.Bind((lane & width) != 0)
        pairs = list(zip(values[:half], values[half:], strict=True))
        given = [T.Bind(T.Select(upper, low, high)) for low, high in pairs]
        kept = [T.Bind(T.Select(upper, high, low)) for low, high in pairs]
        values = [T.Bind(own + shuffle_xor(arch, x, width)) for own, x in zip(kept, given, strict=True)]
        first = T.Bind(first + T.Select(upper, T.int32(half), T.int32(0)))
    if width > 1:
        values = [wave_sum(arch, x, width) for x in values]
    places = [T.Bind(first + i) for i in range(len(values))]
    count = len(strips)
    found = [(T.Bind(i // count), T.Bind(i % count), x) for i, x in zip(places, values, strict=True)]
    return found, (lane & (width - 1)) == 0


def emit_sums(strips: Sequence[Strip], tokens: Tokens, lane: Expr, lanes: int, unroll: int, arch: Device) -> Buffer:
    """This lane's part of the products of strips and tokens, in a local buffer: all strips of token 0, of token 1,
    .."""
    fmts, k = [strip.fmt for strip in strips], tokens[0].k
    span, units = span_of(fmts, k), units_of(fmts, k)
    sums = filled(T.float32(0), len(strips) * len(tokens))

    def steps(first: Expr, count: int, partial: bool) -> None:
        """Emits the steps first .. first+count-1. partial: whether the last one has units only for some of the
        lanes."""
        places = []
        for i in range(count):
            unit = (first + i) * lanes + lane
            whole = not partial or i < count - 1
            places.append((T.Bind(unit if whole else T.min(unit, T.int32(units - 1))), None if whole else unit < units))
        _multiply(strips, tokens, places, span, sums, arch)

    total = -(-units // lanes)
    partial = units % lanes != 0
    loops, rest = divmod(total - partial, unroll)
    if loops > 1:
        with T.serial(loops) as step:
            steps(step * unroll, unroll, False)
    elif loops:
        steps(0, unroll, False)
    if rest + partial:
        steps(loops * unroll, rest + partial, partial)
    return sums


def _zero_unless(live: Expr | None, x: Expr) -> Expr:
    return T.Bind(x if live is None else T.Select(live, x, T.float32(0)))


def _floats(token: Acts, unit: Expr, live: Expr | None, width: int) -> list[Expr]:
    """The float32 activations of a unit; 0 if `live` is false."""
    step = min(width, load.LOAD_WORDS)
    x = [T.Bind(token.x[token.token, at(unit * width + j, step)]) for j in range(0, width, step)]
    return [_zero_unless(live, lane_of(v, j) if step > 1 else v) for v in x for j in range(step)]


def _blocks(token: Acts | Normed, unit: Expr, live: Expr | None, span: int) -> list[Block]:
    """The activations of a unit. If `live` is false, factors are 0, and so are products."""
    out = []
    for block in (unit * span + i for i in range(span)):
        words = token.words(block)
        d, whole, *halves = (_zero_unless(live, x) for x in token.fields(block))
        out.append(Block(words, d, {1: [whole], 2: halves}))
    return out


def _multiply(strips: Sequence[Strip], tokens: Tokens, places: Places, span: int, sums: Buffer, arch: Device) -> None:
    """Adds the products of strips and tokens for the units of `places` to `sums`."""
    fmts = [strip.fmt for strip in strips]
    floats = fmts[0].kind == "float"
    fetch: Callable[..., Any] = load.fetch_float if floats else load.fetch
    acts_of: Callable[..., list] = _floats if floats else _blocks
    # One token's activations are loaded together with the weights; those of several would need too many registers.
    loaded = []
    for unit, live in places:
        units = [fetch(s.fmt, s.planes, s.row, unit, span) for s in strips]
        loaded.append((unit, live, units, acts_of(tokens[0], unit, live, span) if len(tokens) == 1 else None))
    for step, (unit, live, units, ready) in enumerate(loaded):
        if step and arch.ordered_steps and not floats:
            schedule_fence(IN_ORDER)
        weights: list = units if floats else [_decoder(fmt, of, arch) for fmt, of in zip(fmts, units, strict=True)]
        for t, token in enumerate(tokens):
            acts = ready or acts_of(token, unit, live, span)
            # d * dot - zero * d * sum(q): the products are shared by all rows
            zeros = {
                fmt.name: [[T.Bind(x * T.float32(-fmt.zero)) for x in block.sums[load.groups(fmt)]] for block in acts]
                for fmt in fmts
                if fmt.zero
            }
            for i, (fmt, own) in enumerate(zip(fmts, weights, strict=True)):
                place = t * len(strips) + i
                total = sums[place]
                terms = zip(own, acts, strict=True) if floats else _terms(fmt, own, acts, zeros.get(fmt.name), arch)
                for a, b in terms:
                    total = fma(a, b, total)
                T.buffer_store(sums, total, [place])


Decoder = Callable[[int], tuple[list[Expr], load.Scales]]


def _decoder(fmt: Format, unit: load.Unit, arch: Device) -> Decoder:
    """Returns block(b) -> (words of codes, scales) of block b of a unit, which decodes each block when it is first
    used."""

    @cache
    def block(b: int) -> tuple[list[Expr], load.Scales]:
        return load.codes(arch, fmt, unit, b), load.scales(fmt, unit, b)

    return block


def _terms(
    fmt: Format, decoded: Decoder, blocks: list[Block], zeros: list[list[Expr]] | None, arch: Device
) -> list[tuple[Expr, Expr]]:
    """Pairs of factors, whose products are to be added to the sum of a row. Blocks of a super-block share factors."""
    count, out = load.groups(fmt), []
    value = minimum = None
    for b, block in enumerate(blocks):
        words, scales = decoded(b)
        if fmt.block == BLOCK:
            value = minimum = None
        for g in range(count):
            dot = T.int32(0)
            for j in range(g * QUADS // count, (g + 1) * QUADS // count):
                dot = dot4(arch, words[j], block.quads[j], dot)
            dot = T.cast(dot, "float32")
            part = fma(dot, block.d, zeros[b][g]) if zeros else T.Bind(dot * block.d)
            value = _add(scales.sub[g], part, value)
            if fmt.minimum:
                minimum = _add(scales.sub_minimum[g], block.sums[count][g], minimum)
        if fmt.block == BLOCK or b == len(blocks) - 1:
            out.append((T.float32(1) if scales.d is None else scales.d, value))
            if fmt.minimum:
                out.append((scales.minimum if fmt.minimum == "M" else T.Bind(T.float32(0) - scales.minimum), minimum))
    return out


def _add(scale: Expr | None, x: Expr, total: Expr | None) -> Expr:
    """total + scale * x. total: None for 0; scale: None for 1."""
    if scale is None:
        return x if total is None else T.Bind(total + x)
    return T.Bind(scale * x) if total is None else fma(scale, x, total)


def holds_norm(k: int, arch: Device) -> bool:
    """Whether a workgroup can hold a norm of k columns."""
    threads = min(NORM_WAVES * arch.wave, arch.threads)
    shared = k + k // BLOCK * FIELDS * 4  # bytes
    return shared <= arch.lds // 2 and k <= STEPS * threads * COLUMNS


def emit_norm(arch: Device, acts: list[Buffer], k: int, eps: float, lane: Expr, wave: Expr, waves: int) -> Normed:
    """Computes the normed activations. All threads of the workgroup, which has `waves` waves, must call it. acts: X,
    G."""
    X, G = acts
    threads, units = waves * arch.wave, k // COLUMNS
    quads = T.alloc_buffer((units,), "uint32x4", scope="shared")
    fields = T.alloc_buffer((k // BLOCK,), "float32x4", scope="shared")
    part = T.alloc_buffer((waves,), "float32", scope="shared")
    thread, steps = T.Bind(wave * arch.wave + lane), []
    for i in range(-(-units // threads)):
        unit, live = thread + i * threads, None
        if (i + 1) * threads > units:  # after the last unit lanes repeat it
            unit, live = T.min(unit, T.int32(units - 1)), unit < units
        unit = T.Bind(unit)
        steps.append((unit, live, *(
            [x for c in range(0, COLUMNS, WIDTH) for x in load_columns(buf, *row, unit * COLUMNS + c)]
            for buf, row in ((X, (0,)), (G, ()))
        )))  # fmt: skip
    total = sum((square(x, live) for _, live, x, _ in steps), T.float32(0))
    scale = row_scale(workgroup_sum(arch, waves, total, part, wave, lane), k, eps)
    for unit, live, x, g in steps:
        words, own = quantize_block(arch, scaled(x, scale, g))
        with when(live):
            put(quads, vector([T.reinterpret("uint32", word) for word in words]), unit)
            with T.If(unit % (BLOCK // COLUMNS) == 0), T.Then():
                put(fields, vector(own), T.shift_right(unit, T.int32(1)))
    barrier()
    return Normed(k, quads, fields)
