"""The tiles of latent attention on cooperative matrices: how rows and keys are divided among workgroups and waves. A
row is a head of a token.

In: an `Attention` layer and an arch. Out: a `Tile`, its `Shape` in fragments, and the sizes of its buffers in LDS.
"""

from dataclasses import dataclass, replace
from typing import TypeGuard

from mlc_amd.schedules.gpu.attention.cache import UNIT
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.step import SUMS
from mlc_amd.schedules.operators.attention import Attention

PAD = 1  # units of padding after a row in LDS, so that consecutive rows start in different banks
MOST = 16  # largest number of keys for which a lane computes weights


@dataclass(frozen=True)
class Tile:
    """How a workgroup computes its tile of rows; a plan of tuning."""

    waves: int = 8  # waves of a workgroup, among which the columns of values and of keys are divided
    rows: int = 32  # rows of a workgroup, which share each key that is loaded
    keys: int = 16  # keys in a block
    buffers: int = 1  # buffers for blocks of keys: with two, the next block is stored while this one is multiplied
    held: int = 64  # fragments of its queries that a wave keeps in registers; it loads the others for each block
    fill: int = 1  # number of workgroups for each compute unit that are assumed to run at the same time
    least: int = 8  # if keys of a tile are split: smallest number of blocks of keys of a workgroup


# Fragments of queries that fit into registers besides the outputs, on archs with `query_registers` (ACO of Mesa 25)
HELD = 4
# For archs of which nothing is known, or which no larger tile fits
SMALL = (Tile(waves=4), Tile(waves=2, rows=16), Tile(waves=1, rows=16))


def _preferred(arch: Device) -> tuple[Tile, ...]:
    """The tiles, in the order of preference. The first one that fits the layer and the device is used. Measured on an
    H200 with 512 tokens of 20 heads of 576 columns, after 16384 other tokens: 64 rows take a fifth longer, and no
    queries in registers more than twice as long."""
    if not arch.registers:
        return SMALL
    large = Tile(held=HELD) if arch.query_registers else Tile(fill=2)
    return large, replace(large, waves=4), *SMALL


@dataclass(frozen=True)
class Shape:
    """The work of a wave in a tile, for a layer and an arch, counted in fragments of matrices.

    For scores, the waves are divided among the fragments of rows; `parts` waves have the same rows, and each of them
    sums over some of the columns of queries and keys. For outputs, each wave has all rows and some of the columns of
    values."""

    row_fragments: int  # fragments of rows of the tile
    parts: int  # waves with the same fragment of rows
    steps: int  # fragments of columns of queries and keys that a wave sums over
    columns: int  # fragments of columns of values of a wave
    lanes: int  # lanes that share a row of scores when weights are computed
    own: int  # keys of each of these lanes


def shape_of(tile: Tile, attention: Attention, arch: Profile) -> Shape | None:
    """The Shape of a tile; None if the tile does not divide evenly, or does not fit the arch."""
    m, n, k = arch.fragment
    threads, row_fragments = tile.waves * arch.wave, tile.rows // m
    if tile.rows % m or tile.keys % n or tile.keys % k or threads > arch.threads or tile.waves % max(row_fragments, 1):
        return None
    parts, columns, steps = tile.waves // row_fragments, attention.value_d // n, attention.width // k
    lanes = threads // tile.rows
    if attention.value_d % n or columns % tile.waves or steps % parts or threads % tile.rows:
        return None
    if lanes > arch.wave or tile.keys % lanes or tile.keys // lanes > MOST:
        return None
    if lds_bytes(tile, attention, arch) > arch.lds:
        return None
    return Shape(row_fragments, parts, steps // parts, columns // tile.waves, lanes, tile.keys // lanes)


def key_units(tile: Tile, attention: Attention) -> int:
    """The units (8 float16) of a block of keys in LDS, with padding."""
    return tile.keys * (attention.width // UNIT + PAD)


def weight_units(tile: Tile) -> int:
    """The units (8 float16) of a row of weights in LDS, with padding."""
    return tile.keys // UNIT + PAD


def scores(tile: Tile, arch: Profile) -> int:
    """The size of the buffer for scores in LDS, in float32: all partial scores. It is also used to store outputs, a
    fragment for each wave."""
    m, n, _ = arch.fragment
    return tile.waves * m * max(tile.keys, n)


def lds_bytes(tile: Tile, attention: Attention, arch: Profile) -> int:
    """The bytes of LDS of a workgroup: keys, weights, scores, and a float32 for each row and for each wave."""
    units = tile.buffers * key_units(tile, attention) + tile.rows * weight_units(tile)
    return units * UNIT * 2 + (scores(tile, arch) + tile.rows + tile.waves) * 4


def part_size(tile: Tile, attention: Attention) -> int:
    """The size of a part (attention_latent_wave.py) in float32."""
    return tile.rows * (attention.value_d + 2)


def suits(arch: Device, attention: Attention) -> TypeGuard[Profile]:
    """Whether the arch can have kernels for such a layer at all."""
    return arch.matrix == "coop" and attention.values > 0


def tile_of(attention: Attention, arch: Device) -> Tile | None:
    """The tile for a layer and an arch; None if none fits."""
    if not suits(arch, attention):
        return None
    found = (replace(tile, waves=min(tile.waves, arch.threads // arch.wave)) for tile in _preferred(arch))
    return next((tile for tile in (*found, *SMALL) if shape_of(tile, attention, arch)), None)


def checked_shape(tile: Tile, layer: Attention, arch: Profile) -> Shape:
    """`shape_of` for a plan of tuning. Raises ValueError for a tile that does not fit, or needs too many registers."""
    shape = shape_of(tile, layer, arch)
    if not shape:
        raise ValueError(f"{tile} does not fit {arch.name}")
    rows, columns, _ = arch.fragment
    if shape.row_fragments * shape.columns * rows * columns // arch.wave > SUMS:
        raise ValueError(f"{tile} takes more registers than {arch.name} has")
    return shape
