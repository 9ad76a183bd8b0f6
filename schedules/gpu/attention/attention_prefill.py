"""Causal attention of a chunk of tokens on AMD's matrix units: WMMA (gfx11, gfx12) and MFMA (CDNA), with online
softmax.

In: the rotated queries and the cache, which already contains the chunk's own keys and values. Out: the heads' outputs
in an activation layout of `quantize.py`, of the live rows.

A wave has a KV head and 16 rows (token x head of the group); no shared memory, no barrier. Everything is computed
transposed, S^T = K Q^T and O^T = V^T P^T, so that a lane's column is a row of queries: maximum, sum and rescaling are
lane-local but for an exchange between the lanes that share a row. The units of the cache are what an operand's lane
needs, and a lane's part of S^T is, in the same registers, the operand P^T of the second product on gfx12 and CDNA; on
gfx11, where both half-waves hold all of an operand, the half-waves swap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_step import Step
from mlc_amd.schedules.gpu.attention.cache import UNIT, Chunk, KeyBlock, Pages, Visible, visible
from mlc_amd.schedules.gpu.attention.softmax import LOWEST, P_SHIFT, group_of, soft_cap, with_sink
from mlc_amd.schedules.gpu.base.device import exp2, launch, maximum, rcp, shuffle_xor, uniform
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, local, opaque, put
from mlc_amd.schedules.gpu.base.threads import checked_threads
from mlc_amd.schedules.operators.attention import CausalAttention
from mlc_amd.schedules.space import Kernel, Space
from mlc_amd.schedules.tir import Expr

ROWS = 16  # of a wave: the matrices' columns


@dataclass(frozen=True)
class Plan:
    """threads  of a workgroup
    blocks   of 16 keys that are processed at once: the maximum is renewed once for all of them
    """

    threads: int = 128
    blocks: int = 2


class Unit(NamedTuple):
    """A kind of matrix unit: c + a @ b of 16 x 16 x 16, float16 in, float32 out. Layouts as in AMD's ISA manuals.

    intrinsic   LLVM's name; `tail` zeros follow its operands
    results     elements of the result in a lane: rows part*results.. of the lane's column; part = lane // 16
    words       32-bit words of an operand in a lane
    pieces      pieces(part) -> (16-byte unit, first word) that the words of a lane come from, `piece` words each, of
                the 32 bytes that the 16 steps of k of a row or column are
    row         row(r): the row of K or V^T that lane r of 16 supplies, so that the rows of the result are those that
                `results` says
    """

    intrinsic: str
    results: int
    words: int
    piece: int
    pieces: Callable[[Expr], tuple[tuple[Expr, Expr], ...]]
    row: Callable[[Expr], Expr]
    tail: int = 0


WMMA, MFMA = "llvm.amdgcn.wmma.f32.16x16x16.f16", "llvm.amdgcn.mfma.f32.16x16x16f16"
UNITS = {
    # both half-waves hold all of an operand; element i of a result in half h is row 2 i + h, which the order of rows
    # undoes
    "wmma11": Unit(WMMA, 8, 8, 4, lambda part: ((0, 0), (1, 0)), lambda r: r // 2 + r % 2 * 8),
    # half h holds steps 8 h .. 8 h + 7
    "wmma12": Unit(WMMA, 8, 4, 4, lambda part: ((part, 0),), lambda r: r),
    # quarter h holds steps 4 h .. 4 h + 3
    "mfma": Unit(MFMA, 4, 2, 2, lambda part: ((part // 2, part % 2 * 2),), lambda r: r, 3),
}


class Wave:
    """Registers and place of one wave: lane `lane` of 16 has row first_row + lane, which is token `token` of the chunk
    and head `head`."""

    def __init__(self, arch: Device, source: Step, blocks: int, kv: Expr, tx: Expr, first_row: Expr, chunk: Chunk):
        attention = source.layer
        group, width = attention.group, attention.width
        self.source, self.arch, self.attention, self.blocks = source, arch, attention, blocks
        self.unit = UNITS[arch.matrix]
        self.parts = width // 16  # of a head, as wide as a matrix
        self.part, self.lane = T.Bind(tx // ROWS), T.Bind(tx % ROWS)
        row = T.Bind(first_row + self.lane)
        # rows beyond the chunk compute the same as its last token and are not stored
        self.token, self.head = T.Bind(T.min(row // group, chunk.count - 1)), T.Bind(kv * group + row % group)
        self.valid, self.step_row = row // group < chunk.count, T.Bind(chunk.row(self.token))
        self.supplies = T.Bind(self.unit.row(self.lane))
        n, words = self.unit.results, self.unit.words
        self.query, self.operand = local(self.parts * words, "uint32"), local(words, "uint32")
        self.weights = local(n, "float16")
        self.out, self.scores, self.top, self.total = local(self.parts * n), local(blocks * n), local(1), local(1)

    def load(self, target: Expr, start: Expr, source: Callable[[Expr, Expr], Expr]) -> None:
        """An operand: words start.. of `target`. source(unit) gives the float16x8 of a 16-byte unit."""
        unit, count = self.unit, self.unit.piece
        for i, (place, word) in enumerate(unit.pieces(self.part)):
            value = source(place, T.ramp(word * 2, 1, count * 2))
            put(target, T.reinterpret(f"uint32x{count}", value), at(start + i * count, count))

    def multiply(self, a: Expr, b: Expr, b0: Expr, c: Expr, c0: Expr) -> None:
        """c[c0:] += a @ b[b0:]."""
        unit = self.unit
        operands = [
            T.reinterpret(f"float16x{unit.words * 2}", buffer[at(first, unit.words)])
            for buffer, first in ((a, 0), (b, b0))
        ]
        result = T.call_llvm_pure_intrin(
            f"float32x{unit.results}", unit.intrinsic, *operands, c[at(c0, unit.results)], *[T.int32(0)] * unit.tail
        )
        put(c, result, at(c0, unit.results))

    def across(self, x: Expr, op: Callable[[Expr, Expr], Expr]) -> Expr:
        """op over the lanes that share a column."""
        for distance in (16, 32)[: self.arch.wave // 32]:
            x = opaque(op(x, shuffle_xor(self.arch, x, distance)))
        return x

    def start(self) -> None:
        """Loads the queries; no key seen yet."""
        Q, n = self.source.Q, self.unit.results
        for c in range(self.parts):

            def query(u: Expr, e: Expr, c: int = c) -> Expr:
                return Q[self.step_row, self.head, T.ramp((c * 2 + u) * UNIT + e.base, 1, e.lanes)]

            self.load(self.query, c * self.unit.words, query)
            put(self.out, T.broadcast(T.float32(0), n), at(c * n, n))
        # A row that does not see all keys may see none of the wave's first blocks: until it sees one, its maximum is
        # above the scores of masked keys, whose weights are 0 then. Otherwise every row sees key 0.
        put(self.top, T.float32(LOWEST / 2 if self.attention.span else LOWEST), 0)
        put(self.total, T.float32(0), 0)

    def step(self, block: KeyBlock, seen: Visible | None) -> None:
        """Processes the keys of a `KeyBlock`, 16 at a time. seen: the keys that the lane's row sees, or None if every
        row of the wave sees all of the block."""
        n = self.unit.results
        for j in range(self.blocks):
            place = T.Bind(block.place0 + j * 16 + self.supplies)
            put(self.scores, T.broadcast(T.float32(0), n), at(j * n, n))
            for c in range(self.parts):
                self.load(self.operand, 0, lambda u, e, c=c, place=place: block.key(place, c * 2 + u, e))
                self.multiply(self.operand, self.query, c * self.unit.words, self.scores, j * n)
        self._weigh(block.key0, seen)
        for j in range(self.blocks):
            packed = self._pack(j)
            for x in range(self.parts):
                self.load(self.operand, 0, lambda u, e, x=x, j=j: block.value(j * 2 + u, x * 16 + self.supplies, e))
                self.multiply(self.operand, packed, 0, self.out, x * n)

    def _weigh(self, key0: Expr, seen: Visible | None) -> None:
        """Masks the scores, finds the new maximum and rescales what came before."""
        n, top = self.unit.results, T.float32(LOWEST)
        for i in range(self.blocks * n):
            score = soft_cap(self.attention, self.scores[i])
            if seen is not None:
                key = key0 + i // n * 16 + self.part * n + i % n
                score = T.Select(seen.sees(key), score, T.float32(LOWEST))
            if seen is not None or self.attention.softcap:
                put(self.scores, score, i)
            top = opaque(maximum(top, self.scores[i]))
        now = opaque(maximum(self.top[0], self.across(top, maximum)))
        shrink = opaque(exp2(self.top[0] - now))
        put(self.top, now, 0)
        put(self.total, self.total[0] * shrink, 0)
        for i in range(0, self.parts * n, n):
            put(self.out, self.out[at(i, n)] * T.broadcast(shrink, n), at(i, n))

    def _pack(self, j: Expr) -> Expr:
        """The weights of block j as an operand; adds them to the total, rounded as the products use them."""
        n = self.unit.results
        for i in range(n):
            exponent = self.scores[j * n + i] - self.top[0] + T.float32(P_SHIFT)
            weight = opaque(T.cast(exp2(exponent), "float16"))  # 0 for masked scores
            put(self.total, self.total[0] + T.cast(weight, "float32"), 0)
            put(self.weights, weight, i)
        packed = local(self.unit.words, "uint32")
        own = [opaque(T.reinterpret("uint32", self.weights[at(2 * i, 2)])) for i in range(n // 2)]
        if self.unit.words == n // 2:
            for i, word in enumerate(own):
                put(packed, word, i)
        else:
            other = [opaque(shuffle_xor(self.arch, word, ROWS)) for word in own]
            for i in range(n // 2):
                put(packed, T.Select(self.part == 0, own[i], other[i]), i)
                put(packed, T.Select(self.part == 0, other[i], own[i]), n // 2 + i)
        return packed

    def finish(self) -> None:
        """Stores the outputs. A lane has 4 or 8 consecutive columns of its row."""
        n = self.unit.results
        total = self.across(self.total[0], lambda x, y: x + y)
        inverse = opaque(rcp(with_sink(self.source.sinks, self.head, total, self.top[0])))
        d = self.attention.d
        with T.If(self.valid), T.Then():
            for x in range(self.parts):
                for i in range(0, n, WIDTH):
                    y = [opaque(self.out[x * n + i + e] * inverse) for e in range(WIDTH)]
                    column = T.Bind(self.head * d + x * 16 + self.part * n + i)
                    live = None if (x + 1) * 16 <= d else x * 16 + self.part * n + i < d
                    self.source.store(self.arch, y, self.step_row, column, live)


def emit(step: Step, arch: Device, plan: Plan | None = None) -> None:
    """The launch for the chunk of a step. Nothing is stored for rows that are not live. UserError for shapes that
    `group_of` refuses, or for the layout "rows"."""
    step.refuse_blocks()
    attention, m = step.layer, step.op.m
    group, plan, cache = group_of(attention), plan or Plan(), step.cache
    waves, size = plan.threads // arch.wave, plan.blocks * 16
    tiles = -(-m * group // (ROWS * waves))
    with launch((attention.kv_heads, tiles), (arch.wave, waves)) as (kv, tile, tx, thread_wave):
        chunk = step.chunk()
        first_row = T.Bind(((tiles - 1 - tile) * waves + uniform(arch, thread_wave)) * ROWS)  # the longest first
        first_token = T.Bind(first_row // group)
        with T.If(first_token < chunk.count), T.Then():
            wave = Wave(arch, step, plan.blocks, kv, tx, first_row, chunk)
            wave.start()
            last_token = T.min((first_row + ROWS - 1) // group, chunk.count - 1)
            first, last = (visible(attention, chunk.position(token)) for token in (first_token, last_token))
            begin, end = first.first_block(size), last.end_block(size)
            pages = Pages(cache, chunk.slot, [begin * size])

            def process(i: Expr, seen: Visible | None) -> None:
                (page,) = pages.take(T.Bind(T.min(i + 1, end - 1) * size))
                wave.step(cache.block(kv, T.Bind(i * size), page, size), seen)

            if attention.span:  # few blocks, of which those at both ends need masks
                whole = begin
            else:
                whole = T.Bind(T.min(first.end // size, end))  # every row sees all of their keys
                with T.serial(whole) as i:
                    process(i, None)
            with T.serial(end - whole) as i:
                process(T.Bind(whole + i), visible(attention, chunk.position(wave.token)))
            wave.finish()


CHOICES = {"threads": (32, 64, 128, 256), "blocks": (1, 2, 4)}


def space(op: CausalAttention, arch: Device) -> Space:
    layer = op.layer

    def kernel(plan: Plan) -> Kernel:
        waves = checked_threads(arch, plan.threads) // arch.wave
        groups = layer.kv_heads * -(-op.m * layer.group // (ROWS * waves))
        return Kernel(plan, groups, plan.threads, plan.blocks * 16 * layer.d * 2 / arch.wave)

    return Space(Plan, CHOICES, Plan(), kernel)
