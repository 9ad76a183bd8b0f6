"""The tiles of attention on cooperative matrices: how a chunk's rows and keys are divided among waves and workgroups.

In: a chunk's shape and an arch. Out: a `Tile`, and what it takes of shared memory.
"""

from dataclasses import dataclass, replace

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.cache import UNIT
from mlc_amd.schedules.gpu.base.quantize import WIDTH


@dataclass(frozen=True)
class Tile:
    """waves     of a workgroup
    fragments  of rows in a wave: each key and value that is read from shared memory serves them all
    keys       of a block
    parts      that a block's keys are dealt out to: so many waves have the same rows, and add up what they have at the
               end
    """

    waves: int = 4
    fragments: int = 1
    keys: int = 64
    parts: int = 1

    @property
    def own_keys(self) -> int:
        """Keys of a block that a wave looks at."""
        return self.keys // self.parts

    @property
    def row_fragments(self) -> int:
        """Fragments of rows that a workgroup has."""
        return self.waves // self.parts * self.fragments


# family: (largest head size that it is for, tile), in ascending order
NARROW, ANY = 64, 1 << 30
TILES = {
    "nvidia": ((NARROW, Tile(waves=8)), (ANY, Tile())),
    "rdna3": ((NARROW, Tile(keys=32)), (ANY, Tile(waves=8, keys=16))),
    "rdna4": ((NARROW, Tile(keys=32)), (ANY, Tile(waves=8, keys=16))),
}
OTHERS = ((ANY, Tile(keys=32)),)
# Where those make fewer workgroups than the GPU has units (short chunks): measured on an H200, 1.5 to 1.8 times as fast
# behind 2048 tokens.
FEW = {"nvidia": Tile(parts=4)}


# Of a lane's registers, those for outputs, queries and what is loaded of the next block; and by family those for a
# fragment of queries, which ACO keeps as 16 numbers. With more, ACO of Mesa 25 spills. Other families hold all queries.
ROOM, QUERY = 200, {"rdna3": 16, "rdna4": 16}


def held_steps(tile, width, arch) -> int:
    """How many of the width / k fragments that a row of queries has stay in registers; the others are loaded for each
    block."""
    m, _, k = arch.fragment
    all_steps = width // k
    if arch.family not in QUERY:
        return all_steps
    outputs, loaded = tile.fragments * width * m // arch.wave, tile.keys * width // (tile.waves * arch.wave)
    return max(min(all_steps, (ROOM - outputs - loaded) // (tile.fragments * QUERY[arch.family])), 0)


def wave_units(tile, fragment) -> int:
    """Units of shared memory for a wave's weights, or for one fragment of float32."""
    m, n, _ = fragment
    return max(tile.fragments * m * (tile.own_keys // UNIT + 1), m * n // WIDTH)


def lds_bytes(tile, width, fragment) -> int:
    """Bytes of shared memory that a workgroup uses. width: of a head, with padding."""
    units = tile.keys * (width // UNIT + 1) + width * (tile.keys // UNIT + 1) + tile.waves * wave_units(tile, fragment)
    return units * UNIT * 2 + max(fragment) * 4


def tile_of(m, heads, kv_heads, width, arch) -> Tile:
    """The arch's tile for a chunk of m tokens, with fewer keys where wide heads would not fit its shared memory.
    UserError if none fits."""
    tile, few = _largest_tile(width, arch), FEW.get(arch.family)
    short = few and workgroups(tile, m, heads, kv_heads, arch) < arch.units
    return few if short and lds_bytes(few, width, arch.fragment) <= arch.lds else tile


def workgroups(tile, m, heads, kv_heads, arch) -> int:
    """Of a chunk of m tokens."""
    return kv_heads * -(-(m // arch.fragment[0] * (heads // kv_heads)) // tile.row_fragments)


def _largest_tile(width, arch) -> Tile:
    best = next(tile for limit, tile in TILES.get(arch.family, OTHERS) if width <= limit)
    best = replace(best, waves=min(best.waves, arch.threads // arch.wave))
    for keys in (64, 32, 16):
        tile = replace(best, keys=keys)
        if keys <= best.keys and lds_bytes(tile, width, arch.fragment) <= arch.lds:
            return tile
    raise UserError(
        f"attention with heads of {width} does not fit the shared memory of {arch.name}; compile for "
        f"{arch.name}:matrix=none"
    )
