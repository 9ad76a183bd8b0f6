"""Linear layers of 8 and 16 tokens on AMD's int8 matrix units: as `gemv.py`, y[m, n] = sum over k of w[n, k] * x[m, k],
and the first half of a feed-forward layer.

In: `state` int32[4], activations A and S of `quantize.py`'s layout "rows", weights of int8 formats in the layout "rows"
(`planes.py`). Out: as `gemv.py`.

A workgroup computes all tokens' results of a few tiles of 16 rows; its waves share out the columns, a step of some
blocks of 32 at a time, and their sums meet in LDS. Weights become signed bytes right in the registers that the matrix
instruction takes (`gemv_share.py`), tokens come from the caches. Each block's integers are scaled as those of a GEMV:
a lane has one row of weights, so the tokens' scales are what it has several of. All m tokens are computed, live or not.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from mlc_amd.schedules.formats import lookup
from mlc_amd.schedules.gpu import gemv_share, load
from mlc_amd.schedules.gpu.activations import gated
from mlc_amd.schedules.gpu.device import (
    IN_ORDER,
    WAVE_SHARED,
    barrier,
    fma,
    lanes_meet,
    launch,
    schedule_fence,
    uniform,
)
from mlc_amd.schedules.gpu.matrix_int8 import SIDE, products, unit_of
from mlc_amd.schedules.gpu.planes import BLOCK, padded, plane_args
from mlc_amd.schedules.gpu.quantize import FIELDS, LANES, WIDTH, act_args, emit_store
from mlc_amd.schedules.gpu.registers import at, lane_of, vector
from mlc_amd.schedules.gpu.step import kernel, state_arg

ROWS = (8, 16)  # numbers of tokens
STEPS = (8, 4, 2, 1)  # blocks of a step
FULL = 6  # waves for each compute unit, as many as hide the latency of memory
GATE_UP_TILES = 2 * BLOCK // SIDE
# LLVM would start so many blocks of a step that registers spill; with more than MANY tiles also load so many tokens
MANY = 2
LOADED = 0x84  # for `schedule_fence`: as IN_ORDER, and loads may not cross


# By matrix unit: formats of which gate and up together do not fit the 256 registers of a lane.
SPILLED = {"wmma11": frozenset({"q5_1", "q8_0", "q8_1", "q4_k", "q5_k", "q6_k"})}


@dataclass(frozen=True)
class Plan:
    """How a GEMV is spread over the GPU. Powers of two.

    tiles   of 16 rows that a workgroup computes; gate_up_swiglu: always a block of 32 rows of each weight
    waves   of a workgroup, at most: they share out the columns
    """

    tiles: int
    waves: int


def suits(fmts, m, layout, arch) -> bool:
    """Whether the kernels here are those for m tokens in that `layout` and weights of these formats (or names)."""
    return m in ROWS and layout == "rows" and unit_of(arch) is not None and all(lookup(f).kind == "int8" for f in fmts)


def suits_gate_up(gate, up, m, layout, arch) -> bool:
    """`suits` of gate and up together."""
    fits = gate == up and gate not in SPILLED.get(arch.matrix, ())
    return fits and suits([gate], m, layout, arch)


def default_plan(arch, rows: int, tiles=None) -> Plan:
    """The plan for `rows` rows in all: fewer at once where there would be too few workgroups to fill the GPU. tiles:
    where the kernel has no choice."""
    plan = Plan(tiles or 2, arch.threads // arch.wave)
    while not tiles and plan.tiles > 1 and rows // (plan.tiles * SIDE) * plan.waves < FULL * arch.units:
        plan = replace(plan, tiles=plan.tiles // 2)
    return plan


def fitted(plan: Plan, k, arch) -> tuple[Plan, int]:
    """(the plan with as many waves as there is work for, blocks of a step)."""
    blocks = next(n for n in STEPS if k // BLOCK % n == 0)
    waves = min(plan.waves, arch.threads // arch.wave)
    while waves > k // BLOCK // blocks:
        waves //= 2
    return replace(plan, waves=waves), blocks


def lds_bytes(fmts, plan, blocks, m) -> int:
    """LDS of a workgroup that computes tiles of these formats."""
    return plan.waves * m * 4 * (len(_fields(fmts)) * blocks + plan.tiles * SIDE)


class _Tokens:
    """The activations of m tokens as the lanes of a wave take them. params: A and S. fields: those of S that are
    wanted, as (number, factor).

    A lane wants a field of m / groups tokens, which lie far apart: each wave takes those of a step through LDS, where
    no other wave goes.
    """

    def __init__(self, arch, params, k, m, fields, blocks, lane, wave, waves):
        A, S = params
        self.arch, self.unit, self.m, self.lane, self.blocks, self.fields = arch, unit_of(arch), m, lane, blocks, fields
        unit, self.held, self.count = self.unit, m // self.unit.groups, k // BLOCK
        self.quads = T.decl_buffer((m, k // 4), "int32", data=A.data)
        self.s = T.decl_buffer((m * self.count, FIELDS), "float32", data=S.data)
        self.words = load.QUADS // 2 // unit.parts
        self.part = T.int32(0) if unit.parts == 1 else T.Bind(lane // SIDE)
        self.token = T.Bind(unit.token_of_row(lane % SIDE, m))
        self.sums = [T.Bind(unit.token_of_sum(lane // SIDE, i, m)) for i in range(self.held)]
        size = len(fields) * blocks * m
        self.own = T.Bind(wave * size)
        self.staged = T.alloc_buffer((waves * size,), "float32", scope=WAVE_SHARED)

    def block(self, block):
        """This lane's words of both halves of a block."""
        half = load.QUADS // 2
        starts = [block * load.QUADS + p * half + self.part * self.words for p in range(2)]
        return [load.wide(self.quads, self.token, start, self.words) for start in starts]

    def fetch(self, first):
        """Loads the fields of a step from block `first` on: for each run of as many pairs of token and block as a wave
        has lanes."""
        numbers, wave = [number for number, _ in self.fields], self.arch.wave
        width = next(n for n in (1, 2, FIELDS) if max(numbers) < n)
        self.loaded = []
        for start in range(0, self.m * self.blocks, wave):
            pair = T.Bind(start + self.lane)
            if self.m * self.blocks % wave:
                pair = T.Bind(T.min(pair, T.int32(self.m * self.blocks - 1)))
            token, block = T.Bind(pair // self.blocks), T.Bind(pair % self.blocks)
            found = T.Bind(self.s[token * self.count + first + block, at(0, width)])
            self.loaded.append((token, block, [lane_of(found, i) if width > 1 else found for i in range(width)]))

    def stage(self):
        """Puts what `fetch` loaded in its place."""
        lanes_meet()
        for token, block, found in self.loaded:
            base = T.Bind(self.own + block * self.m + self.unit.place(token, self.m))
            for i, (number, factor) in enumerate(self.fields):
                value = found[number] if factor == 1 else found[number] * T.float32(factor)
                T.buffer_store(self.staged, value, [base + i * (self.blocks * self.m)])
        lanes_meet()

    def scales(self, block) -> dict:
        """(number, factor) -> that field of the step's block number `block`: an element for each of this lane's
        sums."""
        mine = T.Bind(self.own + self.lane // SIDE * self.held)
        return {
            field: T.Bind(self.staged[at(mine + (i * self.blocks + block) * self.m, self.held)])
            for i, field in enumerate(self.fields)
        }


def _fields(fmts) -> list:
    """The fields of S, as (number, factor), that weights of these formats need."""
    found = [(0, 1)]
    for fmt in fmts:
        found += [(number, factor) for number in _sums_of(fmt) for factor in _factors(fmt)]
    return list(dict.fromkeys(found))


def _sums_of(fmt):
    """Numbers of the fields with d * sum(q) of each group of a block's columns."""
    return (1,) if load.groups(fmt) == 1 else (2, 3)


def _factors(fmt):
    """What the sums are wanted times."""
    return ([-fmt.zero] if fmt.zero else []) + ([1] if fmt.minimum else [])


def _add(scale, x, total):
    """total + scale * x of vectors; scale, a scalar, and total may be None (1 and 0)."""
    if scale is None:
        return x if total is None else T.Bind(total + x)
    scale = T.broadcast(scale, x.ty.dtype.lanes)
    return T.Bind(scale * x) if total is None else fma(scale, x, total)


class _Tile:
    """A tile of 16 rows: its share of a step, and the sums of its tokens."""

    def __init__(self, fmt, planes, row, tokens):
        self.fmt, self.planes, self.row, self.tokens = fmt, planes, row, tokens
        self.sums = T.alloc_buffer((tokens.held,), "float32", scope="local")
        T.buffer_store(self.sums, T.broadcast(T.float32(0), tokens.held), [at(0, tokens.held)])

    def fetch(self, first, blocks):
        tokens = self.tokens
        self.share = gemv_share.fetch(self.fmt, self.planes, self.row, first, blocks, tokens.part, tokens.words)
        self.value = self.minimum = None

    def total(self):
        return self.sums[at(0, self.tokens.held)]

    def multiply(self, arch, block, acts, fields):
        """Adds a step's block number `block`. acts: the tokens' words; fields: of `_Tokens.scales`."""
        fmt, tokens, held = self.fmt, self.tokens, self.tokens.held
        count = load.groups(fmt)
        words = gemv_share.words(arch, fmt, self.share, block, tokens.part, tokens.words)
        scales = gemv_share.scales(fmt, self.share, block)
        for g, product in enumerate(products(tokens.unit, acts, words, count)):
            dots = T.Bind(T.cast(vector([lane_of(product, i) for i in range(held)]), f"float32x{held}"))
            number, d = _sums_of(fmt)[g], fields[0, 1]
            part = fma(dots, d, fields[number, -fmt.zero]) if fmt.zero else T.Bind(dots * d)
            self.value = _add(scales.sub[g], part, self.value)
            if fmt.minimum:
                self.minimum = _add(scales.sub_minimum[g], fields[number, 1], self.minimum)
        if (block + 1) * BLOCK % fmt.block == 0:
            self._flush(scales)

    def _flush(self, scales):
        total = _add(scales.d, self.value, self.total())
        if self.fmt.minimum:
            low = scales.minimum if self.fmt.minimum == "M" else T.Bind(T.float32(0) - scales.minimum)
            total = _add(low, self.minimum, total)
        T.buffer_store(self.sums, total, [at(0, self.tokens.held)])
        self.value = self.minimum = None


def _emit_sums(arch, tiles, tokens, k, blocks, wave, waves):
    """This wave's part of the products of tiles and tokens."""
    steps = k // BLOCK // blocks
    own = T.int32(steps // waves) if steps % waves == 0 else T.Bind((steps - wave + (waves - 1)) // waves)
    with T.serial(own) as i:
        first = T.Bind((i * waves + wave) * blocks)
        for tile in tiles:
            tile.fetch(first, blocks)
        tokens.fetch(first)
        tokens.stage()
        for b in range(blocks):
            if b:
                schedule_fence(IN_ORDER if len(tiles) <= MANY else LOADED)
            acts, fields = tokens.block(first + b), tokens.scales(b)
            for tile in tiles:
                tile.multiply(arch, b, acts, fields)


class _Meeting:
    """The place in LDS where the sums of a workgroup's waves meet: [waves, m, rows]."""

    def __init__(self, waves, m, tiles):
        self.waves, self.size, self.rows = waves, m * tiles * SIDE, tiles * SIDE
        self.parts = T.alloc_buffer((waves * self.size,), "float32", scope="shared")

    def keep(self, tiles, tokens, wave, lane):
        """Puts the sums of this wave's tiles."""
        for i, token in enumerate(tokens.sums):
            base = T.Bind(wave * self.size + token * self.rows + lane % SIDE)
            for t, tile in enumerate(tiles):
                T.buffer_store(self.parts, tile.sums[i], [base + t * SIDE])

    def take(self, token, row):
        """A token's sums of all waves for rows row .. row + 3, a multiple of 4."""
        total = None
        for wave in range(self.waves):
            part = T.Bind(self.parts[at(wave * self.size + token * self.rows + row, WIDTH)])
            total = part if total is None else T.Bind(total + part)
        return total


def _wave(arch, wave, waves):
    """Number of this wave out of `waves`, as a scalar that LLVM knows to be no less than 0."""
    return T.Bind(uniform(arch, wave) & T.int32(waves - 1)) if waves > 1 else T.int32(0)


def linear(segments, k, m, layout, biases, residual, arch, name, plan=None):
    """PrimFunc with the parameters of `gemv.linear`. m: of ROWS; formats: int8, layout: "rows". ValueError for what
    `suits` refuses, or cannot share a launch."""
    segments = [(lookup(fmt), n) for fmt, n in segments]
    _check([fmt for fmt, _ in segments], m, layout, arch)
    if len(biases) != len(segments) or (residual and len(segments) > 1):
        raise ValueError(
            f"segments {[(f.name, n) for f, n in segments]}, biases {biases}, residual {residual} do not make one "
            "launch"
        )
    plan = plan or default_plan(arch, sum(padded(n) for _, n in segments))
    plan, blocks = fitted(plan, k, arch)
    rows, threads = plan.tiles * SIDE, plan.waves * arch.wave
    counts = [-(-padded(n) // rows) for _, n in segments]
    with kernel(name) as ir:
        state_arg()
        params, weights = act_args(m, k, layout), []
        for i, ((fmt, n), has_bias) in enumerate(zip(segments, biases, strict=True)):
            bufs = plane_args(fmt, n, k, f"W{i}_")
            weights.append((bufs, T.arg(f"bias{i}", T.buffer((n,), "float32")) if has_bias else None))
        R = T.arg("R", T.buffer((m, padded(segments[0][1])), "float32")) if residual else None
        outputs = [T.arg(f"Y{i}", T.buffer((m, padded(n)), "float32")) for i, (_, n) in enumerate(segments)]
        with launch((sum(counts),), (arch.wave, plan.waves)) as (workgroup, lane, thread_wave):
            wave = _wave(arch, thread_wave, plan.waves)
            fields = _fields([fmt for fmt, _ in segments])
            tokens = _Tokens(arch, params, k, m, fields, blocks, lane, wave, plan.waves)
            meeting = _Meeting(plan.waves, m, plan.tiles)
            places, first = [], 0
            for (fmt, n), (bufs, _), count in zip(segments, weights, counts, strict=True):
                views = gemv_share.views(fmt, bufs, blocks)
                here = (workgroup >= first) & (workgroup < first + count)
                row0 = T.Bind((workgroup - first) * rows)
                places.append((here, row0))
                with _if(here, len(segments) > 1):
                    last = T.int32(padded(n) - SIDE)
                    starts = [row0 + t * SIDE if padded(n) % rows == 0 else T.min(row0 + t * SIDE, last)
                              for t in range(plan.tiles)]  # fmt: skip
                    tiles = [_Tile(fmt, views, T.Bind(start + lane % SIDE), tokens) for start in starts]
                    _emit_sums(arch, tiles, tokens, k, blocks, wave, plan.waves)
                    meeting.keep(tiles, tokens, wave, lane)
                first += count
            barrier()
            for (_, n), (_, bias), Y, (here, row0) in zip(segments, weights, outputs, places, strict=True):
                with _if(here, len(segments) > 1):
                    _finish(meeting, n, m, rows, threads, wave * arch.wave + lane, row0, bias, R, Y)
    return ir.get()


def _finish(meeting, n, m, rows, threads, thread, row0, bias, R, Y):
    """Writes a segment's results, four rows of a token at a time."""
    quads = rows // WIDTH
    for start in range(0, m * quads, threads):
        item = T.Bind(start + thread)
        token, row = T.Bind(item // quads), T.Bind(item % quads * WIDTH)
        conditions = [item < m * quads] if start + threads > m * quads else []
        conditions += [row0 + row < padded(n)] if padded(n) % rows else []
        inside = conditions[0] & conditions[1] if len(conditions) > 1 else next(iter(conditions), None)
        with _if(inside, inside is not None):
            first = T.Bind(row0 + row)
            y = meeting.take(token, row)
            if bias is not None:
                own = [bias[first + i if n == padded(n) else T.min(first + i, T.int32(n - 1))] for i in range(WIDTH)]
                y = y + (bias[at(first, WIDTH)] if n == padded(n) else vector(own))
            if R is not None:
                y = R[token, at(first, WIDTH)] + y
            T.buffer_store(Y, y, [token, at(first, WIDTH)])


class _if:
    """`with _if(condition, wanted):` an `if`, or nothing."""

    def __init__(self, condition, wanted):
        self.contexts = [T.If(condition), T.Then()] if wanted else [nullcontext()]

    def __enter__(self):
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error):
        for context in reversed(self.contexts):
            context.__exit__(*error)


def gate_up_swiglu(fmt_gate, fmt_up, f, k, m, layout_in, layout, arch, name, plan=None, act="silu"):
    """PrimFunc with the parameters of `gemv.gate_up_swiglu` without experts. m: of ROWS; formats: int8, layout_in:
    "rows". ValueError for what `suits` refuses, or has no whole blocks."""
    fmts = [lookup(fmt_gate), lookup(fmt_up)]
    _check(fmts, m, layout_in, arch)
    if f % BLOCK:
        raise ValueError(f"a feed-forward layer of {f} columns does not make whole blocks of {BLOCK}")
    plan, blocks = fitted(plan or default_plan(arch, 2 * f, GATE_UP_TILES), k, arch)
    waves, half = plan.waves, GATE_UP_TILES // 2
    with kernel(name) as ir:
        state_arg()
        params = act_args(m, k, layout_in)
        weights = [plane_args(fmt, f, k, prefix) for fmt, prefix in zip(fmts, ("G_", "U_"), strict=True)]
        out = act_args(m, f, layout, {"": ["Y"], "half": ["H_out"], "rows": ["A_out", "S_out"]}[layout])
        with launch((f // BLOCK,), (arch.wave, waves)) as (block, lane, thread_wave):
            wave = _wave(arch, thread_wave, waves)
            tokens = _Tokens(arch, params, k, m, _fields(fmts), blocks, lane, wave, waves)
            meeting = _Meeting(waves, m, GATE_UP_TILES)
            views = [gemv_share.views(fmt, bufs, blocks) for fmt, bufs in zip(fmts, weights, strict=True)]
            rows = [T.Bind(block * BLOCK + t * SIDE + lane % SIDE) for t in range(half)]
            tiles = [_Tile(fmt, planes, row, tokens) for fmt, planes in zip(fmts, views, strict=True) for row in rows]
            _emit_sums(arch, tiles, tokens, k, blocks, wave, waves)
            meeting.keep(tiles, tokens, wave, lane)
            barrier()
            # eight lanes have a token's block; all lanes of a wave have one
            for start in range(0, m * LANES // arch.wave, waves):
                with T.If(wave + start < m * LANES // arch.wave), T.Then():
                    item = T.Bind((wave + start) * arch.wave + lane)
                    token, column = T.Bind(item // LANES), T.Bind(item % LANES * WIDTH)
                    gate, up = (meeting.take(token, column + own) for own in (0, BLOCK))
                    y = [gated(act, T.Bind(lane_of(gate, i)), T.Bind(lane_of(up, i))) for i in range(WIDTH)]
                    emit_store(arch, layout, out, y, token, T.Bind(block * BLOCK + column))
    return ir.get()


def _check(fmts, m, layout, arch):
    if not suits(fmts, m, layout, arch):
        raise ValueError(
            f"{arch.name} has no matrix units for {m} tokens in the layout {layout!r} with {[f.name for f in fmts]}"
        )
