"""The KV cache on the CPU: its layout in memory, and which keys a row attends to. Only this module knows both.

The cache consists of pages of 64 consecutive keys of one sequence, which kernels access as blocks (`CacheBlock`):

    Kc float16 [pages, kv_heads, 4, width, 16]   16 keys are interleaved: a vector holds one element of up to 16 keys
    Vc float16 [pages, kv_heads, 64, width]      a vector holds consecutive elements of one value

In latent attention there is only Kc float16 [pages, 1, 64, width], in the layout of Vc. Its leading columns are the
values.

width is d rounded up to whole vectors (`Attention.width`). The padding is never written; that of keys is not read. The
runtime chooses the number of pages: kernels declare some number and do not use it.

A quantized cache (`Attention.quantized`) holds codes instead. 8-bit codes are int8, in the same shapes. 4-bit codes are
unsigned, 0 for the lowest code. A byte has the codes of column c (lower half) and of column c + 16 of a block of
KV_BLOCK columns:

    Kc uint8 [pages, kv_heads, 4, d/2, 16]       Vc uint8 [pages, kv_heads, 64, d/2]

The scale of each block of columns is in (latent attention has only Ks):

    Ks, Vs float16 [pages, kv_heads, d/32, 64]

A loaded element is code * scale, which is exact in float32 (8 and 11 significant bits). So kernels for a quantized
cache differ only in their loads.

`rows` int32 [m, 2] has the position of each row in its sequence, and its slot. `pages` int32 [SLOTS, ctx/64] has the
number of the page for each slot and block of 64 positions. A row attends to the keys up to its own position; with a
window or chunks, only to the last of these (`visible_keys`). Masks depend on positions, because places of a page that
are not written yet hold old keys.
"""

import math
from contextlib import contextmanager
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.cache.kv_types import Codes
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.cpu.attention import cache_codes
from mlc_amd.schedules.cpu.base.arch import Isa
from mlc_amd.schedules.cpu.base.hadamard import hadamard
from mlc_amd.schedules.cpu.base.vector import (
    LANES,
    LINE,
    at,
    dtype,
    f32,
    opaque,
    prefetch,
    registers,
    splat,
    store,
)
from mlc_amd.schedules.operators.attention import KV_BLOCK, PAGE, SLOTS, Attention, check_quantized
from mlc_amd.schedules.tir import Buffer, Expr

BLOCK = PAGE  # keys in a block
_TILE = 16  # number of keys that are interleaved in Kc
_HEAD = 8  # the number of columns of a head must be a multiple of this
_NAMES = {"k": "Kc", "v": "Vc", "ks": "Ks", "vs": "Vs"}  # names of `Attention.cache` to names of kernels' parameters


