"""Weights unpacked once for many tokens: the Blocks of a task's tiles of 16 rows in a buffer of the thread.

In: planes and tile numbers. Out: the same Block as of `load`, to the bit: codes as a byte each in the order of the
registers, scales and offsets as float32. A prefill kernel goes through its weights once for each tile of tokens; with
these it unpacks bits and scales only once.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.base.isa import QUADS, Isa
from mlc_amd.schedules.cpu.base.vector import at, store
from mlc_amd.schedules.cpu.linear.load import Block, groups, load
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.formats import Format
from mlc_amd.schedules.tir import Buffer, Expr


def unpacked_bytes(fmt: Format, rows: int, k: int) -> int:
    """Bytes of `rows` unpacked rows of k columns."""
    return rows * (k + k // BLOCK * 4 * _factors(fmt))


def _factors(fmt: Format) -> int:
    """Scales and offsets of a row in a block of 32 columns."""
    return groups(fmt) * (2 if fmt.minimum else 1)


class Unpacked:
    """The `held` tiles of a weight of k columns from tile `first` on. The constructor emits the unpacking."""

    def __init__(self, fmt: Format, bufs: dict[str, Buffer], first: Expr, held: int, k: int, isa: Isa):
        lanes, blocks = isa.lanes, k // BLOCK
        self.fmt, self.isa = fmt, isa
        self.codes = T.alloc_buffer((held, blocks, ROWS // lanes, QUADS, 4 * lanes), "uint8", scope="local")
        self.factors = T.alloc_buffer((held, blocks, _factors(fmt), ROWS), "float32", scope="local")
        with T.serial(held) as t, T.serial(blocks) as b:
            for r in range(ROWS // lanes):
                block = load(fmt, bufs, first + t, r * lanes, b, isa)
                for j, weight in enumerate(block.weights):
                    store(self.codes, isa.keep(weight), t, b, r, j, at(0, 4 * lanes))
                for i, factor in enumerate([*block.scales, *block.offsets]):
                    store(self.factors, factor, t, b, i, at(r * lanes, lanes))

    def at(self, t: Expr) -> "UnpackedTile":
        """Tile first + t."""
        return UnpackedTile(self, t)


class UnpackedTile(NamedTuple):
    """One of an Unpacked's tiles."""

    unpacked: Unpacked
    t: Expr

    @property
    def fmt(self) -> Format:
        return self.unpacked.fmt

    def load(self, row: int, b: Expr) -> Block:
        """The Block of the tile's rows `row`.. ."""
        kept, t, fmt, isa = self.unpacked, self.t, self.unpacked.fmt, self.unpacked.isa
        lanes, parts = isa.lanes, groups(fmt)
        weights = [T.Bind(kept.codes[t, b, row // lanes, j, at(0, 4 * lanes)]) for j in range(QUADS)]
        if fmt.signed or fmt.table:
            weights = [isa.kept(w) for w in weights]
        found = [T.Bind(kept.factors[t, b, i, at(row, lanes)]) for i in range(_factors(fmt))]
        return Block(weights, found[:parts], found[parts:])
