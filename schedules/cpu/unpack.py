"""Weights unpacked once for many tokens: what `load` gives of some tiles of 16 rows, kept in this thread's memory.

In: planes and tiles' numbers. Out: the same Block, to the bit, from memory: codes a byte each in the order of registers, scales and offsets
float32. A kernel of many tokens goes through its weights once for each tile of tokens; bits and scales are taken apart only once.
"""
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.isa import QUADS
from mlc_amd.schedules.cpu.load import Block, groups, load
from mlc_amd.schedules.cpu.planes import BLOCK, ROWS
from mlc_amd.schedules.cpu.vector import at, store


def unpacked_bytes(fmt, rows, k):
    """Bytes of `rows` rows of k columns."""
    return rows * (k + k // BLOCK * 4 * _factors(fmt))


def _factors(fmt):
    """Scales and offsets of a row in a block of 32 columns."""
    return groups(fmt) * (2 if fmt.minimum else 1)


class Unpacked:
    """Room for `tiles` tiles of a weight of k columns."""

    def __init__(self, fmt, tiles, k, isa):
        blocks = k // BLOCK
        self.fmt, self.isa = fmt, isa
        self.codes = T.alloc_buffer((tiles, blocks, ROWS // isa.lanes, QUADS, 4 * isa.lanes), "uint8", scope="local")
        self.factors = T.alloc_buffer((tiles, blocks, _factors(fmt), ROWS), "float32", scope="local")

    def emit_fill(self, bufs, tile, place):
        """Unpacks tile `tile` of the planes to place `place`."""
        lanes = self.isa.lanes
        with T.serial(self.codes.shape[1]) as b:
            for r in range(ROWS // lanes):
                block = load(self.fmt, bufs, tile, r * lanes, b, self.isa)
                for j, weight in enumerate(block.weights):
                    store(self.codes, self.isa.keep(weight), place, b, r, j, at(0, 4 * lanes))
                for i, factor in enumerate([*block.scales, *block.offsets]):
                    store(self.factors, factor, place, b, i, at(r * lanes, lanes))

    def at(self, place):
        """The tile at `place`."""
        return _Tile(self, place)


class _Tile(NamedTuple):
    unpacked: Unpacked
    place: object

    def load(self, row, b):
        """The Block of the tile's rows `row`.. ."""
        kept, place, fmt, isa = self.unpacked, self.place, self.unpacked.fmt, self.unpacked.isa
        lanes, parts = isa.lanes, groups(fmt)
        weights = [T.Bind(kept.codes[place, b, row // lanes, j, at(0, 4 * lanes)]) for j in range(QUADS)]
        if fmt.signed or fmt.table:
            weights = [isa.kept(w) for w in weights]
        found = [T.Bind(kept.factors[place, b, i, at(row, lanes)]) for i in range(_factors(fmt))]
        return Block(weights, found[:parts], found[parts:])
