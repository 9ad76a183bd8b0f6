"""Which tile a kernel of `gemm_lanes.py` or `gemm_staged.py` has: tables, and what they depend on."""

from typing import NamedTuple

from mlc_amd.schedules.gpu.base.pairs import TOKENS
from mlc_amd.schedules.gpu.linear.gemm_lanes import LaneGemm, LaneTile
from mlc_amd.schedules.gpu.linear.gemm_staged import StagedGemm, StagedPair, StagedTiles, smallness, suits
from mlc_amd.schedules.gpu.linear.lane_results import ROWS

MOST_WAVES = 16  # of a workgroup
SIMDS = 4  # of a compute unit
FULL = 0.8  # share of the compute units that have work, at least, where each has one workgroup at most


class Share(NamedTuple):
    """How default tiles divide the work for so many tokens, with `LaneTile`'s fields. Subgroups share the columns until
    there are `waves` of them on each compute unit, at least `least` in a workgroup. Of several in a table the first one
    is used whose conditions hold.

    rows     0: as many as make one workgroup for each compute unit, a subgroup for every ROWS of them (`_one_each`)
    many     workgroups for each compute unit, at least
    columns  at most; 0: any number
    places   workgroups that a compute unit holds at once, most of which must be taken in each round; 0: any number
    waves_m  subgroups along the tokens, which read the same weights
    small    for formats without a table but FP4's (1), of one plane of codes (2), of which a block takes few registers,
             its scale among them (3); 0: for all
    """

    tokens: int
    rows: int
    waves_n: int
    ahead: int
    waves: int
    least: int
    many: int = 0
    columns: int = 0
    hidden: int = 0
    staged: int = 0
    places: int = 0
    waves_m: int = 1
    small: int = 0


# number of weights of a kernel, maximum of tokens (the last ones are for more, too): what takes least time on an H200
# for the shapes of an 8B model, of 1 to 32 tokens in Q4_0, of more in twelve formats. In a step of a model each kernel
# runs once, and its code comes from memory: twice the code took up to 20 us more, which timing one kernel again and
# again does not show.
SHARES = {
    1: {
        8: (Share(8, 16, 1, 0, 32, 4),),
        16: (Share(16, 16, 1, 0, 32, 4),),
        32: (
            Share(32, 32, 1, 0, 16, 4, many=4),
            Share(32, 16, 1, 1, 16, 4, columns=4096, hidden=1),
            Share(32, 32, 1, 0, 16, 4, hidden=1),
        ),
        64: (
            Share(64, 256, 8, 1, 8, 1, hidden=1, staged=1, places=1),
            Share(64, 64, 2, 0, 8, 2, many=4, hidden=1, waves_m=2, small=3),
            Share(64, 64, 2, 1, 8, 2, many=4, small=2),
            Share(64, 64, 2, 2, 8, 4, many=4, hidden=1, small=1),
            Share(64, 64, 2, 1, 8, 2, many=4),
            Share(64, 32, 1, 2, 8, 8, hidden=1, places=1, small=2),
            Share(64, 32, 1, 1, 8, 8, hidden=1, places=1, small=1),
            Share(32, 96, 3, 1, 16, 4, hidden=1, places=1, small=3),
            Share(32, 32, 1, 0, 16, 2, hidden=1),
        ),
        512: (
            Share(64, 256, 8, 1, 8, 1, hidden=1, staged=1, places=1),
            Share(64, 64, 2, 2, 8, 2, hidden=1, many=3, small=1),
            Share(64, 96, 6, 1, 16, 2, hidden=1, places=1),
            Share(64, 64, 2, 2, 8, 4, hidden=1, places=1, small=2),
            Share(64, 32, 1, 1, 8, 2, hidden=1),
        ),
    },
    2: {
        8: (Share(8, 16, 1, 0, 32, 4),),
        16: (Share(16, 16, 1, 1, 32, 4),),
        32: (Share(32, 0, 0, 0, 16, 2, hidden=1), Share(32, 32, 1, 0, 16, 4, hidden=1)),
        64: (
            Share(64, 0, 0, 1, 8, 1, hidden=1, staged=1, small=2),
            Share(64, 64, 4, 1, 8, 1, hidden=1, staged=1, places=2, small=1),
            Share(64, 32, 2, 1, 8, 2),
        ),
        512: (
            Share(64, 128, 8, 1, 8, 1, hidden=1, staged=1, places=1, many=3, small=2),
            Share(64, 0, 0, 1, 8, 1, hidden=1, staged=1, small=2),
            Share(64, 64, 4, 1, 8, 1, hidden=1, staged=1, many=4),
            Share(64, 32, 2, 1, 16, 2),
        ),
    },
}


