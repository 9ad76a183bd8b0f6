"""How the splits of latent attention join, in a launch of their own: all rows' results of many splits are too much for
one workgroup to load.

A part is what a workgroup has of its tile, float32: the outputs of its rows [rows, value_d], then (top, total) of each.
Outputs and totals are sums of weights relative to `top`.
"""

import functools
from collections.abc import Callable

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.softmax import LOWEST
from mlc_amd.schedules.gpu.base.device import barrier, exp2, maximum, rcp, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Profile
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, local, put
from mlc_amd.schedules.gpu.latent.attention_latent_tiles import Tile
from mlc_amd.schedules.operators.attention import Attention
from mlc_amd.schedules.tir import Buffer, Expr

Part = Callable[[Expr], Expr]
WAVES, BATCH = 4, 8  # of a workgroup that joins; splits that a wave loads at once


def part_size(tile: Tile, attention: Attention) -> int:
    """float32 of a part."""
    return tile.rows * (attention.value_d + 2)


def chunks_of(attention: Attention, arch: Profile) -> int:
    """Workgroups of a row: a lane has WIDTH columns."""
    return -(-attention.value_d // (arch.wave * WIDTH))


def place_in_tile(row: Expr, first: Expr, rows: int, fragment: int) -> Expr:
    """The place that a row of the step has in the tile that begins with row `first`: the fragments of a tile after
    the last of all `rows` begin earlier (`attention_latent.Wave`)."""
    begin = T.Bind((row - first) // fragment * fragment)
    return T.Bind(begin + row - T.min(first + begin, T.int32(rows - fragment)))


class Join:
    """Joins a row of a tile, in a workgroup of WAVES waves; all its threads must make one. most: splits that there may
    be, of which there are `active`; part(split): where its part begins in Parts; row: in the tile."""

    def __init__(
        self, arch: Profile, layer: Attention, tile: Tile, Parts: Buffer, most: int, active: Expr, part: Part, row: Expr
    ):
        self.arch, self.d, self.tile, self.Parts, self.row = arch, layer.value_d, tile, Parts, row
        self.active, self.part = active, part
        self.weights = T.alloc_buffer((-(-most // arch.wave) * arch.wave,), "float32", scope="shared")
        self.sums = T.alloc_buffer((WAVES, arch.wave * WIDTH), "float32", scope="shared")

    def _weigh(self, lane: Expr, wave: Expr) -> None:
        """The splits' weights, which add up to 1, in shared memory; a lane has a split or several."""
        arch, tops, totals = self.arch, [], []
        firsts = range(0, int(self.weights.shape[0]), arch.wave)
        for first in firsts:
            split, has = T.Bind(T.min(first + lane, self.active - 1)), first + lane < self.active
            place = T.Bind(self.part(split) + self.tile.rows * self.d + self.row * 2)
            tops.append(T.Bind(T.Select(has, self.Parts[place], T.float32(LOWEST))))
            totals.append(T.Bind(T.Select(has, self.Parts[place + 1], T.float32(0))))
        largest = wave_max(arch, T.Bind(functools.reduce(maximum, tops)))
        powers = [T.Bind(exp2(top - largest)) for top in tops]
        total = T.float32(0)
        for power, own in zip(powers, totals, strict=True):
            total = total + power * own
        inverse = T.Bind(rcp(wave_sum(arch, T.Bind(total))))
        with T.If(wave == 0), T.Then():
            for first, power in zip(firsts, powers, strict=True):
                put(self.weights, power * inverse, first + lane)
        barrier()

    def columns(self, chunk: Expr, lane: Expr, wave: Expr) -> tuple[Callable[[], list[Expr]], Expr, Expr]:
        """(function that gives the row's outputs in the first wave, column of the first one, whether the row has it or
        None: each lane's) of a lane's WIDTH columns."""
        count = self.arch.wave * WIDTH
        column = T.Bind(chunk * count + lane * WIDTH)
        inside = None if self.d % count == 0 else column < self.d
        self._weigh(lane, wave)
        y, safe = local(WIDTH), column if inside is None else T.Bind(T.min(column, T.int32(self.d - WIDTH)))
        put(y, T.broadcast(T.float32(0), WIDTH), at(0, WIDTH))
        with T.serial((self.active + (WAVES * BATCH - 1)) // (WAVES * BATCH)) as batch:
            for i in range(BATCH):
                split = T.Bind((batch * BATCH + i) * WAVES + wave)
                there = T.Bind(T.min(split, self.active - 1))
                weight = T.Bind(T.Select(split < self.active, self.weights[there], T.float32(0)))
                found = self.Parts[at(T.Bind(self.part(there) + self.row * self.d + safe), WIDTH)]
                put(y, y[at(0, WIDTH)] + found * T.broadcast(weight, WIDTH), at(0, WIDTH))
        put(self.sums, y[at(0, WIDTH)], wave, at(lane * WIDTH, WIDTH))
        barrier()

        def values() -> list[Expr]:
            for n in range(1, WAVES):
                put(y, y[at(0, WIDTH)] + self.sums[n, at(lane * WIDTH, WIDTH)], at(0, WIDTH))
            return [T.Bind(y[i]) for i in range(WIDTH)]

        return values, column, inside
