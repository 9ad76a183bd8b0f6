"""Attention on a GPU: the kernel for a few tokens (`attention_decode.py`) or for a chunk of tokens, with matrix units
(`attention_prefill.py`, on Vulkan `attention_prefill_coop.py`, `attention_latent.py` of latent attention) where the
arch has them, else without (`attention_prefill_dot.py`), as latent attention on AMD's own API.

Each of these modules has `emit`, which adds its launches to a kernel, and `space`, the plans that it may have.
"""

from types import ModuleType
from typing import Any

from mlc_amd.schedules.gpu import registry
from mlc_amd.schedules.gpu.attention import (
    attention_decode,
    attention_prefill,
    attention_prefill_coop,
    attention_prefill_dot,
)
from mlc_amd.schedules.gpu.attention.attention_step import attention_step
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.step import builds
from mlc_amd.schedules.gpu.latent import attention_latent, attention_latent_decode
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import Tile, tile_of
from mlc_amd.schedules.operators.attention import SLOTS, Attending, Attention, CausalAttention, RopeAttention
from mlc_amd.schedules.space import Space
from mlc_amd.schedules.tir import Buffer

# by the arch's matrix units; AMD's own kinds share one
PREFILL = {"": attention_prefill_dot, "coop": attention_prefill_coop}


def prefill_of(layer: Attention, arch: Device, plan: Any = None) -> ModuleType:
    """The module of the launch for chunks. plan: of one of those for latent attention, or None."""
    if not layer.values:
        return PREFILL.get(arch.matrix, attention_prefill)
    return attention_latent if isinstance(plan or tile_of(layer, arch), Tile) else attention_prefill_dot


def _decode_of(layer: Attention, m: int, arch: Device, plan: Any = None) -> ModuleType:
    """That of the launch for m single rows."""
    latent = plan or attention_latent_decode.plan_of(layer, m, arch)
    return attention_latent_decode if isinstance(latent, attention_latent_decode.LatentDecodePlan) else attention_decode


@builds(CausalAttention, RopeAttention)
def attention(op: Attending, arch: Device, state: Buffer, plan: Any) -> None:
    """Kernel of `attention_step`. Rows at the front of the step are single ones, op.single at most, the others a chunk:
    with both there are two launches. Single rows of the same sequence follow one another, with consecutive positions.
    Rows see the keys that `cache.visible` says. UserError for shapes that `attention_step` or `group_of` refuses, and
    for "rows" with more rows on an arch with matrix units. plan: of the launch's module (with two, of the chunk's),
    instead of the arch's; ValueError for one that does not suit."""
    if op.single > SLOTS:
        raise ValueError(f"decode attention of {op.single} rows")
    step = attention_step(op, state)
    if op.single:
        own = plan if op.m == op.single else None
        _decode_of(op.layer, op.single, arch, own).emit(step, arch, own)
    if op.m > op.single:
        prefill_of(op.layer, arch, plan).emit(step, arch, plan)


@registry.plans(CausalAttention, RopeAttention)
def plans(op: Attending, arch: Device) -> Space:
    module = _decode_of(op.layer, op.m, arch) if op.m == op.single else prefill_of(op.layer, arch)
    return module.space(op, arch)
