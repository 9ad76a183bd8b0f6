"""Attention on a GPU: the kernel for a few tokens (`attention_decode.py`) or for a chunk of tokens, with matrix units
(`attention_prefill.py`, on Vulkan `attention_prefill_coop.py`) where the arch has them, else without
(`attention_prefill_dot.py`).
"""

from tvm import tirx

from mlc_amd.schedules.attention import Attention
from mlc_amd.schedules.gpu.attention_decode import attention_decode
from mlc_amd.schedules.gpu.attention_prefill import attention_prefill
from mlc_amd.schedules.gpu.attention_prefill_coop import attention_prefill_coop
from mlc_amd.schedules.gpu.attention_prefill_dot import attention_prefill_dot
from mlc_amd.schedules.gpu.step import FEW

# by the arch's matrix units; AMD's own kinds share one
PREFILL = {"": attention_prefill_dot, "coop": attention_prefill_coop}


def attention(layer: Attention, m, layout, arch, name, plan=None) -> tirx.PrimFunc:
    """Kernel (state int32[4], Qo float16 [m, heads, width], Kc, Vc of `cache.py`, [Sinks float32 [heads]], [Parts,
    Arrived of `attention_join.scratch_shapes` up to FEW rows], then the output [m, heads*d] in that `layout`).

    Qo is rotated and scaled (`Attention.query_scale`) and the cache contains the rows' own keys. Row i has the position
    that `cache.row_position` says and sees the keys that `cache.visible` says. UserError for shapes that `cache_types`,
    `group_of` or `output_args` refuses, and for "rows" with more rows on an arch with matrix units. plan: of the
    kernel's module, instead of the arch's.
    """
    if m <= FEW:
        return attention_decode(layer, layout, arch, name, plan=plan, m=m)
    prefill = PREFILL.get(arch.matrix, attention_prefill)
    return prefill(layer, m, layout, arch, name, plan)
