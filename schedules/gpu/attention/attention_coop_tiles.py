"""Attention of chunks on cooperative matrices: how rows and keys are divided between waves and workgroups (`Tile`), and
the copy of keys and values from the cache to shared memory, a block of keys at a time (`SharedBlock`).

In shared memory, keys and values have the layout of operands of the two products, contiguous along the dimension of the
sum: a row for each key with its d elements; a row for each column of the values with an element for each key. Each row
ends with 16 bytes of padding, so that neighbouring rows start in different banks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.cache import KEYS, UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED
from mlc_amd.schedules.gpu.base.profiles import Profile
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, owned, put
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

NARROW = 64  # columns of a head, at most, whose outputs take few registers
SHARED = 4  # parts of a block, and waves, where workgroups would be fewer than compute units
# Of a lane's registers, those for outputs, queries and what is loaded of the next block: with more, ACO of Mesa 25
# spills.
ROOM = 200


@dataclass(frozen=True)
class Tile:
    waves: int = 4  # of a workgroup
    fragments: int = 1  # of rows in a wave: each key and value that is read from shared memory serves them all
    keys: int = 64  # of a block
    # that a block's keys are divided into: so many waves have the same rows, and add up what they have at the end
    parts: int = 1

    @property
    def own_keys(self) -> int:
        """The number of keys of a block that a wave multiplies."""
        return self.keys // self.parts

    @property
    def row_fragments(self) -> int:
        """The number of fragments of rows of a workgroup."""
        return self.waves // self.parts * self.fragments

    def held_steps(self, width: int, arch: Profile) -> int:
        """How many of the width / k fragments of the queries of a row stay in registers. The others are loaded again
        for each block."""
        m, _, k = arch.fragment
        all_steps = width // k
        if not arch.query_registers:
            return all_steps
        outputs, loaded = self.fragments * width * m // arch.wave, self.keys * width // (self.waves * arch.wave)
        return max(min(all_steps, (ROOM - outputs - loaded) // (self.fragments * arch.query_registers)), 0)

    def wave_units(self, fragment: tuple[int, ...]) -> int:
        """Units of shared memory for a wave's weights, or for one fragment of float32."""
        m, n, _ = fragment
        return max(self.fragments * m * (self.own_keys // UNIT + 1), m * n // WIDTH)

    def lds_bytes(self, width: int, fragment: tuple[int, ...]) -> int:
        """The bytes of shared memory of a workgroup. width: columns of a head, with padding."""
        units = self.keys * (width // UNIT + 1) + width * (self.keys // UNIT + 1)
        bounds = self.waves * self.fragments * 2 * fragment[0]
        return (units + self.waves * self.wave_units(fragment)) * UNIT * 2 + (max(fragment) + bounds) * 4

    def workgroups(self, layer: Attention, m: int, arch: Profile) -> int:
        """The number of workgroups for a chunk of m tokens."""
        return layer.kv_heads * -(-(m // arch.fragment[0] * layer.group) // self.row_fragments)


def _preferred(width: int, arch: Profile) -> Tile:
    """The rule, before shared memory limits it: blocks of 64 keys where registers hold all that a wave needs, smaller
    ones where they must be counted, and of wide heads shared by more waves; 32 keys where nothing is known."""
    narrow = width <= NARROW
    if arch.query_registers:
        return Tile(keys=32) if narrow else Tile(waves=8, keys=16)
    return Tile(waves=8 if narrow else 4) if arch.registers else Tile(keys=32)


def tile_of(layer: Attention, m: int, arch: Profile) -> Tile:
    """The tile for a chunk of m tokens, with fewer keys if wide heads would not fit into shared memory. If there are
    fewer workgroups than compute units, the keys of each block are divided between waves, if each wave gets a whole
    fragment: this is 1.5 to 1.8 times as fast after 2048 tokens on an H200. Raises UserError if no tile fits."""
    tile = _largest_tile(layer.width, arch)
    if tile.keys >= SHARED * max(arch.fragment) and tile.workgroups(layer, m, arch) < arch.units:
        return replace(tile, waves=SHARED, parts=SHARED)
    return tile


def _largest_tile(width: int, arch: Profile) -> Tile:
    best = _preferred(width, arch)
    best = replace(best, waves=min(best.waves, arch.threads // arch.wave))
    for keys in (64, 32, 16):
        tile = replace(best, keys=keys)
        if keys <= best.keys and tile.lds_bytes(width, arch.fragment) <= arch.lds:
            return tile
    raise UserError(
        f"attention with heads of {width} does not fit the shared memory of {arch.name}; compile for "
        f"{arch.name}:matrix=none"
    )


def shared_units(units: int) -> Buffer:
    """Shared memory in units of 16 bytes. Its scope is WAVE_SHARED, so that TVM adds no barriers: it would see
    conflicts between waves where there are none. This module and its users have the barriers that are needed."""
    return T.alloc_buffer((units,), f"float16x{UNIT}", scope=WAVE_SHARED)


class SharedBlock:
    """The copy of a block of keys or values from the cache to registers (`load`), and from there to shared memory
    (`store`). buffer: the shared memory, with rows of `row_units` units: one row for each key, or for each column of
    the values. Each thread of the workgroup copies some units; units of neighbouring threads are neighbours in the
    cache. tid: number of this thread. kind: "key" or "value". buffers: number of blocks for which there is shared
    memory."""

    def __init__(self, kind: str, layer: Attention, keys: int, threads: int, tid: Expr, buffers: int = 1):
        self.kind, self.keys, self.d, self.threads, self.tid = kind, keys, layer.width, threads, tid
        self.units = keys * self.d // UNIT
        rows, elements = (keys, self.d) if kind == "key" else (self.d, keys)
        self.row_units = elements // UNIT + 1
        self.buffer = shared_units(buffers * rows * self.row_units)
        self.loaded = Units(layer, -(-self.units // threads), kind)

    def _target(self, unit: Expr) -> tuple[Expr, Expr]:
        """(row in shared memory, unit in the row) of a unit."""
        if self.kind == "value":
            return unit % self.d, unit // self.d
        width, units = min(KEYS, self.keys), self.d // UNIT
        return unit // (width * units) * KEYS + unit % width, unit // width % units

    def _pieces(self) -> Iterator[Expr]:
        """The numbers of this thread's units. A thread without a unit in a step repeats its unit of the step before."""
        for first in range(0, self.units, self.threads):
            place, valid = owned(first, self.tid, self.threads, self.units)
            if first and valid is not None:
                own = T.Bind(first + self.tid)
                place = T.Select(own < self.units, own, own - self.threads)
            yield T.Bind(place)

    def load(self, block: KeyBlock) -> None:
        """Starts the loads into registers."""
        for i, unit in enumerate(self._pieces()):
            row, c = self._target(unit)
            if self.kind == "key":
                self.loaded.load_key(i, block, block.place0 + row, c)
            else:
                self.loaded.load_value(i, block, c, row)

    def store(self, first: Expr = 0) -> None:
        """Stores the loaded units to `buffer`, from unit `first` on."""
        for i, piece in enumerate(self._pieces()):
            row, unit = self._target(piece)
            words, word = self.loaded.pairs(i)
            loaded = T.reinterpret(f"float16x{UNIT}", words[at(word, WORDS)])
            put(self.buffer, loaded, row * self.row_units + unit + first)


class Shared(NamedTuple):
    """A workgroup's shared memory: the block of keys and of values, the waves' weights, the numbers 0, 1, .., and of
    each fragment of each wave the first keys that its rows see, and the ends."""

    keys: SharedBlock
    values: SharedBlock
    weights: Buffer
    numbers: Buffer
    bounds: Buffer
