"""The KV cache on the CPU: its layout in memory, and the keys that a row attends to.

No other module knows either. The cache is made of pages of 64 consecutive keys of one sequence, which kernels address
as blocks (`CacheBlock`):

    Kc float16 [pages, kv_heads, 4, width, 16]   16 keys interleaved: a vector holds one element of each of up to 16
    Vc float16 [pages, kv_heads, 64, width]      a vector holds consecutive elements of one value

width is d rounded up to whole vectors (`Attention.width`). The padding is never written; keys' is not read either. The
number of pages is the runtime's choice: kernels declare some number and never use it.

A row of a step has a position in its sequence and a slot: `rows` int32 [m, 2]. `pages` int32 [SLOTS, ctx/64] says which
page has the keys of a slot's block of 64 positions. A row attends to the keys up to its own, with a window or chunks to
the last ones of these (`visible_keys`). Masks go by position: a page has older keys in places that are not written yet.
"""

from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.attention import PAGE, SLOTS
from mlc_amd.schedules.cpu.vector import LINE, at, dtype, f32, opaque, prefetch, registers, splat, store

BLOCK = PAGE  # keys of a block
_TILE = 16  # keys that are interleaved in Kc
_HEAD = 8  # columns: head sizes are multiples
_LINE = LINE // 2  # elements in a cache line
_DTYPE = "float16"


