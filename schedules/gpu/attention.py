"""Attention on a GPU: the kernel for a few tokens (`attention_decode.py`) or for a chunk of tokens, with matrix units
(`attention_prefill.py`, on Vulkan `attention_prefill_coop.py`) where the arch has them, else and in latent attention
without (`attention_prefill_dot.py`).
"""

from tvm import tirx

from mlc_amd.schedules.attention import Attention
from mlc_amd.schedules.gpu import (
    attention_decode,
    attention_prefill,
    attention_prefill_coop,
    attention_prefill_dot,
)
from mlc_amd.schedules.gpu.attention_step import attention_step

# by the arch's matrix units; AMD's own kinds share one
PREFILL = {"": attention_prefill_dot, "coop": attention_prefill_coop}


def attention(layer: Attention, m, layout, arch, name, plan=None, single=0) -> tirx.PrimFunc:
    """Kernel of `attention_step`, with `splits` if there are single rows.

    single: rows at the front of the step that may be single rows, at most: all of them, none, or fewer, for which there
    are two launches then. Qo is rotated and scaled (`Attention.query_scale`) and the cache contains the rows' own keys.
    Rows see the keys that `cache.visible` says. UserError for shapes that `cache_types`, `group_of` or `output_args`
    refuses, and for "rows" with more rows on an arch with matrix units. plan: of the kernel's module (with two, of the
    chunk's), instead of the arch's.
    """
    if m == single:
        return attention_decode.attention_decode(layer, layout, arch, name, plan=plan, m=m)
    prefill = attention_prefill_dot if layer.values else PREFILL.get(arch.matrix, attention_prefill)
    with attention_step(layer, m, layout, name, splits=single > 0) as (ir, step):
        if single:
            attention_decode.emit(layer, single, layout, arch, step, live=0)
        prefill.emit(layer, m, layout, arch, step, plan, single)
    return ir.get()
