"""Which tile a kernel of `gemm_lanes.py` or `gemm_staged.py` has: one rule, with constants as measured on an H200 with
the layers of models of 8 and 30 billion weights in four formats.

Few tokens wait for weights: a workgroup has few rows, whose columns its subgroups share out, so that each compute unit
has as many subgroups as hide the latency of memory. Many tokens wait for matrices: tiles of 64 tokens by 64 rows, or by
128 whose activations are staged in shared memory where there are workgroups enough.
"""

from collections.abc import Sequence
from dataclasses import replace

from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.gpu.base.pairs import GROUP, TOKENS
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.linear.gemm_lanes import LaneGemm
from mlc_amd.schedules.gpu.linear.gemm_staged import StagedGemm, StagedPair, StagedTiles, smallness, suits
from mlc_amd.schedules.gpu.linear.gemm_tile import Product
from mlc_amd.schedules.gpu.linear.lane_results import ROWS, LaneTile

FEW, MANY = (TOKENS, 16, 32), 64  # tokens of a tile
MOST_WAVES = 16  # of a workgroup
SIMDS = 4  # of a compute unit: subgroups of a workgroup where there are several workgroups for each unit
# For few tokens, subgroups for each compute unit, at most, by tokens of a tile; of a workgroup, at least; groups of
# columns of each, at least.
FULL, LEAST, LEAST_GROUPS = {TOKENS: 32, 16: 32, 32: 16}, 4, 3
# For FEW's most tokens, workgroups for each compute unit from which they have twice as many rows.
WIDE = 2
# Workgroups for each compute unit, at least, of staged tiles of one weight and of two, which otherwise share registers
# with their activations.
STAGED = {1: 4, 2: 1}


def routine(of: Product, tile: LaneTile) -> LaneGemm:
    """The tile routine of a LaneTile. ValueError for one that does not fit."""
    if not tile.staged:
        return LaneGemm(of, tile)
    if of.weights == 1:
        return StagedGemm(of, tile)
    try:
        return StagedPair(of, tile)
    except ValueError:
        return StagedTiles(of, tile)


def choose(of: Product) -> LaneTile:
    """The default tile. ValueError if none fits."""
    if of.expert_slots:  # there are workgroups enough
        if of.expert_slots == TOKENS:
            return _fitting(of, LaneTile(TOKENS, ROWS, 1, 1, MOST_WAVES), 0)
        return LaneTile(of.expert_slots, 2 * MANY, 1, SIMDS * of.weights, 1, ahead=1, hidden=1, staged=1)
    tokens = next((tokens for tokens in FEW if of.m <= tokens), None)
    return _few(of, tokens) if tokens else _many(of)


def _few(of: Product, tokens: int) -> LaneTile:
    """Loads ahead only of few rows and one weight: each segment (q, k and v) has code of its own, and twice as much of
    it takes an H200 20 instead of 16 us (32 tokens, 6144 rows of 4096 columns)."""
    most, units = tokens == FEW[-1], of.arch.units
    wide = most and of.rows >= WIDE * units * 2 * ROWS
    height = ROWS * (1 + wide)
    ahead, hidden = most and not wide and len(of.formats) == 1, most and not (wide and of.weights == 1)
    tile = LaneTile(tokens, height, 1, 1, MOST_WAVES, int(ahead), int(hidden))
    return _fitting(of, tile, FULL[tokens] * units // -(-of.rows // height))


def _many(of: Product) -> LaneTile:
    """Each workgroup has a subgroup for each SIMD, or two where no compute unit has a second workgroup; half the rows
    where that leaves half of the units without work."""
    height, units = MANY // of.weights, of.arch.units
    if _is_stageable(of.formats) and _workgroups(of, 2 * height) >= STAGED[of.weights] * units:
        return LaneTile(MANY, 2 * height, 1, SIMDS, 1, ahead=1, hidden=1, staged=1)
    waves_n = 2
    if 2 * _workgroups(of, height) <= units:
        height, waves_n = height // 2, 1
    waves = SIMDS * (1 + (_workgroups(of, height) <= units))
    # of tables and of two weights, registers hold no activations ahead
    ahead = 2 if of.weights == 1 and smallness(of.formats) else 1
    tile = LaneTile(MANY, height, 1, waves_n, waves // waves_n, ahead, hidden=1)
    return _fitting(of, tile, tile.waves_k)


def _workgroups(of: Product, height: int) -> int:
    return -(-of.m // MANY) * -(-of.rows // height)


def _is_stageable(formats: Sequence[Format]) -> bool:
    return suits(formats) and smallness(formats) > 0


def _fitting(of: Product, tile: LaneTile, most: int) -> LaneTile:
    """The tile with as many subgroups along the columns as there is work and room for: `most` at most, as far as LEAST
    leaves a choice."""
    least = LEAST
    while least > 1 and of.k // (GROUP * BLOCK) < LEAST_GROUPS * least:
        least //= 2
    while tile.waves_k > least and tile.waves_k > most:
        tile = replace(tile, waves_k=tile.waves_k // 2)
    while True:
        try:
            return routine(of, tile).tile
        except ValueError:
            if tile.waves_k == 1:
                raise
            tile = replace(tile, waves_k=tile.waves_k // 2)


def suits_experts(tokens: int, formats: Sequence[Format]) -> bool:
    """Whether tiles of `tokens` slots of an expert are multiplied here rather than by `gemm_coop.py`, where looking up
    tables takes less of the time."""
    return tokens == TOKENS or _is_stageable(formats)
