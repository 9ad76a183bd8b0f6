"""How the splits of decode attention join in device memory, within one launch.

Each split stores its rows' outputs, maxima and sums of weights into Parts and then increments the atomic counter
Arrived of its rows. The split that finds all others arrived joins the results and stores the output. Why it reads
what the others stored: `arrival.py`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from tvm.tirx.script import builder as T

from mlc_amd.schedules.gpu.attention.attention_splits import Splits
from mlc_amd.schedules.gpu.attention.attention_step import Step, stride_of
from mlc_amd.schedules.gpu.attention.softmax import LOWEST, Joined, with_sink
from mlc_amd.schedules.gpu.base.arrival import Outbox, arrive, zero_after
from mlc_amd.schedules.gpu.base.device import each, exp2, rcp, wave_max, wave_sum
from mlc_amd.schedules.gpu.base.profiles import Device
from mlc_amd.schedules.gpu.base.quantize import WIDTH
from mlc_amd.schedules.gpu.base.registers import at, local, put
from mlc_amd.schedules.tir import Expr


class Join:
    """What a thread of a workgroup needs to join part `part` of the heads of row `token` of a step."""

    def __init__(self, arch: Device, step: Step, splits: Splits, token: Expr, part: Expr, wave: Expr, lane: Expr):
        self.arch, self.step, self.splits, self.sinks = arch, step, splits, step.sinks
        self.Parts, self.Arrived = step.scratch
        self.token, self.part, self.wave, self.lane = token, part, wave, lane
        self.tid = T.Bind(wave * arch.wave + lane)
        parts = step.layer.kv_heads * splits.parts
        self.place = part if isinstance(token, int) else T.Bind(token * parts + part)  # of all parts of all tokens

    def _quads(self) -> Iterator[tuple[Expr, Expr, Expr]]:
        """Yields (valid, row, column) of the groups of four columns that this thread has; valid is None where all
        threads have one."""
        splits, tid = self.splits, self.tid
        count = splits.group * splits.d // WIDTH
        for i in each(self.arch, -(-count // splits.threads)):
            first = i * splits.threads
            whole = count % splits.threads == 0 or (isinstance(i, int) and first + splits.threads <= count)
            valid = None if whole else first + tid < count
            place = T.Bind((first + tid if valid is None else T.min(first + tid, T.int32(count - 1))) * WIDTH)
            yield valid, T.Bind(place // splits.d), T.Bind(place % splits.d)

    def _head(self, row: Expr) -> Expr:
        return self.part * self.splits.group + row

    def _place(self, split: Expr, element: Callable[[Expr], Expr]) -> Expr:
        """Where a split's element is in Parts."""
        stride = stride_of(self.splits.group, self.splits.d)
        return self.place * (self.splits.maximum * stride) + split * stride + element

    def _emit(self, values: Sequence[Expr], row: Expr, column: Expr, valid: Expr) -> None:
        column = self._head(row) * self.splits.d + column
        self.step.store(self.arch, [T.Bind(y) for y in values], self.token, column, valid)

    def store_alone(self, quad: Callable[[Expr, Expr], Joined]) -> None:
        """Stores the output where one split has all keys. quad(row, column): the workgroup's results, of
        `softmax.join`."""
        for valid, row, column in self._quads():
            top, total, values = quad(row, column)
            inverse = rcp(with_sink(self.sinks, self._head(row), total, top))
            self._emit([y * inverse for y in values], row, column, valid)

    def store_parts(self, quad: Callable[[Expr, Expr], Joined], split: Expr) -> None:
        """Stores the workgroup's results, which are complete in device memory when all its threads are after this."""
        splits = self.splits
        outbox = Outbox(self.arch, self.tid, splits.threads, (WIDTH, 2))
        for valid, row, column in self._quads():
            top, total, out = quad(row, column)
            tail = splits.group * splits.d + row * WIDTH
            # On Vulkan whole 16 bytes of each row, as the outputs are stored.
            row_values = [top, total] if self.arch.api == "rocm" else [top, total, *[T.float32(0)] * (WIDTH - 2)]
            outbox.send(
                valid,
                self.Parts,
                (out, None, (self._place(split, row * splits.d + column),)),
                (row_values, column == 0, (self._place(split, tail),)),
            )
        outbox.publish()

    def arrive_and_join(self, active: Expr) -> None:
        """Counts this split; the last of the `active` ones joins them all and resets the counter."""
        old = arrive(self.arch, self.Arrived, self.place, self.tid)
        with T.serial(T.cast(old == active - 1, "int32")):
            self._join_splits(active, zero_after(self.arch, old))
            with T.If(self.tid == 0), T.Then():
                put(self.Arrived, T.int32(0), self.place)

    def _join_splits(self, active: Expr, later: Expr) -> None:
        """Joins the splits' results and stores the output. later: 0, known when they may be loaded."""
        arch, splits, Parts, lane = self.arch, self.splits, self.Parts, self.lane
        group, d, size = splits.group, splits.d, splits.batch
        weights = T.alloc_buffer((group, math.ceil(splits.count / size) * size), "float32", scope="shared")
        for i in each(arch, -(-group // splits.waves)):
            row = T.Bind(T.min(i * splits.waves + self.wave, T.int32(group - 1)))
            split, tail = T.Bind(T.min(lane, active - 1) + later), group * d + row * WIDTH
            top = T.Bind(T.Select(lane < active, Parts[self._place(split, tail)], T.float32(LOWEST)))
            largest = wave_max(arch, top)
            weight = exp2(top - largest)
            total = wave_sum(arch, T.Bind(weight * Parts[self._place(split, tail + 1)]))
            with T.If(lane < weights.shape[1]), T.Then():
                put(weights, weight * rcp(with_sink(self.sinks, self._head(row), total, largest)), row, lane)
        for valid, row, column in self._quads():
            y = local(WIDTH)
            put(y, T.broadcast(T.float32(0), WIDTH), at(0, WIDTH))
            with T.serial((active + size - 1) // size) as batch:
                for i in range(size):
                    split = T.Bind(batch * size + i)
                    found = Parts[at(self._place(T.min(split, active - 1) + later, row * d + column), WIDTH)]
                    put(y, y[at(0, WIDTH)] + found * T.broadcast(weights[row, split], WIDTH), at(0, WIDTH))
            self._emit([y[i] for i in range(WIDTH)], row, column, valid)
