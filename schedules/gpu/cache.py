"""The KV cache of an attention layer on a GPU: its layout, where the keys of a sequence are, and which of them a row
sees. No other module knows any of it.

    Kc float16 [pages, kv_heads, PAGE/32, width/8, 32, 8]   units of 8 elements of a key: 32 lanes with a key each read
                                                            512 consecutive bytes
    Vc float16 [pages, kv_heads, PAGE/8, width, 8]          units of 8 consecutive keys of a column: lanes with a column
                                                            each read consecutive bytes

A unit has 16 bytes and is also what a lane of a matrix instruction takes of an operand. width is d rounded up to what
matrix instructions take (`Attention.width`); the padding is never written, and read by matrix instructions only. Both
must be allocated zeroed: attention multiplies padding, and values beyond the last key, by 0. Kernels are declared for
ctx/PAGE pages, but there may be any number, of fewer than 2**31 elements.

A row of a step has a position in its sequence and a slot, which names the sequence: `rows` int32[m, 2]. The page with
the keys of the positions PAGE*i .. of a slot is `pages` int32[SLOTS, ctx/PAGE] [slot, i]. Entries behind the last key
are valid page numbers, too: masked keys are read. Attention kernels process aligned blocks of at most PAGE keys
(`KeyBlock`), which are in one page. Which keys a row sees (`visible`) goes by position.
"""

from copy import copy
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.attention import PAGE, SLOTS
from mlc_amd.schedules.gpu.registers import at, local, put
from mlc_amd.schedules.gpu.step import live_rows

DTYPE = "float16"
KEYS, UNIT = 32, 8  # keys of a tile of Kc; elements of a unit
NOT_NEGATIVE = 0x7FFFFFFF  # a mask: lets address arithmetic split off a page number (compiler/codegen/spirv/memory.py)


# ---- layout