def cache_types(spec):
    """{"k": (shape, dtype), "v": (shape, dtype)} of the caches of an `Attention` layer, with pages for one sequence.
    UserError unless 64 divides its positions and 8 divides d, which the attention kernels require."""
    kv_heads, pages, width = spec.kv_heads, spec.blocks, spec.width
    if spec.ctx % BLOCK or spec.d % _HEAD:
        raise UserError(
            f"attention on the CPU needs a context in multiples of {BLOCK} and heads in multiples of {_HEAD}, not "
            f"{spec.ctx} and {spec.d}"
        )
    k, v = (pages, kv_heads, BLOCK // _TILE, width, _TILE), (pages, kv_heads, BLOCK, width)
    return {"k": (k, _DTYPE), "v": (v, _DTYPE)}


class RowTable:
    """The parameter `rows` of a step of m rows: where each is in its sequence, and which sequence that is."""

    def __init__(self, m):
        self.buffer = T.arg("rows", T.buffer((m, 2), "int32"))

    def position(self, row):
        """The position of a row in its sequence, int32."""
        return self.buffer[row, 0]

    def slot(self, row):
        """The row's sequence, clamped to those that page tables have."""
        return T.max(T.min(self.buffer[row, 1], T.int32(SLOTS - 1)), T.int32(0))


def is_position(spec, position):
    """A condition: rows of an `Attention` layer may have that position."""
    return tirx.all(position >= 0, position < spec.ctx)


class KeyRange(NamedTuple):
    """The keys from `first` to `last`, both included; None: no bound."""

    first: object = None
    last: object = None

    def select(self, key, x, other, lanes):
        """The vector `x`, which belongs to the keys key, key+1, .., and the number `other` for keys out of range. To be
        used unbound: TVM 0.27 cannot bind a vector of booleans, so the comparison must stay in its expression."""
        if self.first is not None:
            x = T.Select(at(key, lanes) >= splat(self.first, lanes), x, f32(other, lanes))
        if self.last is not None:
            x = T.Select(at(key, lanes) <= splat(self.last, lanes), x, f32(other, lanes))
        return x


def visible_keys(spec, position):
    """The KeyRange that a row of an `Attention` layer at `position` attends to. `first` may be negative."""
    if spec.chunk:
        return KeyRange(T.Bind(position - T.truncmod(position, T.int32(spec.chunk))), position)
    return KeyRange(position - (spec.window - 1) if spec.window else None, position)


class Rows(NamedTuple):
    """Consecutive rows of the sequence in a slot and of the `Attention` layer `spec`, the first of which stands at
    `start`."""

    start: object
    slot: object
    spec: object

    def position(self, row):
        """The position of row `row`."""
        return self.start + row

    def tile(self, row):
        """The Rows from row `row` on."""
        return Rows(opaque(self.position(row)), self.slot, self.spec)

    def first_block(self):
        """The first block with a key that any row sees: the int 0 if rows see all keys, else bound to a register."""
        first = visible_keys(self.spec, self.start).first
        return 0 if first is None else T.Bind(T.max(first, T.int32(0)) // BLOCK)

    def first_row(self, key0):
        """The first row that sees key0 or a later key."""
        return T.max(key0 - self.start, T.int32(0))

    def end_row(self, key0):
        """The first row that sees keys after key0 .. key0+63 only, as do the rows after it. For rows that do not see
        all keys."""
        if chunk := self.spec.chunk:
            return (T.truncdiv(key0 + (BLOCK - 1), T.int32(chunk)) + 1) * chunk - self.start
        return key0 + (BLOCK - 1 + self.spec.window) - self.start

    def keys_in_block(self, row, key0):
        """How many leading keys of the block key0 .. key0+63 contain all that row `row` and the rows before it see."""
        return T.min(self.position(row) - key0 + 1, T.int32(BLOCK))

    def see_block(self, first, last, key0):
        """A condition: the rows first .. last see all of the keys key0 .. key0+63."""
        causal = self.position(first) >= key0 + (BLOCK - 1)
        oldest = visible_keys(self.spec, self.position(last)).first
        return causal if oldest is None else tirx.all(causal, oldest <= key0)


class Cache:
    """The cache of an `Attention` layer in a kernel. `declare_pages` declares the parameter pages; Kc and Vc follow
    where `declare` is called."""

    def __init__(self, spec, isa):
        self.spec, self.width, self.isa = spec, spec.width, isa

    def declare_pages(self):
        self.pages = T.arg("pages", T.buffer((SLOTS, self.spec.blocks), "int32"))
        return self

    def declare(self):
        types = cache_types(self.spec)
        self.K, self.V = (T.arg(name, T.buffer(*types[which])) for name, which in (("Kc", "k"), ("Vc", "v")))
        return self

    def page(self, slot, block):
        """The page of a slot's block, in a register. Blocks behind the last one are clamped: they may be prefetched."""
        return opaque(self.pages[slot, T.min(block, T.int32(self.spec.blocks - 1))])

    def place(self, slot, position):
        """(page, key in the page) of a position."""
        return self.page(slot, position // BLOCK), T.Bind(position % BLOCK)

    def key_writer(self, head, place):
        """write(e, n, y) stores elements e .. e+n-1 of the key in a `place`, a float32 vector of n lanes."""
        page, key = place
        tile, lane = T.Bind(key // _TILE), T.Bind(key % _TILE)

        def write(e, n, y):
            y = T.Bind(T.cast(y, dtype(_DTYPE, n)))
            for i in range(n):
                store(self.K, T.Shuffle([y], [T.int32(i)]), page, head, tile, e + i, lane)

        return write

    def write_value(self, head, place, e, n, x):
        """Stores elements e .. e+n-1 of the value in a `place`, a float32 vector."""
        page, key = place
        store(self.V, T.cast(x, dtype(_DTYPE, n)), page, head, key, at(e, n))

    def block(self, kv, slot, number):
        """The CacheBlock number `number` of a slot's KV head, all keys of which may be read."""
        return CacheBlock(self, kv, self.page(slot, number), T.Bind(number * BLOCK), None)

    def block_until(self, kv, slot, number, last):
        """The CacheBlock `number` of a slot's KV head, of which keys after `last` are not to be read; its first one
        is."""
        key0 = T.Bind(number * BLOCK)
        live = opaque(T.max(T.min(last - key0 + 1, T.int32(BLOCK)), T.int32(1)))
        return CacheBlock(self, kv, self.page(slot, number), key0, live)


class CacheBlock:
    """64 consecutive keys and values of a KV head, from position key0 on, in one page.

    live: how many of them, 1 .. 64, may be read, an expression; None: all. Loads of keys then need `clamp_to` first.
    """

    def __init__(self, cache, kv, page, key0, live):
        self.cache, self.kv, self.page, self.key0, self.live, self._tiles = cache, kv, page, key0, live, None

    def clamp_to(self, last):
        """Makes `load_keys` give the keys around `last` wherever keys after it are asked for."""
        self._tiles = registers(BLOCK // _TILE, kind="int32")
        for i in range(BLOCK // _TILE):
            near = T.max(T.min(last - self.key0, T.int32(i * _TILE)), T.int32(0))
            store(self._tiles, near // _TILE, i)

    def load_keys(self, c, key, n):
        """Element c of n keys from the block's key `key` on, as float32; n divides 16 and key."""
        tile = key // _TILE if self._tiles is None else self._tiles[key // _TILE]
        return self.cache.isa.half(self.cache.K[self.page, self.kv, tile, c, at(key % _TILE, n)], n)

    def load_value(self, key, c, n):
        """Elements c .. c+n-1 of the value of the block's key `key`, as float32."""
        return self.cache.isa.half(self.cache.V[self.page, self.kv, key, at(c, n)], n)

    def prefetch_keys(self, part, locality):
        """Prefetches part `part` of `width` equal parts of the live keys, in the order of their addresses: the hardware
        sees one stream, while the loads alternate between four tiles."""
        width = self.cache.width
        end = (self.live - 1) // _TILE * (_TILE * width) + (_TILE * width - _LINE)
        for line in range(0, BLOCK, _LINE):
            place = T.min(part * BLOCK + line, end)
            prefetch(self.cache.K, self.page, self.kv, 0, 0, place, locality=locality)

    def prefetch_value(self, key, locality):
        """Prefetches the value of the block's key `key`, or of its last live one if that comes before."""
        for c in range(0, self.cache.width, _LINE):
            prefetch(self.cache.V, self.page, self.kv, T.min(key, self.live - 1), c, locality=locality)

    def prefetch_part(self, part, parts, locality):
        """Prefetches part `part` of `parts` equal parts (an int) of all keys and values."""
        lines = -(-BLOCK * self.cache.width // (_LINE * parts))
        with T.serial(lines) as i:
            place = opaque((part * lines + i) * _LINE)
            prefetch(self.cache.K, self.page, self.kv, 0, 0, place, locality=locality)
            prefetch(self.cache.V, self.page, self.kv, 0, place, locality=locality)
