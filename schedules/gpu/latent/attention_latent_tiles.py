"""The tiles of latent attention on matrix units: how a chunk's rows (token x head) and keys are divided among waves and
workgroups.

In: an `Attention` layer and an arch. Out: a `Tile`, and what it takes of shared memory.
"""

from dataclasses import dataclass, replace
from typing import TypeGuard

from mlc_amd.schedules.gpu.attention.cache import UNIT
from mlc_amd.schedules.gpu.base.profiles import Device, Profile
from mlc_amd.schedules.gpu.base.step import SUMS
from mlc_amd.schedules.operators.attention import Attention

PAD = 1  # units after a row in shared memory: neighbouring rows start in different banks
MOST = 16  # keys whose weights a lane makes, at most


@dataclass(frozen=True)
class Tile:
    waves: int = 8  # of a workgroup: each has a slice of the values' columns, and of the keys' for some of the rows
    rows: int = 32  # of a workgroup, which share each key that is loaded
    keys: int = 16  # of a block
    buffers: int = 1  # of blocks of keys: with two, the next block is stored while this one is multiplied
    held: int = 64  # fragments of its queries that a wave keeps in registers; it loads the others for each block
    fill: int = 1  # workgroups per compute unit that the GPU is kept busy with
    least: int = 8  # blocks of keys that a workgroup has at least, where several share a tile's keys


HELD = 4  # fragments of queries that fit beside the outputs where registers must be counted (ACO of Mesa 25)
# Where nothing is known of a device, or nothing larger fits it.
SMALL = (Tile(waves=4), Tile(waves=2, rows=16), Tile(waves=1, rows=16))


def _preferred(arch: Device) -> tuple[Tile, ...]:
    """The rule: tiles in the order of preference, of which the first that fits the layer and the device is taken. On an
    H200, 512 tokens of 20 heads of 576 columns after 16384 others take a fifth longer with 64 rows, and more than twice
    as long without queries in registers."""
    if not arch.registers:
        return SMALL
    large = Tile(held=HELD) if arch.query_registers else Tile(fill=2)
    return large, replace(large, waves=4), *SMALL


@dataclass(frozen=True)
class Shape:
    """A tile for a layer and an arch. Counts, fragments are of matrices."""

    row_fragments: int  # of the tile
    parts: int  # waves that have the same rows of the scores, of which each adds up a part of the columns
    steps: int  # of these columns that a wave has
    columns: int  # fragments of the values' columns that a wave has
    lanes: int  # that share a row of scores, `own` keys each
    own: int


def shape_of(tile: Tile, attention: Attention, arch: Profile) -> Shape | None:
    """None for what does not divide, or does not fit the arch."""
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
    """Of a block of keys in shared memory."""
    return tile.keys * (attention.width // UNIT + PAD)


def weight_units(tile: Tile) -> int:
    """Of a row of weights."""
    return tile.keys // UNIT + PAD


def scores(tile: Tile, arch: Profile) -> int:
    """float32 of the parts of all scores, and in the end a fragment of each wave."""
    m, n, _ = arch.fragment
    return tile.waves * m * max(tile.keys, n)


def lds_bytes(tile: Tile, attention: Attention, arch: Profile) -> int:
    """Bytes of shared memory that a workgroup uses: keys, weights, scores, and a number for each row and each wave."""
    units = tile.buffers * key_units(tile, attention) + tile.rows * weight_units(tile)
    return units * UNIT * 2 + (scores(tile, arch) + tile.rows + tile.waves) * 4


def part_size(tile: Tile, attention: Attention) -> int:
    """float32 of a part."""
    return tile.rows * (attention.value_d + 2)


def suits(arch: Device, attention: Attention) -> TypeGuard[Profile]:
    """Whether there are kernels for such a layer at all."""
    return arch.matrix == "coop" and attention.values > 0


def tile_of(attention: Attention, arch: Device) -> Tile | None:
    """The arch's tile; None if there is none for such a layer."""
    if not suits(arch, attention):
        return None
    found = (replace(tile, waves=min(tile.waves, arch.threads // arch.wave)) for tile in _preferred(arch))
    return next((tile for tile in (*found, *SMALL) if shape_of(tile, attention, arch)), None)


def checked_shape(tile: Tile, layer: Attention, arch: Profile) -> Shape:
    """`shape_of` of a plan of tuning. ValueError for a tile that does not fit, or takes too many registers."""
    shape = shape_of(tile, layer, arch)
    if not shape:
        raise ValueError(f"{tile} does not fit {arch.name}")
    rows, columns, _ = arch.fragment
    if shape.row_fragments * shape.columns * rows * columns // arch.wave > SUMS:
        raise ValueError(f"{tile} takes more registers than {arch.name} has")
    return shape
