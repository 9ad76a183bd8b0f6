"""Latent attention of a chunk of tokens on cooperative matrices, as `attention_latent_wave.py` computes it. Where tiles
are few, or do not divide among the compute units, several workgroups share the keys of some, whose parts a second
launch joins.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script import builder as T

from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.gpu.attention.attention_step import Step
from mlc_amd.schedules.gpu.attention.cache import Chunk, Visible, visible
from mlc_amd.schedules.gpu.base.device import launch, uniform
from mlc_amd.schedules.gpu.base.profiles import Profile
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import Tile, checked_shape, part_size, shape_of, tile_of
from mlc_amd.schedules.gpu.latent.attention_latent_wave import WAVES as JOIN_WAVES
from mlc_amd.schedules.gpu.latent.attention_latent_wave import Wave, attend, chunks_of, join, place_in_tile
from mlc_amd.schedules.operators.attention import Attention, CausalAttention
from mlc_amd.schedules.space import Kernel, planned
from mlc_amd.schedules.tir import Buffer, Expr

SPLITS = 16  # of a tile's keys, at most


def rows_of(step: Step) -> int:
    """Rows of a step, counted by tokens and heads."""
    return int(step.Q.shape[0]) * int(step.Q.shape[1])


class Tiles(NamedTuple):
    """The tiles of a chunk on a GPU: `whole` ones for a workgroup each, as many as keep all compute units busy; the
    `rest`, the first ones of the chunk, has up to `splits` workgroups each, which share the tile's keys, of `least`
    blocks each at least."""

    whole: int
    rest: int
    splits: int
    least: int

    @property
    def workgroups(self) -> int:
        return self.whole + self.rest * self.splits

    def place(self, workgroup: Expr) -> tuple[Expr, Expr, Expr]:
        """(number of the tile, of the split, whether there may be several) of a workgroup; the longest tiles first."""
        if not self.rest:
            return T.Bind(self.whole - 1 - workgroup), T.int32(0), None
        behind = T.Bind(T.max(workgroup - self.whole, T.int32(0)))
        several = workgroup >= self.whole
        tile = T.Select(several, self.rest - 1 - behind // self.splits, self.rest + self.whole - 1 - workgroup)
        return T.Bind(tile), T.Bind(T.Select(several, behind % self.splits, T.int32(0))), several

    def active(self, blocks: Expr) -> Expr:
        """Splits of a tile of the rest that sees so many blocks of keys."""
        return T.Bind(T.max(T.min((blocks + (self.least - 1)) // self.least, T.int32(self.splits)), T.int32(1)))


def tiles_of(tile: Tile, rows: int, arch: Profile) -> Tiles:
    """Of a chunk of that many rows."""
    count, busy = -(-rows // tile.rows), arch.units * tile.fill
    rest = count % busy
    splits = min(busy // max(rest, 1), SPLITS)
    return Tiles(count - rest, rest, splits, tile.least) if splits > 1 and rest else Tiles(count, 0, 1, tile.least)


def emit(step: Step, arch: Profile, plan: Tile | None = None) -> None:
    """The launches for the chunk of a step. UserError for shapes that `tile_of` refuses, or for the layout "rows";
    ValueError for a tile that does not suit them."""
    step.refuse_blocks()
    attention, m = step.layer, step.op.m
    tile, heads = plan or tile_of(attention, arch), attention.heads
    if tile is None or m * heads < arch.fragment[0]:
        raise UserError(f"latent attention of {m} rows and {heads} heads of {attention.d} has no tile for {arch.name}")
    if not shape_of(tile, attention, arch):
        raise ValueError(f"{tile} does not suit {attention} on {arch.name}")
    tiles, size, Parts = tiles_of(tile, m * heads, arch), part_size(tile, attention), None
    if tiles.rest:
        Parts = T.alloc_buffer((tiles.rest * tiles.splits * size,), "float32")
    _emit_tiles(step, arch, tile, tiles, Parts)
    if Parts is not None:
        _emit_join(step, arch, tile, tiles, Parts)


def _blocks(attention: Attention, tile: Tile, chunk: Chunk, first_row: Expr) -> tuple[Expr, Expr]:
    """The numbers of the first block of keys that a tile of the chunk sees, and of the one after the last."""
    heads, begin = T.int32(attention.heads), T.int32(0)
    last = T.min(T.truncdiv(first_row + (tile.rows - 1), heads), chunk.count - 1)
    if attention.span:
        begin = visible(attention, chunk.position(T.truncdiv(first_row, heads))).first_block(tile.keys)
    return begin, visible(attention, chunk.position(last)).end_block(tile.keys)


def _emit_tiles(step: Step, arch: Profile, tile: Tile, tiles: Tiles, Parts: Buffer) -> None:
    attention, heads = step.layer, step.layer.heads
    with launch((tiles.workgroups,), (arch.wave, tile.waves)) as (workgroup, lane, thread_wave):
        number = uniform(arch, thread_wave)
        chunk = step.chunk()
        place, split, several = tiles.place(workgroup)
        first_row, before = T.Bind(place * tile.rows), chunk.row(0) * heads
        begin, end = _blocks(attention, tile, chunk, first_row)
        works, active = first_row < chunk.count * heads, None
        if several is not None:
            active = T.Bind(T.Select(several, tiles.active(end - begin), T.int32(1)))
            works = tirx.all(works, split < active)
            first, count = begin, T.Bind(end - begin)
            begin, end = (T.Bind(first + T.truncdiv((split + i) * count, active)) for i in range(2))

        def seen(row: Expr) -> Visible:
            token = T.truncdiv(T.max(row - before, T.int32(0)), T.int32(heads))
            return visible(attention, T.Bind(chunk.position(token)))

        # loops of 0 or 1 iterations: barriers in an `if` are refused
        with T.serial(T.cast(works, "int32")):
            wave = Wave(arch, step, tile, T.Bind(first_row + before), number, lane, seen)
            wave.start()
            attend(wave, step.cache, chunk.slot, begin, end, T.Bind(number * arch.wave + lane), tile.waves * arch.wave)
            with nullcontext() if active is None else T.serial(T.cast(active == 1, "int32")):
                wave.finish(lambda token: token < chunk.row(chunk.count))
            if active is not None:
                with T.serial(T.cast(active > 1, "int32")):
                    wave.store_parts(Parts, T.Bind((place * tiles.splits + split) * part_size(tile, attention)))


def _emit_join(step: Step, arch: Profile, tile: Tile, tiles: Tiles, Parts: Buffer) -> None:
    """A workgroup has some columns of a row of the tiles that were split."""
    attention, heads = step.layer, step.layer.heads
    chunks, size = chunks_of(attention, arch), part_size(tile, attention)
    with launch((chunks, tile.rows, tiles.rest), (arch.wave, JOIN_WAVES)) as (part, within, place, lane, wave):
        chunk = step.chunk()
        first_row = T.Bind(place * tile.rows)
        begin, end = _blocks(attention, tile, chunk, first_row)
        active, own = tiles.active(end - begin), T.Bind(first_row + within)
        with T.serial(T.cast(tirx.all(own < chunk.count * heads, active > 1), "int32")):
            row, first = (T.Bind(x + chunk.row(0) * heads) for x in (own, first_row))
            there = place_in_tile(row, first, rows_of(step), arch.fragment[0])

            splits = Parts, tiles.splits, active, lambda split: (place * tiles.splits + split) * size
            join(step, arch, tile, splits, there, (part, lane, wave), lambda: step.token_and_head(row))


CHOICES = {
    "waves": (4, 8), "rows": (16, 32, 64), "keys": (16, 32), "buffers": (1, 2), "held": (0, 4, 9, 18),
    "fill": (1, 2), "least": (2, 4, 8),
}  # fmt: skip


@planned(CHOICES, lambda op, arch: tile_of(op.layer, arch))
def space(op: CausalAttention, arch: Profile, tile: Tile) -> Kernel:
    layer, threads = op.layer, tile.waves * arch.wave
    same = replace(tile, held=min(tile.held, checked_shape(tile, layer, arch).steps))
    return Kernel(same, -(-op.m * layer.heads // tile.rows), threads, tile.keys * layer.width * 2 / threads)
