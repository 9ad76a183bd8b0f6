"""How the sums of a tile of `gemm_lanes.py` become results: through shared memory, in passes of as many
as there is room for, where those of the subgroups that share out the columns are added up, to the epilogue.

An epilogue is called by each thread with (token, row, values of each weight): four rows, or a run (`pairs.py`). With
`early` it gets what it loads besides behind the values.
"""

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.base.device import barrier
from mlc_amd.schedules.gpu.base.pairs import TOKENS
from mlc_amd.schedules.gpu.base.planes import BLOCK
from mlc_amd.schedules.gpu.base.registers import chosen, lane_of, local, put, vector
from mlc_amd.schedules.gpu.base.step import all_of, when

ROWS = 16  # of a matrix
QUAD = 4  # float32 of a unit of 16 bytes: rows of a token that a lane finishes at once
PAD = 1  # units added to a token's rows in shared memory


class LaneResults:
    """Part of `LaneGemm`, which has the tile, its sums and its shared memory."""

    def _units(self, row_tiles, token_tiles) -> int:
        """Of the sums of so many tiles of each subgroup in shared memory."""
        return self.waves * self.weights * token_tiles * TOKENS * (row_tiles * (ROWS // QUAD) + PAD)

    def _sums_unit(self, wave, weight, token):
        """First unit of a subgroup's sums of a token, of number `token` of those that are there at once."""
        return ((wave * self.weights + weight) * (self.at_once * TOKENS) + token) * self.ld

    def _hand_over(self, first_row, first):
        """The sums of row tiles `first_row`.., of token tiles `first`.., to shared memory."""
        for w in range(self.weights):
            for i in range(self.rows_at_once):
                for t in range(self.at_once):
                    place = self.lds[self._sums_unit(self.wave, w, t * TOKENS) + i * (ROWS // QUAD)]
                    number = (w * self.tiles_n + first_row + i) * self.tiles_m + first + t
                    self.sums.store(number, place, self.ld * QUAD, "col_major")

    def _results(self, padded, token0, row0, epilogue, early):
        """Adds up the sums and hands them to the epilogue."""
        passes = [
            (i, j) for i in range(0, self.tiles_n, self.rows_at_once) for j in range(0, self.tiles_m, self.at_once)
        ]
        if early is not None and self._is_whole(padded) and len(passes) * self._of_a_pass() == self.threads:
            self._finish_one(passes, token0, row0, epilogue, early)
            return
        for number, (i, j) in enumerate(passes):
            if number:
                barrier()
            self._hand_over(i, j)
            barrier()
            self._finish(i, j, padded, token0, row0, epilogue, early)

    def _is_whole(self, padded) -> bool:
        """Whether all rows and tokens of every tile exist."""
        return not (padded % self.tile.rows or self.m % self.tile.tokens)

    def _of_a_pass(self):
        """Units of four rows that are in shared memory at once."""
        return self.tile.waves_m * self.tile.waves_n * self.at_once * TOKENS * self.quads

    def _place(self, c, first_row, first, token0, row0):
        """Of number c of these units ((subgroup, token, number within that), its token, its row)."""
        tile, per_wave = self.tile, self.at_once * TOKENS * self.quads
        wave, own = T.Bind(c // per_wave), T.Bind(c % per_wave)
        wave_m, wave_n = T.Bind(wave % tile.waves_m), T.Bind(wave // tile.waves_m)
        token, quad = T.Bind(own // self.quads), T.Bind(own % self.quads)
        row = T.Bind(row0 + (wave_n * self.tiles_n + first_row) * ROWS + quad * QUAD)
        target = T.Bind(token0 + (wave_m * self.tiles_m + first) * TOKENS + token)
        return (wave, token, quad), target, row

    def _added(self, weight, wave, token, quad):
        """The float32x4 of such a unit of a weight."""
        parts = []
        for k in range(self.tile.waves_k):
            source = wave + k * (self.tile.waves_m * self.tile.waves_n)
            unit = self._sums_unit(source, weight, token) + quad
            parts.append(T.reinterpret("float32x4", T.Bind(self.lds[unit])))
        return T.Bind(sum(parts[1:], parts[0]))

    def _finish_one(self, passes, token0, row0, epilogue, early):
        """Each thread has one result, of one of the passes. What it loads besides need not wait for the sums."""
        per_pass = self._of_a_pass()
        mine = T.Bind(self.thread // per_pass)
        first_row, first = (chosen([T.int32(x) for x in each], mine) for each in zip(*passes, strict=True))
        place, target, row = self._place(T.Bind(self.thread % per_pass), first_row, first, token0, row0)
        loaded = early(target, row)
        cells = [[local(1) for _ in range(QUAD)] for _ in range(self.weights)]
        for number, (i, j) in enumerate(passes):
            if number:
                barrier()
            self._hand_over(i, j)
            barrier()
            with when(None if len(passes) == 1 else mine == number):
                for w, own in enumerate(cells):
                    value = self._added(w, *place)
                    for e, cell in enumerate(own):
                        put(cell, lane_of(value, e), 0)
        epilogue(target, row, [T.Bind(vector([cell[0] for cell in own])) for own in cells], loaded)

    def has_runs(self, padded) -> bool:
        """Whether each thread can have one run: results of two passes, one for each half of a block of rows."""
        passes = self.weights == 1 and (self.rows_at_once, self.at_once) == (1, self.tiles_m)
        return passes and self.tiles_n * ROWS == BLOCK and self._is_whole(padded) and self._of_a_pass() == self.threads

    def _finish_runs(self, token0, row0, epilogue, early):
        """Adds up the sums and hands them to the epilogue, a run in each thread."""
        place, target, row = self._place(self.thread, 0, 0, token0, row0)
        more = [] if early is None else [early(target, row)]
        values = []
        for first_row in range(self.tiles_n):
            if first_row:
                barrier()
            self._hand_over(first_row, 0)
            barrier()
            values.append(self._added(0, *place))
        run = T.Bind(vector([lane_of(value, e) for value in values for e in range(QUAD)]))
        epilogue(target, row, [run], *more)

    def _finish(self, first_row, first, padded, token0, row0, epilogue, early):
        """Hands the sums that are in shared memory to the epilogue; rows beyond the weight's and tokens beyond the m
        are left out."""
        tile, total = self.tile, self._of_a_pass()
        with T.serial(-(-total // self.threads)) as step:
            c = T.Bind(step * self.threads + self.thread)
            place, target, row = self._place(c, first_row, first, token0, row0)
            conditions = [row < padded] if padded % tile.rows else []
            conditions += [c < total] if total % self.threads else []
            conditions += [target < self.m] if self.m % tile.tokens else []
            with when(all_of(conditions)):
                loaded = [] if early is None else [early(target, row)]
                epilogue(target, row, [self._added(w, *place) for w in range(self.weights)], *loaded)