def cache_types(spec: Attention) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name (see `Attention.cache`) to (shape, dtype) of each tensor of a layer's cache, with pages for one sequence.
    Raises UserError unless ctx is a multiple of 64 and d a multiple of 8, which attention kernels require, and for
    heads that `check_quantized` refuses."""
    kv_heads, pages, width = spec.kv_heads, spec.blocks, spec.width
    if spec.ctx % BLOCK or spec.d % _HEAD:
        raise UserError(
            f"attention on the CPU needs a context in multiples of {BLOCK} and heads in multiples of {_HEAD}, not "
            f"{spec.ctx} and {spec.d}"
        )
    check_quantized(spec)
    scales = ((pages, kv_heads, spec.d // KV_BLOCK, BLOCK), "float16")

    def lines(codes: Codes | None, tile: int = 0):
        columns, kind = cache_codes.stored(width, codes)
        return (pages, kv_heads, *((BLOCK // tile, columns, tile) if tile else (BLOCK, columns))), kind

    keys, values = lines(spec.key_codes, 0 if spec.values else _TILE), lines(spec.value_codes)
    found = {"k": keys, "v": values, "ks": scales, "vs": scales}
    return {name: found[name] for name in spec.cache}


class RowTable:
    """The parameter `rows` of a step of m rows: the position and the slot of each row."""

    def __init__(self, m: int):
        self.buffer = T.arg("rows", T.buffer((m, 2), "int32"))

    def position(self, row: Expr) -> Expr:
        """The position of a row in its sequence, int32."""
        return self.buffer[row, 0]

    def clamped(self, row: Expr, ctx: int) -> Expr:
        """The position of a row, clamped to 0 .. ctx-1."""
        return T.max(T.min(self.position(row), T.int32(ctx - 1)), T.int32(0))

    def slot(self, row: Expr) -> Expr:
        """The slot of a row, clamped to 0 .. SLOTS-1."""
        return T.max(T.min(self.buffer[row, 1], T.int32(SLOTS - 1)), T.int32(0))


def is_position(spec: Attention, position: Expr) -> Expr:
    """A condition: the position is one of 0 .. ctx-1."""
    return tirx.all(position >= 0, position < spec.ctx)


class KeyRange(NamedTuple):
    """The keys from `first` to `last`, both inclusive; None: no bound."""

    first: Expr = None
    last: Expr = None

    def select(self, key: Expr, x: Expr, other: float, lanes: int) -> Expr:
        """The vector `x`, whose lanes belong to the keys key, key+1, .., with `other` in the lanes of keys out of
        range. The result must not be bound: TVM 0.27 cannot bind a vector of booleans."""
        if self.first is not None:
            x = T.Select(at(key, lanes) >= splat(self.first, lanes), x, f32(other, lanes))
        if self.last is not None:
            x = T.Select(at(key, lanes) <= splat(self.last, lanes), x, f32(other, lanes))
        return x


def visible_keys(spec: Attention, position: Expr) -> KeyRange:
    """The KeyRange to which a row at `position` attends. `first` may be negative."""
    if spec.chunk:
        return KeyRange(T.Bind(position - T.truncmod(position, T.int32(spec.chunk))), position)
    return KeyRange(position - (spec.window - 1) if spec.window else None, position)


class Rows(NamedTuple):
    """Consecutive rows of the sequence in a slot. start: position of the first row. spec: the layer. image: the rows
    begin with an image, and all of them attend to its keys up to this position; None: they do not."""

    start: Expr
    slot: Expr
    spec: Attention
    image: Expr = None

    def position(self, row: Expr) -> Expr:
        """The position of row `row`."""
        return self.start + row

    def tile(self, row: Expr) -> "Rows":
        """The Rows from row `row` on."""
        return self._replace(start=opaque(self.position(row)))

    def last(self, row: Expr) -> Expr:
        """The position of the last key that row `row` attends to."""
        return self.position(row) if self.image is None else T.max(self.position(row), self.image)

    def visible(self, row: Expr) -> KeyRange:
        """The KeyRange that row `row` attends to."""
        seen = visible_keys(self.spec, opaque(self.position(row)))
        return seen if self.image is None else seen._replace(last=T.max(seen.last, self.image))

    def first_block(self) -> Expr:
        """The first block with a key that any row attends to: the int 0 for a layer without window or chunks, otherwise
        an expression in a register."""
        first = visible_keys(self.spec, self.start).first
        return 0 if first is None else T.Bind(T.max(first, T.int32(0)) // BLOCK)

    def first_row(self, key0: Expr) -> Expr:
        """The first row that attends to key0 or a later key."""
        first = T.max(key0 - self.start, T.int32(0))
        return first if self.image is None else T.Select(key0 <= self.image, T.int32(0), first)

    def end_row(self, key0: Expr) -> Expr:
        """The first row that attends only to keys after key0+63; later rows do so, too. For layers with a window or
        chunks."""
        if chunk := self.spec.chunk:
            return (T.truncdiv(key0 + (BLOCK - 1), T.int32(chunk)) + 1) * chunk - self.start
        return key0 + (BLOCK - 1 + self.spec.window) - self.start

    def keys_in_block(self, row: Expr, key0: Expr) -> Expr:
        """The number of first keys of the block key0 .. key0+63 that include all keys that rows up to `row` attend
        to."""
        return T.min(self.last(row) - key0 + 1, T.int32(BLOCK))

    def see_block(self, first: Expr, last: Expr, key0: Expr) -> Expr:
        """A condition: the rows first .. last attend to all of the keys key0 .. key0+63."""
        causal = self.last(first) >= key0 + (BLOCK - 1)
        oldest = visible_keys(self.spec, self.position(last)).first
        return causal if oldest is None else tirx.all(causal, oldest <= key0)


class Cache:
    """The cache of a layer in a kernel. `declare_pages` declares the parameter pages; `declare` declares Kc, Vc and
    their scales."""

    def __init__(self, spec: Attention, isa: Isa):
        self.spec, self.width, self.isa = spec, spec.width, isa
        self.codes = spec.key_codes, spec.value_codes

    def declare_pages(self) -> "Cache":
        self.pages = T.arg("pages", T.buffer((SLOTS, self.spec.blocks), "int32"))
        return self

    def declare(self) -> None:
        types = cache_types(self.spec)
        found = {which: T.arg(_NAMES[which], T.buffer(*of)) for which, of in types.items()}
        self.K, self.V = found["k"], found.get("v", found["k"])
        self.scales = [found[which] for which in ("ks", "vs") if which in found]

    def page(self, slot: Expr, block: Expr) -> Expr:
        """The page of a slot's block, in a register. The block is clamped to those of a sequence, because prefetches
        may be after the last one."""
        return opaque(self.pages[slot, T.min(block, T.int32(self.spec.blocks - 1))])

    def place(self, slot: Expr, position: Expr) -> tuple[Expr, Expr]:
        """(page, number of the key in the page) of a position."""
        return self.page(slot, position // BLOCK), T.Bind(position % BLOCK)

    def key_writer(self, head, place):
        """`with key_writer(head, place) as write`: the key at a `place`. write(e, n, y) stores y, a float32 vector of n
        lanes, as its elements e .. e+n-1. The block must write all elements."""
        if self.spec.values:
            return self.value_writer(head, place)
        page, key = place
        tile, lane = T.Bind(key // _TILE), T.Bind(key % _TILE)

        def write(e, n, y):
            y = T.Bind(T.cast(y, dtype(self.K.dtype, n)))
            for i in range(n):
                store(self.K, T.Shuffle([y], [T.int32(i)]), page, head, tile, e + i, lane)

        return self._writer(write, 0, head, place)

    def value_writer(self, head, place):
        """`key_writer` for the value at a `place`."""
        page, key = place

        def write(e, n, x):
            store(self.V, T.cast(x, dtype(self.V.dtype, n)), page, head, key, at(e, n))

        return self._writer(write, 1, head, place)

    @contextmanager
    def _writer(self, write, which, head, place):
        """A context manager for `key_writer` and `value_writer`, which yields a function like `write`. For a quantized
        cache, this function collects the elements of the head; afterwards they are quantized, and `write` gets the
        codes. which: 0 for keys, 1 for values."""
        codes, d = self.codes[which], self.spec.d
        if codes is None:
            yield write
            return
        whole = T.alloc_buffer((d,), "float32", scope="local")
        yield lambda e, n, x: store(whole, x, at(e, n))
        if self.spec.rotation:
            hadamard(whole, d, self.spec.rotation)
        with T.serial(d // KV_BLOCK) as block:
            columns = [block * KV_BLOCK + e for e in range(0, KV_BLOCK, LANES)]
            x = [T.Bind(whole[at(c)]) for c in columns]
            steps, scale = cache_codes.quantized(x, codes)
            page, key = place
            store(self.scales[-1 if which else 0], scale, page, head, block, key)
            if codes.bits == 8:
                for c, v in zip(columns, steps, strict=True):
                    write(c, LANES, v)
            else:
                write(block * LANES, LANES, cache_codes.halves_of_bytes(steps, codes))

    def block(self, kv: Expr, slot: Expr, number: Expr) -> "CacheBlock":
        """The CacheBlock `number` of a slot's KV head. All its keys may be read."""
        return CacheBlock(self, kv, self.page(slot, number), T.Bind(number * BLOCK), None)

    def block_until(self, kv: Expr, slot: Expr, number: Expr, last: Expr) -> "CacheBlock":
        """The CacheBlock `number` of a slot's KV head. Keys after position `last` must not be read; the block's first
        key is not after it."""
        key0 = T.Bind(number * BLOCK)
        live = opaque(T.max(T.min(last - key0 + 1, T.int32(BLOCK)), T.int32(1)))
        return CacheBlock(self, kv, self.page(slot, number), key0, live)


