"""Runs of a plan's functions: command buffers that are recorded once and submitted for every run. In: the launches of
each function. Out: `Replays`, the hooks of a RunQueue.

A function may have several recordings:

- the whole function, for most runs.
- pieces, for long steps (pieces.py). A piece is submitted when the piece before is done. The recordings are used again
  until the pacer changes the pieces.
- two parts, for runs that start before their LATE inputs are written: the launches that do not read these, and the
  rest.
- recordings with a slot (`Io`), for runs that start while another run is in progress.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from mlc_amd.runtime.devices.pieces import LaunchPart, Pacer, WorkPiece
from mlc_amd.runtime.devices.run_queue import QueuedRun, RunHooks
from mlc_amd.runtime.devices.vulkan import timing
from mlc_amd.runtime.devices.vulkan.carried import Carried
from mlc_amd.runtime.devices.vulkan.commands import CommandRecorder, VulkanLaunch
from mlc_amd.runtime.devices.vulkan.context import Context
from mlc_amd.runtime.devices.vulkan.io import Io
from mlc_amd.runtime.devices.vulkan.pipelines import BasedPipelines


class Replays(RunHooks):
    """The recordings of a device. functions: the manifest's entries. plan: {function: its launches}. heads: see
    `RunQueue`. layout: of all pipelines. based: the pipelines for launches of a part of a grid."""

    def __init__(
        self,
        context: Context,
        io: Io,
        pacer: Pacer,
        functions: Mapping[str, Mapping],
        plan: Mapping[str, Sequence[VulkanLaunch]],
        heads: Mapping[str, int],
        layout: int,
        based: BasedPipelines,
        carried: Carried,
    ):
        self.context, self.io, self.pacer, self.carried = context, io, pacer, carried
        self._functions, self._plan, self._heads = functions, plan, heads
        self._layout, self._based = layout, based
        # (function, slot, whether in two parts for LATE inputs): one or two submissions
        self._whole: dict[tuple[str, int | None, bool], list[ctypes.Structure]] = {}
        self._together: dict[tuple, list[tuple[int, ctypes.Array]]] = {}  # the same with the copies of `Carried`
        for name in plan:
            self._record_whole(name, None, False)
        self._cut: dict[str, tuple[tuple[WorkPiece, ...], list[ctypes.Structure]]] = {}  # pieces of the last long step
        self._timed: dict[str, tuple[tuple[WorkPiece, ...], list[ctypes.Structure], int]] = {}  # and the query pool

    # ---- hooks of the queue

    def prepare(self, run: QueuedRun) -> None:
        if run.ahead:
            self.io.add_slots()
        self._record_whole(run.name, run.slot if run.ahead else None, run.late)

    def submit(self, run: QueuedRun) -> None:
        self.prepare(run)
        slot = run.slot if run.ahead else None
        first = self._record_whole(run.name, slot, run.late)[0]
        before = self.io.before(slot)
        if run.late:  # never with several GPUs that carry data
            self.context.enqueue_unfenced(*before, first)
            return
        if before:
            self.context.enqueue_unfenced(*before)
        key = run.name, slot, self.carried.parts
        if key not in self._together:
            self._together[key] = self.carried.around(run.name, first)
        self.context.enqueue_together(self._together[key])

    def submit_late(self, run: QueuedRun) -> None:
        slot = run.slot if run.ahead else None
        self.io.late(slot)
        self.context.enqueue(self._record_whole(run.name, slot, True)[1])

    def done(self, run: QueuedRun | None) -> bool:
        return self.context.done()

    def wait(self, run: QueuedRun) -> None:
        self.context.wait()
        self.io.finished(self._functions[run.name], run.slot if run.ahead else None)

    def settle(self, busy: bool) -> None:
        self.context.settle()

    # ---- runs with a wait

    def run(self, name: str, plain: bool) -> Iterator[None]:
        """Runs a function, in pieces if it is long. Pauses before each wait. plain: records it for this run alone."""
        pieces = self.pacer.pieces(name)
        submissions = self._record(name, pieces) if plain else self._recorded(name, pieces)
        yield from self._submit(name, pieces, submissions)
        if plain:
            self._release(submissions)

    def time(self, name: str, meanwhile: Callable[[], None] | None) -> list[tuple[str, float, float]]:
        """Runs a function. Returns (kernel, seconds, seconds since the end of the launch before) of each launch. The
        time of a launch that overlaps the launch before starts at the end of that launch. A gap between two pieces
        includes the host's wait. meanwhile: called once the GPU computes."""
        pieces = self.pacer.pieces(name)
        launches = [part.launch for piece in pieces for part in piece] or [*range(len(self._plan[name]))]
        if name not in self._timed or self._timed[name][0] != pieces:
            self._release(self._timed[name][1] if name in self._timed else [])
            pool = timing.query_pool(self.context, 2 * len(launches))
            self._timed[name] = pieces, self._record(name, pieces, pool), pool
        _, submissions, pool = self._timed[name]
        for number, _ in enumerate(self._submit(name, pieces, submissions)):
            if meanwhile and number == 0:
                meanwhile()
        stamps = timing.results(self.context, pool, 2 * len(launches))
        steps = [timing.seconds(self.context, before, after) for before, after in pairwise(stamps)]
        times: list[tuple[str, float, float]] = []
        for i, (launch, spent, gap) in enumerate(zip(launches, steps[::2], [0.0, *steps[1::2]], strict=True)):
            if i and launches[i - 1] == launch:  # another part of the same launch
                kernel, before, first = times[-1]
                times[-1] = kernel, before + spent, first
            else:
                times.append((self._plan[name][launch].kernel, spent, gap))
        return times

    # ---- recording

    def _recorded(self, name: str, pieces: tuple[WorkPiece, ...]) -> list[ctypes.Structure]:
        known, submissions = self._cut.get(name, ((), []))
        if known != pieces:
            self._release(submissions)
            submissions = self._record(name, pieces)
            self._cut[name] = pieces, submissions
        return submissions

    def _release(self, submissions: list[ctypes.Structure]) -> None:
        for one in submissions:
            self.context.release(one)

    def _record(self, name: str, pieces: tuple[WorkPiece, ...], pool: int | None = None) -> list[ctypes.Structure]:
        """Records a submission for each piece, or one for the whole function if there are no pieces. pool: of
        timestamps, two for each launch."""
        groups = [list(self._launches(name, piece)) for piece in pieces] or [self._plan[name]]
        return self._record_groups(name, groups, pool)

    def _record_whole(self, name: str, slot: int | None, late: bool) -> list[ctypes.Structure]:
        """The submissions for a whole function, recorded at the first call: one, or with `late` two, of which the
        second reads LATE inputs. slot: see `Io`."""
        key = name, slot, late
        if key not in self._whole:
            launches, head = self._plan[name], self._heads[name]
            groups = [launches[:head], launches[head:]] if late else [launches]
            self._whole[key] = self._record_groups(name, groups, late=late, slot=slot)
        return self._whole[key]

    def _record_groups(
        self,
        name: str,
        groups: Sequence[Sequence[VulkanLaunch]],
        pool: int | None = None,
        late: bool = False,
        slot: int | None = None,
    ) -> list[ctypes.Structure]:
        """Records a submission for each group of launches. late: whether the host writes LATE inputs after the first
        group has started. slot: see `Io`."""
        function = self._functions[name]
        found, stamps = [], 0
        for i, launches in enumerate(groups):
            queries = None if pool is None else (pool, stamps, 2 * len(launches))
            stamps += 2 * len(launches)
            recorder = CommandRecorder(self.context, self._layout, queries)
            recorder.begin()
            if i == 0:
                self.io.record_inputs(recorder, function, slot)
            elif late:
                self.io.record_late(recorder, function, slot)
            for launch in launches:
                recorder.launch(launch)
            if i == len(groups) - 1:
                self.io.record_outputs(recorder, function, slot)
            found.append(recorder.end())
        return found

    def _launches(self, name: str, piece: WorkPiece) -> Iterator[VulkanLaunch]:
        for part in piece:
            launch = self._plan[name][part.launch]
            yield launch if part.whole else self._some(launch, part)

    def _some(self, launch: VulkanLaunch, part: LaunchPart) -> VulkanLaunch:
        """A launch of some of a launch's workgroups."""
        axis = launch.grid.index(part.groups)
        base, grid = [0, 0, 0], list(launch.grid)
        base[axis], grid[axis] = part.first, part.end - part.first
        return replace(launch, pipeline=self._based[launch.symbol], grid=tuple(grid), base=tuple(base))

    # ---- running

    def _submit(self, name: str, pieces: tuple[WorkPiece, ...], submissions: list[ctypes.Structure]) -> Iterator[None]:
        """Submits each piece and waits for it. The iterator pauses before each wait."""
        before, last = [*self.io.before(), *self.carried.received(name)], len(submissions) - 1
        after = self.carried.sent(name)  # now, because `carried.parts` may change during the pauses
        for i, (piece, submission) in enumerate(zip(pieces or ((),), submissions, strict=True)):
            self.context.submit(*before, submission, *(after if i == last else ()))
            before = []
            start = time.perf_counter()
            yield
            self.context.wait()
            spent = time.perf_counter() - start
            self.waited += spent
            self.pacer.record(name, spent, piece)
        self.io.finished(self._functions[name])
