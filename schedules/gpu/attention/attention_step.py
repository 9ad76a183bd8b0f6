"""The parameters that the kernels of attention between rotated queries and the cache share.

In: an `Attention` layer, the step's rows, the output's layout. Out: `Step`. `attention_decode.py` has a kernel for the
single rows of a step, `attention_prefill*.py` for its chunk; `attention.py` combines them.
"""

from contextlib import contextmanager
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_join import scratch_args
from mlc_amd.schedules.gpu.attention.cache import Cache, pages_arg, rows_arg
from mlc_amd.schedules.gpu.attention.softmax import output_args, sinks_arg
from mlc_amd.schedules.gpu.base.step import kernel, state_arg
from mlc_amd.schedules.operators.attention import Attention

SCRATCH = ("Parts", "Arrived")


class Step(NamedTuple):
    """Parameters. scratch: of `attention_join.scratch_args`, or None; sinks: None for layers without; out: of
    `output_args`."""

    state: object
    rows: object
    Q: object
    cache: Cache
    sinks: object
    scratch: list | None
    out: list


@contextmanager
def attention_step(attention: Attention, m, layout, name, splits=False):
    """`with attention_step(..) as (ir, step):` declares and emits a kernel (state int32[4], rows int32[m, 2], pages of
    `pages_arg`, Qo float16 [m, heads, width], the cache as in `cache.py`, [Sinks float32 [heads]], with `splits` Parts,
    Arrived of `attention_join.scratch_shapes`, then the output [m, heads*value_d] in that `layout`). UserError for
    shapes that `cache_types` or `output_args` refuses."""
    with kernel(name, coherent=SCRATCH if splits else ()) as ir:
        state, rows, pages = state_arg(), rows_arg(m), pages_arg(attention)
        Q = T.arg("Qo", T.buffer((m, attention.heads, attention.width), "float16"))
        cache, sinks = Cache(attention, pages), sinks_arg(attention)
        scratch = scratch_args(attention.heads, attention.value_d) if splits else None
        yield ir, Step(state, rows, Q, cache, sinks, scratch, output_args(attention, m, layout))
