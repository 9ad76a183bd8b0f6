"""Loads weights of all int8 formats from their planes to registers, a block of 32 columns of isa.lanes rows at a time.

In: a Format, its planes as buffers (layout "tile16", planes.py), an instruction set. Out: a `Block`:

    weights    eight registers in the form that `isa.dot` takes, four columns each
    scales     a float32 vector for each group of columns (one group of 32, or two of 16)
    offsets    for each group a float32 vector, the factor of d*sum(q); empty for formats without a minimum

The product of a block with a token's activations (d and q of quantize.py) is the sum over its groups g of

    d * (dot_g - zero * sum(q_g)) * scales[g]  +  d * sum(q_g) * offsets[g]

where dot_g is the int32 dot product of weights and q, and zero = zero_point(fmt, isa).

A prefill kernel needs its weights once for each tile of tokens. `Unpacked` stores the Blocks of a task in a buffer of
the thread, so that codes and scales are unpacked only once. The Blocks are equal, bit for bit.
"""

from typing import NamedTuple

from tvm.tirx.script import builder as T

from mlc_amd.schedules.cpu.base.arch import QUADS, Isa
from mlc_amd.schedules.cpu.base.vector import at, dtype, pin, splat, store, widen
from mlc_amd.schedules.cpu.linear.planes import BLOCK, ROWS
from mlc_amd.schedules.decode import minifloat
from mlc_amd.schedules.formats import PLANE_BITS, Format
from mlc_amd.schedules.tir import Buffer, Expr

Planes = dict[str, Buffer]  # the planes of a weight: name to buffer


class Block(NamedTuple):
    """The registers of a block, see the module's docstring."""

    weights: list[Expr]
    scales: list[Expr]
    offsets: list[Expr]


def zero_point(fmt: Format, isa: Isa) -> int:
    """The factor of sum(q) that is subtracted from a dot product: the code that means 0, or the constant that the
    instruction set adds to signed weights."""
    return isa.signed_zero if fmt.signed or fmt.table else fmt.zero


def groups(fmt: Format) -> int:
    """The number of groups of columns with their own scale in a block of 32: 1 or 2."""
    return BLOCK // fmt.group


def step(fmt: Format, isa: Isa) -> int:
    """The number of registers that one call of `isa.dot` may take without overflow, a divisor of a group's number of
    registers."""
    top = None if fmt.signed or fmt.table else 2 ** sum(PLANE_BITS[p] for p in fmt.codes) - 1
    return min(isa.step(top), QUADS // groups(fmt))


def codes(fmt: Format, bufs: Planes, tile: Expr, row: int, block: Expr, lanes: int) -> list[Expr]:
    """The codes of a block as eight uint8 registers: register j has columns 4*j .. 4*j+3 of the rows from `row` on of
    the tile."""
    parts: list[Expr] = [None] * QUADS
    n, filled = 4 * lanes, 0
    for plane in fmt.codes:
        bits = PLANE_BITS[plane]
        per_byte = 8 // bits
        for line in range(QUADS // per_byte):
            x = T.Bind(bufs[plane][tile, block, at(line * 64 + row * 4, n)])
            for i in range(per_byte):
                # A byte of Q4 has columns from registers j and j + 4; a byte of other planes, from consecutive ones.
                j = line + i * (QUADS // per_byte) if plane == "Q4" else line * per_byte + i
                part = x if bits == 8 else _field(x, i * bits, bits, filled, n)
                parts[j] = part if parts[j] is None else parts[j] | part
        filled += bits
    return [pin(part, n) for part in parts]


def _field(x: Expr, first: int, bits: int, to: int, n: int) -> Expr:
    """`bits` bits of each byte of x, from bit `first` on, moved to bit `to`; the other bits are 0."""
    if first > to:
        x = T.shift_right(x, splat(T.uint8(first - to), n))
    elif first < to:
        x = T.shift_left(x, splat(T.uint8(to - first), n))
    return x & splat(T.uint8((1 << bits) - 1 << to), n)


def scales(fmt: Format, bufs: Planes, tile: Expr, row: int, block: Expr, isa: Isa) -> tuple[list[Expr], list[Expr]]:
    """(scales, offsets) of a block: for each group a float32 vector of the rows from `row` on of the tile."""
    lanes = isa.lanes

    def plane(name: str, index: Expr) -> Expr:
        return bufs[name][tile, index, at(row, lanes)]

    super_block = block // (fmt.block // BLOCK)
    indices = [block * groups(fmt) + g for g in range(groups(fmt))]
    if fmt.minifloat:
        found = [T.Bind(T.cast(plane("S", i), dtype("int32", lanes))) for i in indices]
        return [T.Bind(minifloat(fmt.minifloat, s)) for s in found], []
    d = isa.half(plane("D", super_block), lanes)
    if fmt.unit != 1:
        d = T.Bind(d * fmt.unit)
    if "S" not in fmt.scales:
        return [d], [isa.half(plane("M", block), lanes)] if fmt.minimum else []
    subs = [T.Bind(plane("S", i)) for i in indices]
    if not fmt.minimum:
        return [T.Bind(d * widen(s, lanes)) for s in subs], []
    if fmt.nibble_scales:
        mins = [T.shift_right(s, splat(T.uint8(4), lanes)) for s in subs]
        subs = [s & splat(T.uint8(15), lanes) for s in subs]
    else:
        mins = [plane("Z", i) for i in indices]
    dm = T.Bind(splat(T.float32(0), lanes) - isa.half(plane("DM", super_block), lanes))
    return [T.Bind(d * widen(s, lanes)) for s in subs], [T.Bind(dm * widen(z, lanes)) for z in mins]


def load(fmt: Format, bufs: Planes, tile: Expr, row: int, block: Expr, isa: Isa) -> Block:
    """The Block of rows row .. row + isa.lanes - 1 of a tile of 16, columns 32*block .. 32*block + 31."""
    weights = codes(fmt, bufs, tile, row, block, isa.lanes)
    if fmt.signed or fmt.table:
        weights = [isa.lookup(fmt.table, x) if fmt.table else isa.signed(x) for x in weights]
    return Block(weights, *scales(fmt, bufs, tile, row, block, isa))


def unpacked_bytes(fmt: Format, rows: int, k: int) -> int:
    """Bytes of `rows` rows of k columns in an `Unpacked`."""
    return rows * (k + k // BLOCK * 4 * _factors(fmt))


def _factors(fmt: Format) -> int:
    """The number of scales and offsets of a row in a block of 32 columns."""
    return groups(fmt) * (2 if fmt.minimum else 1)


class Unpacked:
    """The Blocks of `held` tiles of a weight of k columns, from tile `first` on, in a buffer of the thread. The
    constructor emits the code that unpacks them."""

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


class UnpackedTile(NamedTuple):
    """Tile number t of an Unpacked."""

    unpacked: Unpacked
    t: Expr

    @property
    def fmt(self) -> Format:
        return self.unpacked.fmt

    def load(self, row: int, b: Expr) -> Block:
        """The Block number b of the rows from `row` on of the tile."""
        kept, t, fmt, isa = self.unpacked, self.t, self.unpacked.fmt, self.unpacked.isa
        lanes, parts = isa.lanes, groups(fmt)
        weights = [T.Bind(kept.codes[t, b, row // lanes, j, at(0, 4 * lanes)]) for j in range(QUADS)]
        if fmt.signed or fmt.table:
            weights = [isa.kept(w) for w in weights]
        found = [T.Bind(kept.factors[t, b, i, at(row, lanes)]) for i in range(_factors(fmt))]
        return Block(weights, found[:parts], found[parts:])