class CacheBlock:
    """64 consecutive keys and values of a KV head, from position key0 on, in one page.

    live: the number of first keys that may be read, 1 .. 64, an expression; None: all. Before any load, call `prepare`.
    If `live` is not None, also call `clamp_to` before loads of keys.
    """

    def __init__(self, cache: Cache, kv: Expr, page: Expr, key0: Expr, live: Expr):
        self.cache, self.kv, self.page, self.key0, self.live, self._tiles = cache, kv, page, key0, live, None
        self._scales, self._turned = [], None

    def prepare(self) -> None:
        """Emits the work that all products of the block share. Latent attention: converts the keys to float32, and
        transposes them. Quantized cache: converts the scales. Keys that must not be read are converted too, but not
        used."""
        blocks = self.cache.spec.d // KV_BLOCK
        self._scales = [registers(blocks, BLOCK) for _ in self.cache.scales]
        for target, source in zip(self._scales, self.cache.scales, strict=True):
            with T.serial(blocks) as block:
                for key in range(0, BLOCK, LANES):
                    scale = self.cache.isa.half(source[self.page, self.kv, block, at(key)], LANES)
                    store(target, scale, block, at(key))
        if self.cache.spec.values:
            self._turn()

    def _turn(self) -> None:
        self._turned = T.alloc_buffer((self.cache.width, BLOCK), "float32", scope="local")
        keys = BLOCK if self.live is None else self.live
        with T.serial(keys) as key, T.serial(self.cache.width // LANES) as i:
            x = T.Bind(self.load_value(key, i * LANES, LANES))
            for lane in range(LANES):
                store(self._turned, T.Shuffle([x], [T.int32(lane)]), i * LANES + lane, key)

    def clamp_to(self, last: Expr) -> None:
        """From now on, `load_keys` loads the vector of keys with `last` instead of vectors after it. In latent
        attention vectors after it may have any values instead."""
        if self._turned is not None:
            return
        self._tiles = registers(BLOCK // _TILE, kind="int32")
        for i in range(BLOCK // _TILE):
            near = T.max(T.min(last - self.key0, T.int32(i * _TILE)), T.int32(0))
            store(self._tiles, near // _TILE, i)

    def load_keys(self, c: Expr, key: Expr, n: int) -> Expr:
        """Element c of n keys, from key `key` of the block on, as float32. n divides 16 and key."""
        if self._turned is not None:
            return T.Bind(self._turned[c, at(key, n)])
        tile = key // _TILE if self._tiles is None else self._tiles[key // _TILE]
        codes, (column, half) = self.cache.codes[0], self._column(c, 0)
        stored = self.cache.K[self.page, self.kv, tile, column, at(key % _TILE, n)]
        if codes is None:
            return self.cache.isa.half(stored, n)
        scales = self._scales[0][c // KV_BLOCK, at(tile * _TILE + key % _TILE, n)]
        return T.Bind(cache_codes.number(stored, codes, half, n) * scales)

    def load_value(self, key: Expr, c: Expr, n: int) -> Expr:
        """Elements c .. c+n-1 of the value of key `key` of the block, as float32."""
        codes, (column, half) = self.cache.codes[1], self._column(c, 1)
        stored = self.cache.V[self.page, self.kv, key, at(column, n)]
        if codes is None:
            return self.cache.isa.half(stored, n)
        return T.Bind(cache_codes.number(stored, codes, half, n) * splat(self._scales[-1][c // KV_BLOCK, key], n))

    def _column(self, c: Expr, which: int) -> tuple[Expr, Expr]:
        """(column of Kc or Vc that holds column c, whether it is in the upper halves of bytes). which: 0 for keys, 1
        for values."""
        codes = self.cache.codes[which]
        if codes is None or codes.bits == 8:
            return c, 0
        return c // KV_BLOCK * LANES + c % LANES, c // LANES % 2

    def prefetch_keys(self, part: Expr, locality: int) -> None:
        """Prefetches part `part` of `width` equal parts of the live keys, in the order of their addresses: one stream
        for the hardware, although loads alternate between four tiles. In latent attention `prefetch_value` prefetches
        keys instead."""
        if self.cache.spec.values:
            return
        width, size = int(self.cache.K.shape[3]), _line(self.cache.K)
        end = (self.live - 1) // _TILE * (_TILE * width) + (_TILE * width - size)
        for line in range(0, BLOCK, size):
            place = T.min(part * BLOCK + line, end)
            prefetch(self.cache.K, self.page, self.kv, 0, 0, place, locality=locality)

    def prefetch_value(self, key: Expr, locality: int) -> None:
        """Prefetches the value of key `key` of the block, or of the last live key if that is before it."""
        for c in range(0, int(self.cache.V.shape[3]), _line(self.cache.V)):
            prefetch(self.cache.V, self.page, self.kv, T.min(key, self.live - 1), c, locality=locality)

    def prefetch_part(self, part: Expr, parts: int, locality: int) -> None:
        """Prefetches part `part` of `parts` equal parts of all keys and values. parts: an int."""
        for buffer in {id(buffer): buffer for buffer in (self.cache.K, self.cache.V)}.values():
            elements, line = math.prod(int(size) for size in buffer.shape[2:]), _line(buffer)
            lines = -(-elements // (line * parts))
            with T.serial(lines) as i:
                place = opaque((part * lines + i) * line)
                prefetch(buffer, self.page, self.kv, *[0] * (len(buffer.shape) - 3), place, locality=locality)


def _line(buffer: Buffer) -> int:
    """Elements in a cache line."""
    return LINE // cache_codes.BYTES[str(buffer.dtype)]
