"""The KV cache of an attention layer on a GPU: its layout, the places of a sequence's keys, and which keys a row
attends to ("sees"). No other module depends on the layout.

    Kc float16 [pages, kv_heads, PAGE/32, width/8, 32, 8]   a unit is 8 elements of a key: 32 lanes with a key each read
                                                            512 consecutive bytes
    Vc float16 [pages, kv_heads, PAGE/8, width, 8]          a unit is a column of 8 consecutive keys' values: lanes
                                                            with a column each read consecutive bytes

A unit is 16 bytes, and is exactly a lane's part of an operand of a matrix instruction. width is d rounded up to a size
that matrix instructions take (`Attention.width`). The padding is never written, and only matrix instructions read it.
Both tensors must be zeroed when they are allocated: attention multiplies padding, and values after the last key, by 0.
Kernels are declared for ctx/PAGE pages, but the tensors may have any number of pages with fewer than 2**31
elements.

Latent attention has only Kc: values are the first columns of the keys.

A quantized cache (`Attention.quantized`) has codes instead of float16 (`cache_codes.py`). With 8 bits, two units are
side by side in 16 bytes. With 4 bits, a unit of a key has 4 bytes, and units of two columns of the values share 8
bytes:

    Kc  int8 [pages, kv_heads, PAGE/32, d/16, 32, 16]    Vc  int8 [pages, kv_heads, PAGE/16, d, 16]
    Kc uint8 [pages, kv_heads, PAGE/32, d/8, 32, 4]      Vc uint8 [pages, kv_heads, PAGE/16, d/2, 16]

It also has scales of a page's keys and values (in latent attention only of keys), one for each block of KV_BLOCK
columns:

    Ks, Vs float16 [pages, kv_heads, d/32, PAGE]

Units are converted to float32 or float16 when they are used (`cache_units.py`).

A row of a step has a position in its sequence, and a slot, which identifies the sequence: parameter `rows` int32[m, 2].
The keys of the positions PAGE*i .. PAGE*i + PAGE-1 of a slot are in page pages[slot, i]; `pages` is int32[SLOTS,
ctx/PAGE]. Entries after the last key must be valid page numbers, too, because masked keys are read. Attention kernels
process aligned blocks of at most PAGE keys (`KeyBlock`), which are in one page. Which keys a row attends to depends on
its position (`visible`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention import cache_codes
from mlc_amd.schedules.gpu.attention.cache_codes import FORMS, Form
from mlc_amd.schedules.gpu.base.hadamard import hadamard
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, filled, put
from mlc_amd.schedules.gpu.base.step import live_rows, when
from mlc_amd.schedules.operators.attention import KV_BLOCK, PAGE, SLOTS, Attending, Attention, check_quantized
from mlc_amd.schedules.tir import Buffer, Expr, declared

Element = Callable[[Expr], Expr]
DTYPE = "float16"
KEYS, UNIT = 32, 8  # keys of a tile of Kc; elements of a unit
NOT_NEGATIVE = 0x7FFFFFFF  # a mask that tells compiler/codegen/spirv/memory.py that an index is not negative


# ---- layout


def cache_types(attention: Attention) -> dict:
    """{name: (shape, dtype)} of the cache of an `Attention` layer (names: `Attention.cache`), for one sequence of ctx
    positions. Raises UserError unless ctx is a multiple of PAGE and d of UNIT, and for heads that `check_quantized`
    refuses."""
    kv_heads, ctx, width = attention.kv_heads, attention.ctx, attention.width
    if ctx % PAGE or attention.d % UNIT:
        raise UserError(
            f"attention on the GPU needs a context in multiples of {PAGE} and heads in multiples of {UNIT}, not "
            f"{ctx} and {attention.d}"
        )
    check_quantized(attention)
    first, (k, v) = (ctx // PAGE, kv_heads), forms(attention)
    keys = (*first, PAGE // KEYS, width // k.side, KEYS, k.size), k.dtype
    values = (*first, PAGE // v.side, width // v.shared, v.size), v.dtype
    scales = (*first, attention.d // KV_BLOCK, PAGE), DTYPE
    found = {"k": keys, "v": values, "ks": scales, "vs": scales}
    return {name: found[name] for name in attention.cache}


def forms(attention: Attention) -> tuple[Form, Form]:
    """The storage forms of keys and of values."""
    bits = (codes.bits if codes else 16 for codes in (attention.key_codes, attention.value_codes))
    k, v = (FORMS[n][i] for i, n in enumerate(bits))
    return k, v


def place_args(m: int, attention: Attention | None) -> list[Buffer]:
    """Declares the parameters `rows` and `pages`. attention: None for a layer without cache; then pages is None."""
    return declared("int32", rows=(m, 2), pages=(SLOTS, attention.blocks) if attention else None)


class KeyBlock(NamedTuple):
    """A block of keys of KV head `kv`, from position key0 on: at most PAGE keys, aligned to their number. They are in
    one page, from place place0 on."""

    cache: "Cache"
    kv: Expr
    key0: Expr
    page: Expr
    place0: Expr

    def key(self, place: Expr, c: Expr) -> Expr:
        """Unit c (elements 8*c .. 8*c+7) of the key in a place of the page: float16, or codes of a quantized cache."""
        tile, inner = self._split(place, KEYS)
        form = self.cache.forms[0]
        if form.side == UNIT:
            return self.cache.Kc[self.page, self.kv, tile, c, inner, at(0, form.size)]
        pair, half = self._split(c, form.side // UNIT)
        return self.cache.Kc[self.page, self.kv, tile, pair, inner, at(half * UNIT, UNIT)]

    def key_scale(self, place: Expr, c: Expr) -> Expr:
        """The scale, float16, of the codes that `key` returns."""
        block, _ = self._split(c, KV_BLOCK // UNIT)
        return self.cache.scales[0][self.page, self.kv, block, place]

    def value(self, i: Expr, column: Expr) -> Expr:
        """Unit i (places place0 + 8*i .. +7) of a column of the values: float16, or codes of a quantized cache."""
        first, _ = self._split(self.place0, UNIT)
        form = self.cache.forms[1]
        if form.side == UNIT:
            return self.cache.Vc[self.page, self.kv, first + i, column, at(0, UNIT)]
        pair, half = self._split(first + i, form.side // UNIT)
        column, _ = self._split(column, form.shared) if form.shared > 1 else (column, 0)
        return self.cache.Vc[self.page, self.kv, pair, column, at(half * UNIT, UNIT)]

    def value_shift(self, column: Expr) -> Expr:
        """The first bit of a column in a byte of `value`, if a byte has two columns."""
        return T.cast(self._split(column, 2)[1] * 4, "uint32")

    def value_scales(self, i: Expr, column: Expr) -> Expr:
        """The scales, float16, of the codes that `value` returns, one for each code."""
        first, _ = self._split(self.place0, UNIT)
        block, _ = self._split(column, KV_BLOCK)
        return self.cache.scales[1][self.page, self.kv, block, at((first + i) * UNIT, UNIT)]

    def _split(self, place: Expr, size: int) -> tuple[Expr, Expr]:
        """place // size and place % size, for a power of two."""
        if self.cache.shifts and not isinstance(place, int):
            return T.shift_right(place, T.int32(size.bit_length() - 1)), place & (size - 1)
        return place // size, place % size


