"""Runs of a plan's functions: command buffers that are recorded once and submitted for every run.

In: each function's launches, the io buffers, and a Pacer, which says what one submission may compute. Usually that is
the whole function. A longer step is recorded in pieces, each of which is submitted when the one before is done; the
next long steps of the function use them again as long as the pacer leaves them as they are. Where inputs come late,
what does not read them is a command buffer of its own. Runs that begin behind others of their function, before these
are done, are recorded on their own, too.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from mlc_amd.runtime.devices.pieces import Pacer, Part, Piece
from mlc_amd.runtime.devices.vulkan import timing
from mlc_amd.runtime.devices.vulkan.commands import Launch, Recorder
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.io import Io
from mlc_amd.runtime.devices.vulkan.pipelines import Based


class _Started(NamedTuple):
    """A run that is not waited for. side: see `Io`, None of a run that began behind no other."""

    name: str
    side: int | None


class Replays:
    """functions: the manifest's entries; plan: launches of each; heads: how many of them come before late inputs are
    read, 0 if none are; layout: of all pipelines; based: those for parts of a grid. waited: seconds spent waiting for
    the GPU in all runs."""

    def __init__(
        self,
        context: Context,
        io: Io,
        pacer: Pacer,
        functions: Mapping[str, Mapping],
        plan: Mapping[str, Sequence[Launch]],
        heads: Mapping[str, int],
        layout: int,
        based: Based,
    ):
        self.context, self.io, self.pacer, self.waited = context, io, pacer, 0.0
        self._functions, self._plan, self._heads = functions, plan, heads
        self._layout, self._based = layout, based
        self._whole = {name: self._record(name, ()) for name in plan}
        self._cut: dict[str, tuple[tuple[Piece, ...], list[ctypes.Structure]]] = {}  # of the last long step
        self._halves: dict[str, list[ctypes.Structure]] = {}  # before late inputs, and behind them
        # runs behind others, by function, side, and whether LATE inputs come later
        self._behind: dict[tuple[str, int, bool], list[ctypes.Structure]] = {}
        self._rest: list[ctypes.Structure] = []  # of the last of them: what comes with its LATE inputs
        self._started: deque[_Started] = deque()  # runs that are not waited for, the oldest first
        self._since = 0.0  # when the oldest of them was alone on the GPU
        self._side = 0  # of the next run behind another one
        self._timed: dict[str, tuple[tuple[Piece, ...], list[ctypes.Structure], int]] = {}  # with the query pool

    def run(self, name: str, meanwhile: Callable[[], None] | None = None) -> None:
        """Runs a function and waits for it. meanwhile: see `start`; a step in pieces takes so long that it comes
        first."""
        pieces = self.pacer.pieces(name)
        if not pieces:
            self.start(name, meanwhile)
            self.wait()
            return
        self._abandon()
        if meanwhile:
            meanwhile()
        self._submit(name, pieces, self._recorded(name, pieces))

    def short(self, name: str) -> bool:
        """Whether a run of the function is one submission, as it is for `start` and `start_ahead`."""
        return not self.pacer.pieces(name)

    def has_late(self, name: str) -> bool:
        """Whether the function reads LATE inputs, and not at once."""
        return bool(self._heads[name])

    def start(self, name: str, meanwhile: Callable[[], None] | None = None) -> None:
        """Begins a run, for which `wait` waits. meanwhile: writes LATE inputs; where they are late, the GPU computes
        what does not read them at the same time. What it raises is raised when the GPU is idle."""
        self._abandon()
        if meanwhile and self._heads[name]:
            if name not in self._halves:
                self._halves[name] = self._record_halves(name)
            head, tail = self._halves[name]
            self.context.submit_open(*self.io.before(), head)
            try:
                meanwhile()
            except BaseException:
                self.context.settle()
                raise
            self.io.late()
            self.context.submit_behind(tail)
        else:
            if meanwhile:
                meanwhile()
            self.context.submit(*self.io.before(), *self._whole[name])
        self._begun(name, None)

    def start_ahead(self, name: str, late: bool = False) -> None:
        """Begins a run of the function behind one that is in progress. Its tokens are those that the other samples; its
        other inputs are what the host wrote last. late: what reads LATE inputs comes with `complete_inputs`."""
        side = self._side = 1 - self._side
        key = name, side, late
        if key not in self._behind:
            self.io.add_sides()
            whole = [self._plan[name]]
            self._behind[key] = self._record_halves(name, side) if late else self._record_groups(name, whole, side=side)
        first, *rest = self._behind[key]
        (self.context.submit_open if late else self.context.submit_behind)(*self.io.before_behind(side), first)
        self._rest = rest
        self._begun(name, side)

    def complete_inputs(self) -> None:
        """The host has written the LATE inputs of the run that was begun last."""
        self.io.late(self._side)
        self.context.submit_behind(*self._rest)

    def _begun(self, name: str, side: int | None) -> None:
        self._started.append(_Started(name, side))
        if len(self._started) == 1:
            self._since = time.perf_counter()

    def wait(self) -> None:
        """Waits for the oldest run that was started."""
        name, side = self._started[0]
        begun = time.perf_counter()
        self.context.wait()
        now = time.perf_counter()
        self._started.popleft()
        self.waited += now - begun
        self.pacer.took(name, now - self._since)
        self._since = now
        self.io.finished(self._functions[name], side)

    def _abandon(self) -> None:
        """Nobody waits any more for runs that were started, if there are any."""
        self._started.clear()
        self.context.settle()

    def run_plain(self, name: str) -> None:
        """Records the function for this run alone."""
        self._abandon()
        pieces = self.pacer.pieces(name)
        submissions = self._record(name, pieces)
        self._submit(name, pieces, submissions)
        self._release(submissions)

    def time(self, name: str) -> list[tuple[str, float, float]]:
        """Runs a function; (kernel, seconds, seconds since the end of the launch before) of each launch. A launch that
        overlaps the one before counts from the end of that one; behind a wait for a piece, the wait counts too."""
        self._abandon()
        pieces = self.pacer.pieces(name)
        launches = [part.launch for piece in pieces for part in piece] or [*range(len(self._plan[name]))]
        if name not in self._timed or self._timed[name][0] != pieces:
            self._release(self._timed[name][1] if name in self._timed else [])
            pool = timing.query_pool(self.context, 2 * len(launches))
            self._timed[name] = pieces, self._record(name, pieces, pool), pool
        _, submissions, pool = self._timed[name]
        self._submit(name, pieces, submissions)
        stamps = timing.results(self.context, pool, 2 * len(launches))
        steps = [timing.seconds(self.context, before, after) for before, after in pairwise(stamps)]
        times: list[tuple[str, float, float]] = []
        for i, (launch, spent, gap) in enumerate(zip(launches, steps[::2], [0.0, *steps[1::2]], strict=True)):
            if i and launches[i - 1] == launch:  # a further part of the same launch
                kernel, before, first = times[-1]
                times[-1] = kernel, before + spent, first
            else:
                times.append((self._plan[name][launch].kernel, spent, gap))
        return times

    # ---- recording

    def _recorded(self, name: str, pieces: tuple[Piece, ...]) -> list[ctypes.Structure]:
        known, submissions = self._cut.get(name, ((), []))
        if known != pieces:
            self._release(submissions)
            submissions = self._record(name, pieces)
            self._cut[name] = pieces, submissions
        return submissions

    def _release(self, submissions: list[ctypes.Structure]) -> None:
        for one in submissions:
            self.context.release(one)

    def _record(self, name: str, pieces: tuple[Piece, ...], pool: int | None = None) -> list[ctypes.Structure]:
        """What to submit for each piece, for the whole function without any. pool: of timestamps for all launches."""
        groups = [list(self._launches(name, piece)) for piece in pieces] or [self._plan[name]]
        return self._record_groups(name, groups, pool)

    def _record_halves(self, name: str, side: int | None = None) -> list[ctypes.Structure]:
        """What to submit before late inputs are known, and then. side: of a run behind another one."""
        launches, head = self._plan[name], self._heads[name]
        return self._record_groups(name, [launches[:head], launches[head:]], late=True, side=side)

    def _record_groups(
        self,
        name: str,
        groups: Sequence[Sequence[Launch]],
        pool: int | None = None,
        late: bool = False,
        side: int | None = None,
    ) -> list[ctypes.Structure]:
        """late: the last group reads inputs that the host writes behind the start of the first. side: of a run behind
        another one."""
        function = self._functions[name]
        found, stamps = [], 0
        for i, launches in enumerate(groups):
            queries = None if pool is None else (pool, stamps, 2 * len(launches))
            stamps += 2 * len(launches)
            recorder = Recorder(self.context, self._layout, queries)
            recorder.begin()
            if i > 0:
                if late:
                    self.io.record_late(recorder, function, side)
            elif side is None:
                self.io.record_inputs(recorder)
            else:
                self.io.record_inputs_behind(recorder, function, side)
            for launch in launches:
                recorder.launch(launch)
            if i == len(groups) - 1:
                self.io.record_outputs(recorder, function, side)
            recorder.end()
            found.append(self.context.submission(recorder.commands))
        return found

    def _launches(self, name: str, piece: Piece) -> Iterator[Launch]:
        for part in piece:
            launch = self._plan[name][part.launch]
            yield launch if part.whole else self._some(launch, part)

    def _some(self, launch: Launch, part: Part) -> Launch:
        """A part of a launch's workgroups."""
        axis = launch.grid.index(part.groups)
        base, grid = [0, 0, 0], list(launch.grid)
        base[axis], grid[axis] = part.first, part.end - part.first
        return replace(launch, pipeline=self._based[launch.symbol], grid=tuple(grid), base=tuple(base))

    # ---- running

    def _submit(self, name: str, pieces: tuple[Piece, ...], submissions: list[ctypes.Structure]) -> None:
        before = self.io.before()
        for piece, submission in zip(pieces or ((),), submissions, strict=True):
            self.context.submit(*before, submission)
            before = []
            start = time.perf_counter()
            self.context.wait()
            spent = time.perf_counter() - start
            self.waited += spent
            self.pacer.took(name, spent, piece)
        self.io.finished(self._functions[name])
