"""The plans of GPU kernels of attention; their fields are described by their dataclasses, in the kernels' modules."""

from dataclasses import replace

from mlc_amd.schedules.gpu.attention import (
    attention_coop_tiles,
    attention_prefill,
    attention_prefill_dot,
    attention_splits,
)
from mlc_amd.schedules.gpu.attention.attention_rows_vulkan import waves_of
from mlc_amd.schedules.gpu.base.threads import checked_threads
from mlc_amd.schedules.gpu.latent import attention_latent_decode, attention_latent_tiles
from mlc_amd.schedules.operators.attention import PAGE, CausalAttention, padded_columns
from mlc_amd.schedules.space import Kernel, Space

SUMS = 256  # float32 accumulators of a lane, at most: more leave no registers for anything else
WAVES = (1, 2, 4, 8)

ATTENTION_COOP = {"waves": WAVES, "fragments": (1, 2), "keys": (16, 32, 64), "parts": (1, 2, 4)}
ATTENTION_LATENT = {
    "waves": (4, 8), "rows": (16, 32, 64), "keys": (16, 32), "buffers": (1, 2), "held": (0, 4, 9, 18),
    "fill": (1, 2), "least": (2, 4, 8),
}  # fmt: skip
ATTENTION_MATRIX = {"threads": (32, 64, 128, 256), "blocks": (1, 2, 4)}
ATTENTION_DOT = {"threads": (32, 64, 128, 256), "rows": (4, 8, 16)}
DECODE = {
    "threads": (32, 64, 96, 128, 256), "fill": (1, 2, 4, 8), "step": (32, 64), "batch": (4, 8, 16, 32),
    "rows": (1, 2, 4, 8, 16), "loads": (4, 8, 16), "ahead": (0, 1),
}  # fmt: skip


def attention(op, arch) -> Space:
    if op.m == op.single:
        return decode(op, arch)
    layer = op.layer
    shape = op.m, layer.heads, layer.kv_heads, layer.d
    if layer.values:
        if tile := attention_latent_tiles.tile_of(layer, arch):
            return _attention_latent(arch, op.m, layer, tile)
        return _attention_dot(arch, *shape, default=attention_prefill_dot.LATENT_PLAN)
    if arch.matrix == "coop":
        return _attention_coop(arch, *shape)
    return (_attention_matrix if arch.matrix else _attention_dot)(arch, *shape)


def _attention_coop(arch, m, heads, kv_heads, d) -> Space:
    width = padded_columns(d)

    def kernel(tile) -> Kernel:
        rows, columns, step = arch.fragment
        own = tile.own_keys
        whole = tile.waves % tile.parts == 0 and tile.keys % tile.parts == 0 and own % columns == 0 and own % step == 0
        threads = checked_threads(arch, tile.waves * arch.wave)
        whole = whole and PAGE % tile.keys == 0
        if not whole or attention_coop_tiles.lds_bytes(tile, width, arch.fragment) > arch.lds:
            raise ValueError(f"{tile} does not fit {arch.name}")
        if tile.fragments * (own + width) * rows // arch.wave > SUMS:
            raise ValueError(f"{tile} takes more registers than {arch.name} has")
        groups = attention_coop_tiles.workgroups(tile, m, heads, kv_heads, arch)
        return Kernel(tile, groups, threads, tile.keys * width * 4 / threads)

    return Space(
        attention_coop_tiles.Tile,
        ATTENTION_COOP,
        attention_coop_tiles.tile_of(m, heads, kv_heads, width, arch),
        kernel,
    )


def _latent_shape(tile, layer, arch):
    """ValueError for a tile that does not fit."""
    shape = attention_latent_tiles.shape_of(tile, layer, arch)
    if not shape:
        raise ValueError(f"{tile} does not fit {arch.name}")
    rows, columns, _ = arch.fragment
    if shape.row_fragments * shape.columns * rows * columns // arch.wave > SUMS:
        raise ValueError(f"{tile} takes more registers than {arch.name} has")
    return shape


def _attention_latent(arch, m, layer, default) -> Space:
    def kernel(tile) -> Kernel:
        threads = tile.waves * arch.wave
        same = replace(tile, held=min(tile.held, _latent_shape(tile, layer, arch).steps))
        return Kernel(same, -(-m * layer.heads // tile.rows), threads, tile.keys * layer.width * 2 / threads)

    return Space(attention_latent_tiles.Tile, ATTENTION_LATENT, default, kernel)


def _attention_matrix(arch, m, heads, kv_heads, d) -> Space:
    def kernel(plan) -> Kernel:
        waves = checked_threads(arch, plan.threads) // arch.wave
        tiles = -(-m * (heads // kv_heads) // (attention_prefill.ROWS * waves))
        return Kernel(plan, kv_heads * tiles, plan.threads, plan.blocks * 16 * d * 2 / arch.wave)

    return Space(attention_prefill.Plan, ATTENTION_MATRIX, attention_prefill.Plan(), kernel)


def _attention_dot(arch, m, heads, kv_heads, d, default=None) -> Space:
    def kernel(plan) -> Kernel:
        waves = waves_of(arch, plan.rows, d, plan.threads)
        if not waves:
            raise ValueError(f"{plan} is less than a wave of {arch.name}")
        return Kernel(
            (plan.rows, waves), kv_heads * -(-m * (heads // kv_heads) // plan.rows), waves * arch.wave, plan.rows
        )

    return Space(attention_prefill_dot.Plan, ATTENTION_DOT, default or attention_prefill_dot.Plan(), kernel)


def decode(op, arch) -> Space:
    layer, m = op.layer, op.m
    if isinstance(op, CausalAttention) and (latent := attention_latent_decode.plan_of(layer, m, arch)):
        return _decode_latent(arch, m, layer, latent)
    default = attention_splits.default_plan(layer, arch, m)

    def kernel(plan) -> Kernel:
        splits = attention_splits.splits_of(layer, arch, plan, m)
        groups = layer.kv_heads * splits.parts * splits.workgroups(m)
        return Kernel(splits, groups, splits.threads, splits.step * layer.d * 2 / arch.wave)

    return Space(type(default), DECODE, default, kernel)


def _decode_latent(arch, m, layer, default) -> Space:
    def kernel(plan) -> Kernel:
        splits = attention_latent_decode.splits_of(plan, layer, m, arch)
        shape = _latent_shape(plan, layer, arch)
        same = replace(plan, held=min(plan.held, shape.steps), fill=splits.fill, least=splits.waves)
        return Kernel(
            same, splits.parts * splits.workgroups(m), splits.threads, plan.keys * layer.width * 2 / splits.threads
        )

    return Space(attention_latent_decode.LatentDecodePlan, ATTENTION_LATENT, default, kernel)
