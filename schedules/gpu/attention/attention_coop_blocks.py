"""Keys and values on their way from the cache to shared memory, a block of keys at a time, for attention on cooperative
matrices.

In shared memory they have the layout of the operands of the two products, contiguous along what is summed: rows of keys
with d elements, rows of columns of the values with an element per key. A row ends with 16 bytes of padding, so that
neighbouring rows start in different banks.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.cache import KEYS, UNIT, KeyBlock
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED
from mlc_amd.schedules.gpu.base.registers import at, put
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr


def shared_units(units: int) -> Buffer:
    """Shared memory in units of 16 bytes, which only barriers here order: TVM would see conflicts between waves where
    there are none."""
    return T.alloc_buffer((units,), f"float16x{UNIT}", scope=WAVE_SHARED)


class Block:
    """A block of keys or values on its way: from the cache to registers, from there to shared memory, `buffer`, which
    has rows of `row_units` units. The threads of a workgroup, of which this is `tid`, have some units each; consecutive
    units are consecutive in the cache. buffers: blocks that there is shared memory for."""

    kind: str  # of the units

    def __init__(self, layer: Attention, keys: int, threads: int, tid: Expr, buffers: int = 1):
        self.keys, self.d, self.threads, self.tid = keys, layer.width, threads, tid
        self.units = keys * self.d // UNIT
        self.pieces = -(-self.units // threads)
        rows, elements = (keys, self.d) if self.kind == "key" else (self.d, keys)
        self.row_units = elements // UNIT + 1
        self.buffer = shared_units(buffers * rows * self.row_units)
        self.loaded = Units(layer, self.pieces, self.kind)

    def _load_unit(self, i: int, block: KeyBlock, unit: Expr) -> None:
        """Starts the load of a unit into register number i of `loaded`."""
        raise NotImplementedError

    def _target(self, unit: Expr) -> tuple[Expr, Expr]:
        """(row in shared memory, unit in the row) of a unit."""
        raise NotImplementedError

    def _unit(self, i: int) -> Expr:
        unit = i * self.threads + self.tid
        # surplus threads repeat the last unit
        return T.Bind(unit if (i + 1) * self.threads <= self.units else T.min(unit, T.int32(self.units - 1)))

    def load(self, block: KeyBlock) -> None:
        """Starts the loads into registers."""
        for i in range(self.pieces):
            self._load_unit(i, block, self._unit(i))

    def store(self, first: Expr = 0) -> None:
        """Stores what was loaded into `buffer`, from unit `first` on."""
        for i in range(self.pieces):
            row, unit = self._target(self._unit(i))
            words, word = self.loaded.pairs(i)
            loaded = T.reinterpret(f"float16x{UNIT}", words[at(word, WORDS)])
            put(self.buffer, loaded, row * self.row_units + unit + first)


class SharedKeys(Block):
    """Rows are keys."""

    kind = "key"

    def _load_unit(self, i: int, block: KeyBlock, unit: Expr) -> None:
        key, c = self._target(unit)
        self.loaded.load_key(i, block, block.place0 + key, c)

    def _target(self, unit: Expr) -> tuple[Expr, Expr]:
        width, units = min(KEYS, self.keys), self.d // UNIT
        return unit // (width * units) * KEYS + unit % width, unit // width % units


class SharedValues(Block):
    """Rows are columns of the values."""

    kind = "value"

    def _load_unit(self, i: int, block: KeyBlock, unit: Expr) -> None:
        self.loaded.load_value(i, block, unit // self.d, unit % self.d)

    def _target(self, unit: Expr) -> tuple[Expr, Expr]:
        return unit % self.d, unit // self.d


class Shared(NamedTuple):
    """A workgroup's shared memory: the block of keys and of values, the waves' weights, the numbers 0, 1, .."""

    keys: SharedKeys
    values: SharedValues
    weights: Buffer
    numbers: Buffer
