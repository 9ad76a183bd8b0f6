"""The parameters that the kernels of attention share, and the rows of a chunk.

In: an operator. Out: `Step`. `attention_decode.py` has the launch for the single rows of a step,
`attention_prefill*.py` those for its chunk; `attention.py` combines them. Where these do not rotate and write them, the
queries are rotated, and the cache contains the rows' own keys and values. The live rows' outputs are stored, in an
activation layout of `quantize.py`.

Splits of decode attention join through buffers in device memory, which are parameters, too: how many splits there may
be, and how large that makes them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.cache import Cache, Chunk, place_args
from mlc_amd.schedules.gpu.attention.softmax import Joined, output_args, with_sink
from mlc_amd.schedules.gpu.base.arrival import LINE
from mlc_amd.schedules.gpu.base.device import each, rcp
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH, emit_store
from mlc_amd.schedules.gpu.base.registers import opaque
from mlc_amd.schedules.gpu.base.step import exchanges
from mlc_amd.schedules.kv_writes import Sources, rope_args
from mlc_amd.schedules.operators.attention import SLOTS, Attending, Attention, RopeAttention
from mlc_amd.schedules.tir import Buffer, Expr, declared

MAX_SPLITS, SEVERAL = 32, 8  # of a row, at most: with up to SEVERAL rows; the others have SEVERAL at least
MAX_PARTS = SEVERAL * max(SLOTS, MAX_SPLITS)  # rows times splits that there is memory for


def max_splits(m: int) -> int:
    """Splits that each of m rows may have: a launch with many rows has workgroups for all of them, most of which have
    nothing to do."""
    return max(SEVERAL, MAX_SPLITS * SEVERAL // max(m, SEVERAL))


def stride_of(group: int, d: int) -> int:
    """float32 of a split's results in Parts, whole cache lines: the rows' outputs, then (top, total, -, -) of each
    row."""
    return -(-group * (d + WIDTH) // LINE) * LINE


def scratch_shapes(heads: int, d: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Parameter name -> (shape, dtype) of the buffers that splits join through, large enough for every plan and SLOTS
    rows. d: columns of a head's output. "Arrived" must be zero before the first launch and is zero after each; "Parts"
    may hold anything."""
    return {"Parts": ((heads * MAX_PARTS * stride_of(1, d),), "float32"), "Arrived": ((SLOTS * heads,), "int32")}


class Step(NamedTuple):
    """An operator and its kernel's parameters. Q: rotated queries, or `sources`; scratch: of
    `scratch_shapes`, empty where no row is single; sinks: None for layers without; out: of
    `output_args`."""

    op: Attending
    state: Buffer
    rows: Buffer
    Q: Buffer
    sources: Sources | None
    cache: Cache
    sinks: Buffer
    scratch: list[Buffer]
    out: list[Buffer]

    @property
    def layer(self) -> Attention:
        return self.op.layer

    def chunk(self) -> Chunk:
        """The chunk of the step."""
        return Chunk(self.op, self.state, self.rows)

    def singles(self) -> Expr:
        """The number of single rows, in a register."""
        live = self.state[1 if self.op.m == self.op.single else 0]
        return T.Bind(T.min(live, T.int32(self.op.single)))

    def token_and_head(self, row: Expr) -> tuple[Expr, Expr]:
        """Of a row that is counted by tokens and heads."""
        heads = T.int32(self.layer.heads)
        return T.Bind(T.truncdiv(row, heads)), T.Bind(T.truncmod(row, heads))

    def store(self, arch: Device, y: Sequence[Expr], row: Expr, column: Expr, valid: Expr | None) -> None:
        """Stores four columns of a row of the output where `valid` holds (None: always)."""
        emit_store(arch, self.op.layout, self.out, list(y), row, column, valid)

    def refuse_blocks(self) -> None:
        """UserError for the layout "rows", whose blocks no lane has on matrix units."""
        if self.op.layout == "rows":
            raise UserError(
                "attention on matrix units gives float32 or float16, not int8 blocks; quantize its output separately"
            )


def quads(arch: Device, threads: int, tid: Expr, rows: int, d: int) -> Iterator[tuple[Expr | None, Expr, Expr]]:
    """Yields (valid, row, column) of the groups of four of d columns of rows that thread `tid` has; valid is None where
    all threads have one."""
    count = rows * d // WIDTH
    for i in each(arch, -(-count // threads)):
        first = i * threads
        whole = count % threads == 0 or (isinstance(i, int) and first + threads <= count)
        valid = None if whole else first + tid < count
        place = T.Bind((first + tid if valid is None else T.min(first + tid, T.int32(count - 1))) * WIDTH)
        yield valid, T.Bind(place // d), T.Bind(place % d)


class ChunkRow(NamedTuple):
    """Of a row of a chunk: its token there and its row in the step, its head, and whether there is such a row."""

    token: Expr
    step_row: Expr
    head: Expr
    valid: Expr


class ChunkRows(NamedTuple):
    """The rows (token x head of the group) of KV head `kv` in the chunk of a step, from row `first` on. Rows beyond the
    chunk compute the same as its last token and are not stored."""

    step: Step
    chunk: Chunk
    kv: Expr
    first: Expr

    def place(self, r: Expr) -> ChunkRow:
        group, row = self.step.layer.group, T.Bind(self.first + r)
        token = T.Bind(T.min(row // group, self.chunk.count - 1))
        head = T.Bind(self.kv * group + row % group)
        return ChunkRow(token, T.Bind(self.chunk.row(token)), head, row // group < self.chunk.count)

    def store(self, arch: Device, quad: Callable[[Expr, Expr], Joined], count: int, threads: int, tid: Expr) -> None:
        """Stores what the waves of a workgroup have of `count` rows, joined by `quad` of `softmax.join`."""
        d = self.step.layer.value_d
        for valid, r, column in quads(arch, threads, tid, count, d):
            (top, total, values), place = quad(r, column), self.place(r)
            inverse = opaque(rcp(with_sink(self.step.sinks, place.head, total, top)))
            live = place.valid if valid is None else place.valid & valid
            y = [opaque(x * inverse) for x in values]
            self.step.store(arch, y, place.step_row, T.Bind(place.head * d + column), live)


def attention_step(op: Attending, state: Buffer) -> Step:
    """Declares the parameters after `state`: rows int32[m, 2], pages, then Qo float16 [m, heads, width] or those of
    `rope_args`, the cache as in `cache.py`, [Sinks float32 [heads]], where rows may be single ones Parts, Arrived of
    `scratch_shapes`, the output [m, heads*value_d] in the operator's layout. UserError for shapes that `cache_types`,
    `rope_args` or `output_args` refuses."""
    layer, m = op.layer, op.m
    shapes = scratch_shapes(layer.heads, layer.value_d) if op.single else {}
    if shapes:
        exchanges(*shapes)
    rows, pages = place_args(m, layer)
    sources = rope_args(layer, m, op.rope) if isinstance(op, RopeAttention) else None
    Q = None if sources else T.arg("Qo", T.buffer((m, layer.heads, layer.width), "float16"))
    cache, sinks = Cache(layer, pages), declared(Sinks=(layer.heads,) if layer.sinks else None)[0]
    scratch = [T.arg(name, T.buffer(*shape)) for name, shape in shapes.items()]
    return Step(op, state, rows, Q, sources, cache, sinks, scratch, output_args(layer, m, op.layout))