class Cache:
    """The cache of an `Attention` layer. Declares the parameters Kc, Vc (None if values are part of the keys) and, if
    it is quantized, `scales`. pages: from `place_args`."""

    def __init__(self, attention: Attention, pages: Buffer):
        self.layer, self.d, self.pages, self.shifts = attention, attention.d, pages, False
        self.forms = forms(attention)
        types = cache_types(attention)
        self.Kc = T.arg("Kc", T.buffer(*types["k"]))
        self.Vc: Buffer = T.arg("Vc", T.buffer(*types["v"])) if "v" in types else None
        scales = (("Ks", "ks"), ("Vs", "vs"))
        self.scales = [T.arg(name, T.buffer(*types[which])) for name, which in scales if which in types]

    def by_shifts(self) -> "Cache":
        """The same cache, but with indices computed by shifts instead of divisions. TVM simplifies divisions and leaves
        shifts unchanged; a kernel uses the variant with less code."""
        found = copy(self)
        found.shifts = True
        return found

    def page(self, slot: Expr, position: Expr) -> Expr:
        """The page of a position of a slot, from the page table."""
        return self.pages[slot, T.shift_right(position, T.int32(PAGE.bit_length() - 1))]

    def block(self, kv: Expr, key0: Expr, page: Expr, size: int) -> KeyBlock:
        """The block of `size` keys from position key0 on. page: from `Pages`."""
        return KeyBlock(self, kv, key0, page, 0 if size == PAGE else T.Bind(key0 & (PAGE - 1)))

    def _place(self, slot: Expr, position: Expr) -> tuple[Expr, Expr]:
        return T.Bind(self.page(slot, position) & NOT_NEGATIVE), T.Bind(position & (PAGE - 1))

    def store_key(
        self, kv: Expr, slot: Expr, position: Expr, pairs: Iterable[tuple[Expr, Sequence[tuple[Expr, Expr]]]]
    ) -> None:
        """Stores the key of one head at `position`. pairs: (valid, ((element, value), ..)), the elements that this lane
        has; valid: a condition, or None for always."""
        page, place = self._place(slot, position)
        for valid, values in pairs:
            stores = [
                ((page, kv, place // KEYS, e // UNIT, place % KEYS, e % UNIT), T.cast(y, DTYPE)) for e, y in values
            ]
            store_valid(valid, self.Kc, stores)

    def store_codes(
        self, arch: Device, kv: Expr, slot: Expr, position: Expr, element: Element, lane: Expr, which: int = 0
    ) -> None:
        """`store_key` for a quantized cache; `store_value` if which is 1. All lanes of a wave must call it. element(e):
        element e of the head, float32, for any lane."""
        page, place = self._place(slot, position)
        form, codes = self.forms[which], (self.layer.key_codes, self.layer.value_codes)[which]
        assert codes, "a quantized cache"
        for valid, e, values in own_quads(arch, self.layer, element, lane):
            steps, scale = cache_codes.quantized(arch, codes, values)
            stored = cache_codes.stored(form, steps)
            if which == 0:
                begin, step = (e % form.side // WIDTH, 2) if form.packed else (e % form.side, 1)
                unit = page, kv, place // KEYS, e // form.side, place % KEYS
                indices = [(*unit, begin + i * step) for i in range(len(stored))]
            else:
                column, key = e // form.shared, place % form.side
                indices = [(page, kv, place // form.side, column + i, key) for i in range(len(stored))]
            store_valid(valid, self.Vc if which else self.Kc, zip(indices, stored, strict=True))
            begins = e % KV_BLOCK == 0
            where = begins if valid is None else valid & begins
            store_valid(where, self.scales[which], [((page, kv, e // KV_BLOCK, place), scale)])

    def store_value(self, arch: Device, kv: Expr, slot: Expr, position: Expr, element: Element, lane: Expr) -> None:
        """Stores the value of one head at `position`. All lanes of a wave must call it. element(e): element e, float32,
        for any lane."""
        if self.scales:
            self.store_codes(arch, kv, slot, position, element, lane, which=1)
            return
        page, place = self._place(slot, position)
        for valid, e in own_elements(arch, lane, 0, self.d):
            stores = [((page, kv, place // UNIT, e, place % UNIT), T.cast(element(e), DTYPE))]
            store_valid(valid, self.Vc, stores)


class Pages:
    """The pages of a wave's next blocks of keys. They are loaded from the page table some steps before they are needed,
    because loads of keys would wait for them. key0s: first keys of the first blocks; `take` returns as many pages."""

    def __init__(self, cache: Cache, slot: Expr, key0s: Sequence[Expr]):
        self.cache, self.slot, self.cells = cache, slot, [filled(cache.page(slot, key0)) for key0 in key0s]

    def take(self, key0: Expr = None) -> list[Expr]:
        """The pages of the current block and of the blocks after it. key0: first key of the block after all of these:
        starts the load of its page, and makes the next block the current one. None: the current block stays."""
        found = [T.Bind(cell[0] & NOT_NEGATIVE) for cell in self.cells]
        if key0 is not None:
            for cell, page in zip(self.cells, [*found[1:], self.cache.page(self.slot, key0)], strict=True):
                put(cell, page, 0)
        return found


def each_block(
    cache: Cache, kv: Expr, slot: Expr, begin: Expr, end: Expr, distance: int, size: int
) -> Iterator[tuple[Expr, KeyBlock]]:
    """A loop over blocks of `size` keys: those with the numbers begin, begin + distance, .. below `end`. Yields (number
    of the step, block)."""

    def first_key(block: Expr) -> Expr:
        """The first key of the block with that number; that of the last block if the number is beyond it."""
        return T.Bind(T.min(block, end - 1) * size)

    pages = Pages(cache, slot, [first_key(begin)])
    with T.serial(T.max((end - begin + (distance - 1)) // distance, T.int32(0))) as i:
        block = T.Bind(begin + i * distance)
        (page,) = pages.take(first_key(block + distance))
        yield i, cache.block(kv, T.Bind(block * size), page, size)


def own_elements(arch: Device, lane: Expr, first: int, end: int) -> Iterator[tuple[Expr | None, Expr]]:
    """Distributes the elements first .. end-1 over the lanes of a wave. Yields (valid, element): valid is whether this
    lane has an element in this step, None if all lanes do. Lanes without one get the last element."""
    for e in range(first, end, arch.wave):
        valid = None if e + arch.wave <= end else e + lane < end
        yield valid, T.Bind(e + lane if valid is None else T.min(e + lane, T.int32(end - 1)))


def own_quads(
    arch: Device, layer: Attention, element: Element, lane: Expr
) -> list[tuple[Expr | None, Expr, list[Expr]]]:
    """The elements of a head that this lane has, four consecutive ones at a time, after the multiplication by Hadamard
    matrices of `Attention.rotation`: [(valid as of `own_elements`, first element, values)]. element(e): element e
    before the multiplication, float32, for any lane. All lanes of the wave must call this."""
    count, found = layer.d // WIDTH, []
    for valid, quad in own_elements(arch, lane, 0, count):
        e = T.Bind(quad * WIDTH)
        found.append((valid, e, [T.Bind(element(e + i)) for i in range(WIDTH)]))
    if not layer.rotation:
        return found
    turned = hadamard(arch, lane, [values for _, _, values in found], layer.rotation)
    return [(valid, e, values) for (valid, e, _), values in zip(found, turned, strict=True)]


def store_valid(valid: Expr, buffer: Buffer, stores: Iterable[tuple[Sequence[Expr], Expr]]) -> None:
    """Stores values to buffer[index] if `valid` holds (None: always). stores: (index, value)."""
    with when(valid):
        for index, value in stores:
            T.buffer_store(buffer, value, list(index))


# ---- rows and the keys that they see


def row_position(rows: Buffer, row: Expr) -> Expr:
    """The position of a row of the step in its sequence. All kernels get positions from this function."""
    return rows[row, 0]


def row_slot(rows: Buffer, row: Expr) -> Expr:
    """The slot of a row of the step, in a register."""
    return T.Bind(rows[row, 1] & (SLOTS - 1))


def clamped_position(rows: Buffer, row: Expr, ctx: int) -> Expr:
    """`row_position` limited to 0 .. ctx-1, in a register, so that no kernel accesses memory out of bounds for invalid
    rows."""
    return T.Bind(T.max(T.min(row_position(rows, row), T.int32(ctx - 1)), T.int32(0)))


def is_at(rows: Buffer, row: Expr, position: Expr) -> Expr:
    """Whether `position`, from `clamped_position`, is the row's own position; otherwise the cache has no room for its
    key."""
    return row_position(rows, row) == position


class Chunk:
    """The chunk of a step: the rows after the single rows, consecutive tokens of one sequence. Row row0 + i has token
    i. count: number of tokens that are live and fit into the cache; it may be 0 or negative. image: the position after
    the image with which the chunk begins; None for layers that do not need it."""

    def __init__(self, op: Attending, state: Buffer, rows: Buffer):
        single, ctx = op.single, op.layer.ctx
        self.row0 = T.Bind(T.max(T.min(state[0], T.int32(single)), T.int32(0))) if single else 0
        self.first, self.slot = clamped_position(rows, self.row0, ctx), row_slot(rows, self.row0)
        live = live_rows(state, op.m, minimum=0)
        self.count = T.Bind(T.min(live - self.row0 if single else live, ctx - self.first))
        self.layer, self.image = op.layer, None
        if op.layer.images:
            self.image = T.Bind(self.first + T.min(state[2], self.count))

    def visible(self, token: Expr) -> "Visible":
        """The keys that a token attends to."""
        seen = visible(self.layer, self.position(token))
        return seen if self.image is None else seen._replace(end=T.Bind(T.max(seen.end, self.image)))

    def position(self, token: Expr) -> Expr:
        return self.first + token

    def row(self, token: Expr) -> Expr:
        """The row of the step with a token of the chunk."""
        return token + self.row0 if not isinstance(self.row0, int) else token


class Visible(NamedTuple):
    """A range of keys that a row attends to: first .. end-1. first: None for key 0."""

    first: Expr
    end: Expr

    def sees(self, key: Expr) -> Expr:
        """Whether `key` is one of them."""
        return key < self.end if self.first is None else (key >= self.first) & (key < self.end)

    def covers(self, first: Expr, count: int) -> Expr:
        """Whether `count` keys from `first` on are all among them."""
        if self.first is None:
            return self.sees(first + (count - 1))
        return (self.first <= first) & (first + count <= self.end)

    def first_block(self, size: int) -> Expr:
        """The number of the first block of `size` keys with one of these keys: the int 0, or a register."""
        return 0 if self.first is None else T.Bind(self.first // size)

    def end_block(self, size: int) -> Expr:
        """The number of the first block of `size` keys after these keys, in a register."""
        return T.Bind((self.end + size - 1) // size)


def visible(attention: Attention, position: Expr, own: bool = True) -> Visible:
    """The keys that a row at `position` attends to. own: whether its own key is one of them."""
    first = None
    if attention.window:
        first = T.Bind(T.max(position - (attention.window - 1), T.int32(0)))
    elif attention.chunk:
        first = T.Bind(position - T.truncmod(position, T.int32(attention.chunk)))
    return Visible(first, T.Bind(position + 1) if own else position)
