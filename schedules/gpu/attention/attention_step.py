"""The parameters that the kernels of attention share.

In: an operator. Out: `Step`. `attention_decode.py` has the launch for the single rows of a step,
`attention_prefill*.py` those for its chunk; `attention.py` combines them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.attention_scratch import scratch_args
from mlc_amd.schedules.gpu.attention.cache import Cache, Chunk, pages_arg, rows_arg
from mlc_amd.schedules.gpu.attention.rope_kv_write import Sources, rope_args
from mlc_amd.schedules.gpu.attention.softmax import output_args, sinks_arg
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import emit_store
from mlc_amd.schedules.gpu.base.step import kernel, state_arg
from mlc_amd.schedules.operators.attention import Attention, CausalAttention, RopeAttention
from mlc_amd.schedules.tir import Buffer, Expr

SCRATCH = ("Parts", "Arrived")


class Step(NamedTuple):
    """An operator and its kernel's parameters. Q: rotated queries, or `sources`; scratch: of
    `attention_scratch.scratch_args`, empty where no row is single; sinks: None for layers without; out: of
    `output_args`."""

    op: CausalAttention | RopeAttention
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

    def store(self, arch: Device, y: Sequence[Expr], row: Expr, column: Expr, valid: Expr | None) -> None:
        """Stores four columns of a row of the output where `valid` holds (None: always)."""
        emit_store(arch, self.op.layout, self.out, list(y), row, column, valid)

    def refuse_blocks(self) -> None:
        """UserError for the layout "rows", whose blocks no lane has on matrix units."""
        if self.op.layout == "rows":
            raise UserError(
                "attention on matrix units gives float32 or float16, not int8 blocks; quantize its output separately"
            )


@contextmanager
def attention_step(op: CausalAttention | RopeAttention, name: str) -> Iterator[tuple[Any, Step]]:
    """`with attention_step(..) as (ir, step):` declares and emits a kernel (state int32[4], rows int32[m, 2], pages of
    `pages_arg`, then Qo float16 [m, heads, width] or Q, K, V, [QN, KN], [CS] as for `rope_kv_write`, the cache as in
    `cache.py`, [Sinks float32 [heads]], where rows may be single ones Parts, Arrived of
    `attention_scratch.scratch_shapes`, then the output [m, heads*value_d] in the operator's layout). UserError for
    shapes that `cache_types`, `rope_args` or `output_args` refuses."""
    layer, m = op.layer, op.m
    with kernel(name, coherent=SCRATCH if op.single else ()) as ir:
        state, rows, pages = state_arg(), rows_arg(m), pages_arg(layer)
        sources = rope_args(layer, m, op.rope) if isinstance(op, RopeAttention) else None
        Q = None if sources else T.arg("Qo", T.buffer((m, layer.heads, layer.width), "float16"))
        cache, sinks = Cache(layer, pages), sinks_arg(layer)
        scratch = scratch_args(layer.heads, layer.value_d) if op.single else []
        yield ir, Step(op, state, rows, Q, sources, cache, sinks, scratch, output_args(layer, m, op.layout))
