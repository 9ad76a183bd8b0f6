"""Keys and values on their way from the cache to shared memory, a block of keys at a time, for attention on cooperative
matrices.

In shared memory they have the layout of the operands of the two products, contiguous along what is summed: rows of keys
with d elements, rows of columns of the values with an element per key. A row ends with 16 bytes of padding, so that
neighbouring rows start in different banks.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.cache import KEYS, UNIT
from mlc_amd.schedules.gpu.attention.cache_units import WORDS, Units
from mlc_amd.schedules.gpu.base.device import WAVE_SHARED
from mlc_amd.schedules.gpu.base.registers import at, put


def shared_units(units):
    """Shared memory in units of 16 bytes, which only barriers here order: TVM would see conflicts between waves where
    there are none."""
    return T.alloc_buffer((units,), f"float16x{UNIT}", scope=WAVE_SHARED)


class Block:
    """A block of keys or values on its way: from the cache to registers, from there to shared memory.

    units     in a block
    loaded    registers for those that a thread loads
    load_unit load_unit(number in `loaded`, `KeyBlock`, number of the unit); consecutive units are consecutive in the
              cache
    target    target(number of the unit) -> (row in shared memory, unit in the row)
    """

    def __init__(self, attention, kind, units, row_units, rows, threads, tid, load_unit, target, buffers=1):
        self.units, self.row_units, self.threads, self.tid = units, row_units, threads, tid
        self.load_unit, self.target = load_unit, target
        self.pieces = -(-units // threads)
        self.buffer = shared_units(buffers * rows * row_units)
        self.loaded = Units(attention, self.pieces, kind)

    def _unit(self, i):
        unit = i * self.threads + self.tid
        # surplus threads repeat the last unit
        return T.Bind(unit if (i + 1) * self.threads <= self.units else T.min(unit, T.int32(self.units - 1)))

    def load(self, block):
        """Starts the loads of a `KeyBlock` into registers."""
        for i in range(self.pieces):
            self.load_unit(self.loaded, i, block, self._unit(i))

    def store(self, first=0):
        """Stores what was loaded into `buffer`, from unit `first` on."""
        for i in range(self.pieces):
            row, unit = self.target(self._unit(i))
            words, word = self.loaded.pairs(i)
            put(
                self.buffer,
                T.reinterpret(f"float16x{UNIT}", words[at(word, WORDS)]),
                row * self.row_units + unit + first,
            )


def key_block(attention, keys, threads, tid, buffers=1):
    """The `Block` of `keys` keys of an `Attention` layer, as the threads of a workgroup (this one is `tid`) move it.
    Rows are keys. buffers: blocks that there is shared memory for."""
    width, d = min(KEYS, keys), attention.width

    def place(unit):
        return unit // (width * (d // UNIT)) * KEYS + unit % width, unit // width % (d // UNIT)

    def load_unit(loaded, n, block, unit):
        key, c = place(unit)
        loaded.load_key(n, block, block.place0 + key, c)

    return Block(attention, "key", keys * d // UNIT, d // UNIT + 1, keys, threads, tid, load_unit, place, buffers)


def value_block(attention, keys, threads, tid):
    """The same of the values. Rows are columns."""
    d = attention.width

    def load_unit(loaded, n, block, unit):
        loaded.load_value(n, block, unit // d, unit % d)

    def place(unit):
        return unit % d, unit // d

    return Block(attention, "value", d * keys // UNIT, keys // UNIT + 1, d, threads, tid, load_unit, place)
