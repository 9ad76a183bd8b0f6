"""Latent attention of a chunk of tokens on cooperative matrices: the launches. attention_latent_wave.py has the code of
a wave.

A workgroup computes a tile of rows. If the number of tiles is not a multiple of what the compute units can run at the
same time, the keys of the remaining tiles are split among several workgroups; a second launch joins their results.
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

SPLITS = 16  # largest number of splits of a tile's keys


def rows_of(step: Step) -> int:
    """The number of rows of a step; a row is a head of a token."""
    return int(step.Q.shape[0]) * int(step.Q.shape[1])


class Tiles(NamedTuple):
    """The tiles of a chunk. whole: number of tiles that have one workgroup each; if there are other tiles, this is
    a multiple of what the compute units run at the same time. rest: number of the other tiles, the first of the chunk.
    Each of them has up to `splits` workgroups, among which its keys are divided, with at least `least` blocks of keys
    for each."""

    whole: int
    rest: int
    splits: int
    least: int

    @property
    def workgroups(self) -> int:
        return self.whole + self.rest * self.splits

    def place(self, workgroup: Expr) -> tuple[Expr, Expr, Expr]:
        """(number of the tile, number of the split, a condition: the tile may be split; None: no tile is) of a
        workgroup. The tiles with the most keys come first."""
        if not self.rest:
            return T.Bind(self.whole - 1 - workgroup), T.int32(0), None
        behind = T.Bind(T.max(workgroup - self.whole, T.int32(0)))
        several = workgroup >= self.whole
        tile = T.Select(several, self.rest - 1 - behind // self.splits, self.rest + self.whole - 1 - workgroup)
        return T.Bind(tile), T.Bind(T.Select(several, behind % self.splits, T.int32(0))), several

    def active(self, blocks: Expr) -> Expr:
        """The number of splits of a tile of the rest. blocks: number of blocks of keys that it attends to."""
        return T.Bind(T.max(T.min((blocks + (self.least - 1)) // self.least, T.int32(self.splits)), T.int32(1)))


def tiles_of(tile: Tile, rows: int, arch: Profile) -> Tiles:
    """The Tiles of a chunk of so many rows (heads of tokens)."""
    count, busy = -(-rows // tile.rows), arch.units * tile.fill
    rest = count % busy
    splits = min(busy // max(rest, 1), SPLITS)
    return Tiles(count - rest, rest, splits, tile.least) if splits > 1 and rest else Tiles(count, 0, 1, tile.least)


def emit(step: Step, arch: Profile, plan: Tile | None = None) -> None:
    """Emits the launches for the chunk of a step. plan: None for the tile of `tile_of`. Raises UserError for shapes for
    which there is no tile, and for the layout "rows"; ValueError for a plan that does not fit."""
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
    """(first, end): the rows of a tile attend to keys in the blocks first .. end-1. first_row: the tile's first row
    within the chunk."""
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

        # loops of 0 or 1 iterations instead of `if`, in which barriers are not allowed
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
    """Emits the second launch. A workgroup joins some columns of a row of a tile that was split."""
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