# number of weights of a kernel, slots of an expert's tile: the same, where there are always many workgroups. For 32 and
# 512 rows of qwen3-30b-a3b.
EXPERT_SHARES = {
    1: {TOKENS: Share(TOKENS, 16, 1, 0, 32, 2), 64: Share(64, 128, 4, 1, 8, 1, hidden=1, staged=1)},
    2: {TOKENS: Share(TOKENS, 16, 1, 0, 32, 4), 64: Share(64, 128, 8, 1, 8, 1, hidden=1, staged=1)},
}


# Tokens, at most, of which several segments (q, k and v) load nothing ahead: each has code of its own, and twice as
# much takes an H200 20 instead of 16 us of 32 tokens (6144 rows of 4096 columns).
SHORT = 32


def routine(arch, tile, m, k, weights=1) -> LaneGemm:
    """The tile routine of a LaneTile. ValueError for one that does not fit."""
    if not tile.staged:
        return LaneGemm(arch, tile, m, k, weights)
    if weights == 1:
        return StagedGemm(arch, tile, m, k, weights)
    try:
        return StagedPair(arch, tile, m, k, weights)
    except ValueError:
        return StagedTiles(arch, tile, m, k, weights)


def choose(arch, formats, m, k, rows, weights=1):
    """The default LaneTile, see `gemm_coop.choose`; None if there is none for that arch."""
    if not arch.lane_matrix:
        return None
    size = next((tokens for tokens in SHARES[weights] if m <= tokens), max(SHARES[weights]))
    for share in SHARES[weights][size]:
        if not share.rows:
            share = _one_each(arch, share, rows)
        if share is None or k > (share.columns or k):
            continue
        if len(formats) > weights and size <= SHORT:
            share = share._replace(ahead=0)
        workgroups = -(-m // share.tokens) * -(-rows // share.rows)
        if workgroups < share.many * arch.units or not _balanced(workgroups, share.places * arch.units):
            continue
        if smallness(formats) < share.small or (share.staged and not suits(formats)):
            continue
        return _tile(arch, share, workgroups, m, k, weights)
    return None


def _balanced(workgroups, places) -> bool:
    """Whether these workgroups fill the places in each of their rounds; places: 0: there is no such number."""
    return not places or workgroups >= FULL * places * -(-workgroups // places)


def _one_each(arch, share, rows):
    """The share with a workgroup for each compute unit, whose subgroups read the same activations at the same time;
    None where these are too many for a workgroup, or leave units without work. Of a staged tile, which takes all
    registers, some SIMDs must have more than one: alone it waits for its loads."""
    waves_n = -(-rows // (ROWS * arch.units))
    workgroups = -(-rows // (ROWS * waves_n))
    if waves_n * share.least > MOST_WAVES or workgroups < FULL * arch.units:
        return None
    if share.staged and not SIMDS < waves_n <= share.waves:
        return None
    return share._replace(rows=ROWS * waves_n, waves_n=waves_n)


def suits_experts(tokens, formats) -> bool:
    """Whether tiles of `tokens` slots of an expert are multiplied here rather than by `gemm_coop.py`, where looking up
    tables takes less of the time."""
    return tokens == TOKENS or (suits(formats) and smallness(formats) > 0)


def choose_expert(arch, tokens, slots, k, rows, weights=1):
    """The default LaneTile for so many slots of experts in tiles of `tokens`, each with so many rows of a weight."""
    share = EXPERT_SHARES[weights][tokens]
    return _tile(arch, share, slots // share.tokens * -(-rows // share.rows), slots, k, weights)


def _tile(arch, share, workgroups, m, k, weights) -> LaneTile:
    """The share's tile with as many subgroups along the columns as there is room for."""
    waves, others = MOST_WAVES, share.waves_m * share.waves_n
    while waves > share.least and waves * others * workgroups > share.waves * arch.units:
        waves //= 2
    while True:
        tile = LaneTile(
            share.tokens, share.rows, share.waves_m, share.waves_n, waves, share.ahead, share.hidden, share.staged
        )
        try:
            routine(arch, tile, m, k, weights)
        except ValueError:
            if waves == 1:
                raise
            waves //= 2
        else:
            return tile
