"""The KV cache of an attention layer on a GPU: its layout, and which keys a row sees. No other module knows either.

    Kc float16 [kv_heads, places/32, width/8, 32, 8]    units of 8 elements of a key: 32 lanes with a key each read
                                                        512 consecutive bytes
    Vc float16 [kv_heads, places/8, width, 8]           units of 8 consecutive keys of a column: lanes with a column
                                                        each read consecutive bytes

A unit has 16 bytes and is also what a lane of a matrix instruction takes of an operand. width is d rounded up to what
matrix instructions take (`Attention.width`); the padding is never written, and read by matrix instructions only. Both
must be allocated zeroed: attention multiplies padding, and values beyond the last key, by 0.

The key of position p has place p, in a ring of places p % ring. Attention kernels process aligned blocks of at most
PAGE keys (`KeyBlock`), which are contiguous in memory in either case. Which keys a row sees (`visible`) goes by
position: a ring has older keys in places that a row does not see yet, or no more.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.attention import PAGE
from mlc_amd.schedules.gpu.registers import at
from mlc_amd.schedules.gpu.step import live_rows

DTYPE = "float16"
KEYS, UNIT = 32, 8  # keys of a tile of Kc; elements of a unit


# ---- layout


def cache_types(attention) -> dict:
    """k, v -> (shape, dtype) of Kc and Vc of an `Attention` layer. UserError unless PAGE divides its places and UNIT
    divides d, as the attention kernels need."""
    kv_heads, places, width = attention.kv_heads, attention.places, attention.width
    if places % PAGE or attention.d % UNIT:
        raise UserError(
            f"attention on the GPU needs a context in multiples of {PAGE} and heads in multiples of {UNIT}, not "
            f"{places} and {attention.d}"
        )
    return {
        "k": ((kv_heads, places // KEYS, width // UNIT, KEYS, UNIT), DTYPE),
        "v": ((kv_heads, places // UNIT, width, UNIT), DTYPE),
    }


class KeyBlock(NamedTuple):
    """The keys of KV head `kv` from position key0 on, a block of at most PAGE keys that is aligned to its size. They
    are in the places from place0 on."""

    cache: object
    kv: object
    key0: object
    place0: object

    def key(self, place, c, e=None):
        """Unit c (elements 8*c ..) of the key in a place of the block. e: instead of the whole unit, an index within
        it."""
        tile, inner = self._split(place, KEYS)
        return self.cache.Kc[self.kv, tile, c, inner, at(0, UNIT) if e is None else e]

    def value(self, i, column, e=None):
        """Unit i (places place0 + 8*i ..) of a column of the values. e: as for `key`."""
        first, _ = self._split(self.place0, UNIT)
        return self.cache.Vc[self.kv, first + i, column, at(0, UNIT) if e is None else e]

    def _split(self, place, size):
        """place // size and place % size, for a power of two."""
        if self.cache.shifts:
            return T.shift_right(place, T.int32(size.bit_length() - 1)), place & (size - 1)
        return place // size, place % size


class Cache:
    """Declares the parameters Kc and Vc of an `Attention` layer. shifts: index arithmetic by shifts, which TVM leaves
    alone, and not by divisions, which it simplifies; a kernel takes what makes less code."""

    def __init__(self, attention, shifts=False):
        self.d, self.ring, self.shifts = attention.d, attention.ring, shifts
        types = cache_types(attention)
        self.Kc, self.Vc = T.arg("Kc", T.buffer(*types["k"])), T.arg("Vc", T.buffer(*types["v"]))

    def place(self, position):
        """The place of a position, or of the first one of a block."""
        return T.Bind(T.truncmod(position, T.int32(self.ring))) if self.ring else position

    def block(self, kv, key0) -> KeyBlock:
        return KeyBlock(self, kv, key0, self.place(key0))

    def store_key(self, kv, position, pairs):
        """Stores the key of one head at `position`. pairs: of (valid, ((element, value), ..)), the elements that this
        lane has; valid: a condition, or None."""
        place = self.place(position)
        for valid, values in pairs:
            places = [((kv, place // KEYS, e // UNIT, place % KEYS, e % UNIT), T.cast(y, DTYPE)) for e, y in values]
            store_valid(valid, self.Kc, places)

    def store_value(self, arch, kv, position, V, row, lane, scale=None):
        """Stores the value of one head at `position`, V[row, kv*d ..] (float32) times `scale` (None: 1), by the lanes
        of a wave."""
        there = self.place(position)
        for first in range(0, self.d, arch.wave):
            valid = None if first + arch.wave <= self.d else first + lane < self.d
            e = T.Bind(first + lane if valid is None else T.min(first + lane, T.int32(self.d - 1)))
            place = (kv, there // UNIT, e, there % UNIT)
            x = V[row, kv * self.d + e] if scale is None else V[row, kv * self.d + e] * scale
            store_valid(valid, self.Vc, [(place, T.cast(x, DTYPE))])


def store_valid(valid, buffer, stores):
    """Stores (index, value)s where `valid` holds (None: always)."""
    if valid is None:
        for index, value in stores:
            T.buffer_store(buffer, value, list(index))
    else:
        with T.If(valid), T.Then():
            store_valid(None, buffer, stores)


# ---- rows and the keys that they see


def row_position(state, row):
    """The position of a row of the step in its sequence. The only place that positions come from."""
    return state[0] + row


def clamped_position(state, row, ctx):
    """`row_position` limited to those of a sequence, in a register: no kernel reads out of bounds, whatever the state
    says."""
    return T.Bind(T.max(T.min(row_position(state, row), T.int32(ctx - 1)), T.int32(0)))


def is_at(state, row, position):
    """Whether the clamped position of a row is its true one: the cache has room for its key."""
    return row_position(state, row) == position


class Chunk:
    """The rows of a prefill step, consecutive tokens of one sequence. `count` of them are live and fit the cache; it
    may be 0."""

    def __init__(self, state, m, attention):
        self.first = clamped_position(state, 0, attention.ctx)
        self.count = T.Bind(T.min(live_rows(state, m, minimum=0), attention.ctx - self.first))

    def position(self, row):
        return self.first + row


class Visible(NamedTuple):
    """The keys first .. end-1. first: None for key 0."""

    first: object
    end: object

    def sees(self, key):
        """Whether `key` is one of them."""
        return key < self.end if self.first is None else (key >= self.first) & (key < self.end)

    def first_block(self, size):
        """The number of the first block of `size` keys that holds one of these keys: the int 0, or a register."""
        return 0 if self.first is None else T.Bind(self.first // size)

    def end_block(self, size):
        """The number of the first block of `size` keys behind these keys, in a register."""
        return T.Bind((self.end + size - 1) // size)


def visible(attention, position, own=True) -> Visible:
    """The keys that a row at `position` sees. own: whether its own key is among them."""
    first = None
    if attention.window:
        first = T.Bind(T.max(position - (attention.window - 1), T.int32(0)))
    elif attention.chunk:
        first = T.Bind(position - T.truncmod(position, T.int32(attention.chunk)))
    return Visible(first, T.Bind(position + 1) if own else position)
