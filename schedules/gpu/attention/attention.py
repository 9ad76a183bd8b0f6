"""Attention on a GPU: chooses the modules that emit the launches of a kernel.

- single rows: `attention_decode.py`
- a chunk, on AMD's matrix units: `attention_prefill.py`
- a chunk, on cooperative matrices of Vulkan: `attention_prefill_coop.py`; latent attention: `attention_latent.py`
- a chunk without matrix units, and latent attention for rocm: `attention_prefill_dot.py`

Each of these modules has `emit`, which adds its launches to a kernel, and `space`, its plans.
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
    """The module that emits the launch for chunks. plan: a plan of latent attention, which determines the module, or
    None."""
    if not layer.values:
        return PREFILL.get(arch.matrix, attention_prefill)
    return attention_latent if isinstance(plan or tile_of(layer, arch), Tile) else attention_prefill_dot


def _decode_of(layer: Attention, m: int, arch: Device, plan: Any = None) -> ModuleType:
    """The module that emits the launch for m single rows."""
    latent = plan or attention_latent_decode.plan_of(layer, m, arch)
    return attention_latent_decode if isinstance(latent, attention_latent_decode.LatentDecodePlan) else attention_decode


@builds(CausalAttention, RopeAttention)
def attention(op: Attending, arch: Device, state: Buffer, plan: Any) -> None:
    """Kernel with the parameters of `attention_step`. The first rows of the step are single rows, at most op.single;
    the others are a chunk. If there may be both, the kernel has two launches. Single rows of the same sequence must be
    neighbours with consecutive positions. A row attends to the keys of `cache.visible`.

    plan: of the launch's module (of the chunk's, if there are two), by default that of the rule. Raises UserError for
    shapes that `attention_step` or `group_of` refuses, and for the layout "rows" with a chunk on an arch with matrix
    units; ValueError for an invalid plan."""
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
