"""Shared memory that remembers who used its elements, and between which barriers.

In: reads and writes of a wave's lanes. Out: values, or a `Fault` where two lanes race.
"""

import numpy as np

from tests.dev.spirv.program import Type

ATOMIC = -2  # in the place of a lane's number: any number of them, by atomic additions


class Fault(Exception):
    """What a kernel must not do."""


class Shared:
    """A variable in shared memory, and who used its elements when. A lane is a number in its workgroup."""

    def __init__(self, of: Type) -> None:
        element = of.of[0]
        self.count, self.lanes = of.count, element.lanes
        self.values = np.zeros((of.count, *([element.count] if element.kind == "vector" else [])), element.scalar)
        self.written = np.zeros(of.count, bool)
        self.writer, self.reader = (np.full(of.count, -1) for _ in range(2))
        self.write_time, self.read_time = (np.full((2, of.count), -1) for _ in range(2))  # of workgroup, of wave
        self.waves = np.full((2, of.count), -1)  # of the writer, of the reader
        self.many = np.zeros(of.count, bool)  # read by several lanes since

    def _raced(self, at, lanes, wave, kind) -> np.ndarray:
        """Whether the last write (kind 0) or read (1) of elements was by another lane, and no barrier came since."""
        times, who = (self.write_time, self.writer) if kind == 0 else (self.read_time, self.reader)
        same = times[0, at] == wave.group.time
        same &= (self.waves[kind, at] != wave.number) | (times[1, at] == wave.time)
        other = who[at] != lanes
        return same & (other | self.many[at] if kind else other)

    def read(self, at, lanes, wave):
        self._check(at)
        if not self.written[at].all():
            raise Fault("shared memory is read that was never written")
        if self._raced(at, lanes, wave, 0).any():
            raise Fault("shared memory is read that another lane wrote, without a barrier")
        fresh = (self.read_time[0, at] != wave.group.time) | (
            (self.waves[1, at] == wave.number) & (self.read_time[1, at] != wave.time)
        )
        self.many[at] = ~fresh & (self.many[at] | (self.reader[at] != lanes))
        self.reader[at], self.waves[1, at] = lanes, wave.number
        self.read_time[0, at], self.read_time[1, at] = wave.group.time, wave.time
        self.many[at] |= self.reader[at] != lanes  # lanes of this instruction
        return self.values[at]

    def write(self, at, values, lanes, wave):
        self._check(at)
        if self._raced(at, lanes, wave, 1).any():
            raise Fault("shared memory is written that another lane read, without a barrier")
        differs = (self.values[at] != values) if self.lanes == 1 else (self.values[at] != values).any(-1)
        if (self._raced(at, lanes, wave, 0) & differs).any():
            raise Fault("shared memory is written by two lanes, without a barrier")
        self.values[at] = values
        if not np.array_equal(self.values[at], values, equal_nan=True):
            raise Fault("lanes write different values to one place of shared memory")
        self.written[at], self.writer[at], self.waves[0, at] = True, lanes, wave.number
        self.write_time[0, at], self.write_time[1, at] = wave.group.time, wave.time

    def add(self, at, values, lanes, wave):
        """Atomic additions, lane by lane; what was there before."""
        self._check(at)
        if not self.written[at].all():
            raise Fault("shared memory is added to that was never written")
        raced = self._raced(at, lanes, wave, 0) & (self.writer[at] != ATOMIC)
        if (raced | self._raced(at, lanes, wave, 1)).any():
            raise Fault("shared memory is added to that another lane used, without a barrier")
        found = np.empty_like(values)
        for i, place in enumerate(at):
            found[i] = self.values[place]
            self.values[place] += values[i]
        self.writer[at], self.waves[0, at] = ATOMIC, wave.number
        self.write_time[0, at], self.write_time[1, at] = wave.group.time, wave.time
        return found

    def _check(self, at) -> None:
        if ((at < 0) | (at >= self.count)).any():
            raise Fault(f"element {int(np.max(at))} of {self.count} in shared memory")
