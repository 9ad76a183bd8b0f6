"""Keys and values on their way from the cache to shared memory, a block of keys at a time, for attention on cooperative
matrices.

In shared memory they have the layout of the operands of the two products, contiguous along what is summed: rows of keys
with d elements, rows of columns of the values with an element per key. A row ends with 16 bytes of padding, so that
neighbouring rows start in different banks.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.cache import KEYS, UNIT
from mlc_amd.schedules.gpu.device import WAVE_SHARED
from mlc_amd.schedules.gpu.registers import at, local, put

WORDS = UNIT // 2  # of a unit of 16 bytes


def shared_units(units):
    """Shared memory in units of 16 bytes, which only barriers here order: TVM would see conflicts between waves where
    there are none."""
    return T.alloc_buffer((units,), f"float16x{UNIT}", scope=WAVE_SHARED)


class Block:
    """A block of keys or values on its way: from the cache to registers, from there to shared memory.

    units     of 16 bytes in a block
    source    source(`KeyBlock`, number of the unit) -> the unit in the cache; consecutive units are consecutive there
    target    target(number of the unit) -> (row in shared memory, unit in the row)
    """

    def __init__(self, units, row_units, rows, threads, tid, source, target):
        self.units, self.row_units, self.threads, self.tid, self.source, self.target = (
            units,
            row_units,
            threads,
            tid,
            source,
            target,
        )
        self.pieces = -(-units // threads)
        self.buffer = shared_units(rows * row_units)
        self.words = local(self.pieces * WORDS, "uint32")

    def _unit(self, i):
        unit = i * self.threads + self.tid
        # surplus threads repeat the last unit
        return T.Bind(unit if (i + 1) * self.threads <= self.units else T.min(unit, T.int32(self.units - 1)))

    def load(self, block):
        """Starts the loads of a `KeyBlock` into registers."""
        for i in range(self.pieces):
            put(self.words, T.reinterpret(f"uint32x{WORDS}", self.source(block, self._unit(i))), at(i * WORDS, WORDS))

    def store(self):
        """Stores what was loaded into `buffer`."""
        for i in range(self.pieces):
            row, unit = self.target(self._unit(i))
            put(
                self.buffer,
                T.reinterpret(f"float16x{UNIT}", self.words[at(i * WORDS, WORDS)]),
                row * self.row_units + unit,
            )


def key_block(d, keys, threads, tid):
    """The `Block` of `keys` keys, as the threads of a workgroup (this one is `tid`) move it. Rows are keys."""
    width = min(KEYS, keys)

    def place(unit):
        return unit // (width * (d // UNIT)) * KEYS + unit % width, unit // width % (d // UNIT)

    def source(block, unit):
        key, c = place(unit)
        return block.key(block.place0 + key, c)

    return Block(keys * d // UNIT, d // UNIT + 1, keys, threads, tid, source, place)


def value_block(d, keys, threads, tid):
    """The same of the values. Rows are columns."""

    def source(block, unit):
        return block.value(unit // d, unit % d)

    return Block(d * keys // UNIT, keys // UNIT + 1, d, threads, tid, source, lambda unit: (unit % d, unit // d))