def cache_types(attention) -> dict:
    """k, v -> (shape, dtype) of Kc and Vc of an `Attention` layer for one sequence of ctx positions. UserError unless
    PAGE divides these and UNIT divides d, as the attention kernels need."""
    kv_heads, ctx, width = attention.kv_heads, attention.ctx, attention.width
    if ctx % PAGE or attention.d % UNIT:
        raise UserError(
            f"attention on the GPU needs a context in multiples of {PAGE} and heads in multiples of {UNIT}, not "
            f"{ctx} and {attention.d}"
        )
    return {
        "k": ((ctx // PAGE, kv_heads, PAGE // KEYS, width // UNIT, KEYS, UNIT), DTYPE),
        "v": ((ctx // PAGE, kv_heads, PAGE // UNIT, width, UNIT), DTYPE),
    }


def rows_arg(m):
    """Declares the parameter `rows`."""
    return T.arg("rows", T.buffer((m, 2), "int32"))


def pages_arg(attention):
    """Declares the parameter `pages`."""
    return T.arg("pages", T.buffer((SLOTS, attention.blocks), "int32"))


class KeyBlock(NamedTuple):
    """The keys of KV head `kv` from position key0 on, a block of at most PAGE keys that is aligned to its size. They
    have the places from place0 on of a page."""

    cache: object
    kv: object
    key0: object
    page: object
    place0: object

    def key(self, place, c, e=None):
        """Unit c (elements 8*c ..) of the key in a place of the page. e: instead of the whole unit, an index within
        it."""
        tile, inner = self._split(place, KEYS)
        return self.cache.Kc[self.page, self.kv, tile, c, inner, at(0, UNIT) if e is None else e]

    def value(self, i, column, e=None):
        """Unit i (places place0 + 8*i ..) of a column of the values. e: as for `key`."""
        first, _ = self._split(self.place0, UNIT)
        return self.cache.Vc[self.page, self.kv, first + i, column, at(0, UNIT) if e is None else e]

    def _split(self, place, size):
        """place // size and place % size, for a power of two."""
        if self.cache.shifts and not isinstance(place, int):
            return T.shift_right(place, T.int32(size.bit_length() - 1)), place & (size - 1)
        return place // size, place % size


class Cache:
    """Declares the parameters Kc and Vc of an `Attention` layer; pages: of `pages_arg`."""

    def __init__(self, attention, pages):
        self.d, self.pages, self.shifts = attention.d, pages, False
        types = cache_types(attention)
        self.Kc, self.Vc = T.arg("Kc", T.buffer(*types["k"])), T.arg("Vc", T.buffer(*types["v"]))

    def by_shifts(self):
        """The same with index arithmetic by shifts, which TVM leaves alone, and not by divisions, which it simplifies;
        a kernel takes what makes less code."""
        found = copy(self)
        found.shifts = True
        return found

    def page(self, slot, position):
        """The page of a position of a slot, as the table has it."""
        return self.pages[slot, T.shift_right(position, T.int32(PAGE.bit_length() - 1))]

    def block(self, kv, key0, page, size) -> KeyBlock:
        """Of `size` keys; page: of `Pages`."""
        return KeyBlock(self, kv, key0, page, 0 if size == PAGE else T.Bind(key0 & (PAGE - 1)))

    def _place(self, slot, position):
        return T.Bind(self.page(slot, position) & NOT_NEGATIVE), T.Bind(position & (PAGE - 1))

    def store_key(self, kv, slot, position, pairs):
        """Stores the key of one head at `position`. pairs: of (valid, ((element, value), ..)), the elements that this
        lane has; valid: a condition, or None."""
        page, place = self._place(slot, position)
        for valid, values in pairs:
            stores = [
                ((page, kv, place // KEYS, e // UNIT, place % KEYS, e % UNIT), T.cast(y, DTYPE)) for e, y in values
            ]
            store_valid(valid, self.Kc, stores)

    def store_value(self, arch, kv, slot, position, V, row, lane, scale=None):
        """Stores the value of one head at `position`, V[row, kv*d ..] (float32) times `scale` (None: 1), by the lanes
        of a wave."""
        page, place = self._place(slot, position)
        for first in range(0, self.d, arch.wave):
            valid = None if first + arch.wave <= self.d else first + lane < self.d
            e = T.Bind(first + lane if valid is None else T.min(first + lane, T.int32(self.d - 1)))
            x = V[row, kv * self.d + e] if scale is None else V[row, kv * self.d + e] * scale
            store_valid(valid, self.Vc, [((page, kv, place // UNIT, e, place % UNIT), T.cast(x, DTYPE))])


class Pages:
    """The pages of a wave's next blocks of keys, looked up some steps before they are needed, since loads of keys would
    wait for them.

    key0s: first keys of the first blocks; `take` gives the pages of as many.
    """

    def __init__(self, cache, slot, key0s):
        self.cache, self.slot, self.cells = cache, slot, [local(1, "int32") for _ in key0s]
        for cell, key0 in zip(self.cells, key0s, strict=True):
            put(cell, cache.page(slot, key0), 0)

    def take(self, key0=None):
        """The pages of this block and of those behind it. key0: of the block behind these, whose look-up begins; None:
        this does not go on to the next one."""
        found = [T.Bind(cell[0] & NOT_NEGATIVE) for cell in self.cells]
        if key0 is not None:
            for cell, page in zip(self.cells, [*found[1:], self.cache.page(self.slot, key0)], strict=True):
                put(cell, page, 0)
        return found


def store_valid(valid, buffer, stores):
    """Stores (index, value)s where `valid` holds (None: always)."""
    if valid is None:
        for index, value in stores:
            T.buffer_store(buffer, value, list(index))
    else:
        with T.If(valid), T.Then():
            store_valid(None, buffer, stores)


# ---- rows and the keys that they see


def row_position(rows, row):
    """The position of a row of the step in its sequence. The only place that positions come from."""
    return rows[row, 0]


def row_slot(rows, row):
    """The slot of a row of the step, in a register."""
    return T.Bind(rows[row, 1] & (SLOTS - 1))


def clamped_position(rows, row, ctx):
    """`row_position` limited to those of a sequence, in a register: no kernel reads out of bounds, whatever the rows
    say."""
    return T.Bind(T.max(T.min(row_position(rows, row), T.int32(ctx - 1)), T.int32(0)))


def is_at(rows, row, position):
    """Whether the clamped position of a row is its true one: the cache has room for its key."""
    return row_position(rows, row) == position


class Chunk:
    """The rows of an m-row step that are consecutive tokens of one sequence: those behind the single rows, of which
    there are `single` at most. Of these tokens, row row0 + i has token i, `count` are live and fit the cache; it may be
    0 or less."""

    def __init__(self, state, rows, m, attention, single=0):
        self.row0 = T.Bind(T.max(T.min(state[0], T.int32(single)), T.int32(0))) if single else 0
        self.first, self.slot = clamped_position(rows, self.row0, attention.ctx), row_slot(rows, self.row0)
        live = live_rows(state, m, minimum=0)
        self.count = T.Bind(T.min(live - self.row0 if single else live, attention.ctx - self.first))

    def position(self, token):
        return self.first + token

    def row(self, token):
        """Of the step."""
        return token + self.row0 if not isinstance(self.row0, int) else token


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
