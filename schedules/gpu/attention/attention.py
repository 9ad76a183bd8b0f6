"""Attention on a GPU: the kernel for a few tokens (`attention_decode.py`) or for a chunk of tokens, with matrix units
(`attention_prefill.py`, on Vulkan `attention_prefill_coop.py`, `attention_latent.py` of latent attention) where the
arch has them, else without (`attention_prefill_dot.py`), as latent attention on AMD's own API.
"""

from tvm import tirx

from mlc_amd.schedules.gpu.attention import (
    attention_decode,
    attention_prefill,
    attention_prefill_coop,
    attention_prefill_dot,
)
from mlc_amd.schedules.gpu.attention.attention_step import attention_step
from mlc_amd.schedules.gpu.latent import attention_latent, attention_latent_decode
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import Tile, tile_of
from mlc_amd.schedules.operators.attention import Attention

# by the arch's matrix units; AMD's own kinds share one
PREFILL = {"": attention_prefill_dot, "coop": attention_prefill_coop}


def _prefill_of(layer: Attention, arch, plan):
    """The module of the kernel for chunks. plan: of one of those for latent attention, or None."""
    if not layer.values:
        return PREFILL.get(arch.matrix, attention_prefill)
    tile = plan or tile_of(layer, arch)
    return attention_latent if isinstance(tile, Tile) else attention_prefill_dot


def _decode_of(layer: Attention, m, arch, plan):
    """That of the kernel for single rows."""
    latent = plan or (layer.values and attention_latent_decode.plan_of(layer, m, arch))
    return attention_latent_decode if isinstance(latent, attention_latent_decode.LatentDecodePlan) else attention_decode


def attention(layer: Attention, m, layout, arch, name, plan=None, single=0) -> tirx.PrimFunc:
    """Kernel of `attention_step`, with `splits` if there are single rows.

    single: rows at the front of the step that may be single rows, at most: all of them, none, or fewer, for which there
    are two launches then. Qo is rotated and scaled (`Attention.query_scale`) and the cache contains the rows' own keys.
    Rows see the keys that `cache.visible` says. UserError for shapes that `cache_types`, `group_of` or `output_args`
    refuses, and for "rows" with more rows on an arch with matrix units. plan: of the kernel's module (with two, of the
    chunk's), instead of the arch's.
    """
    decode = _decode_of(layer, single, arch, plan if m == single else None)
    if m == single:
        with attention_step(layer, m, layout, name, splits=True) as (ir, step):
            decode.emit(layer, m, layout, arch, step, plan)
        return ir.get()
    prefill = _prefill_of(layer, arch, plan)
    with attention_step(layer, m, layout, name, splits=single > 0) as (ir, step):
        if single:
            decode.emit(layer, single, layout, arch, step, live=0)
        prefill.emit(layer, m, layout, arch, step, plan, single)
    return ir.get()
