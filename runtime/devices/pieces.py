"""Divides a function's launches into pieces, so that no submission to a GPU takes longer than LIMIT.

Drivers reset a GPU that works too long on one submission: on Linux after 2 to 10 s for AMD's (amdgpu.lockup_timeout),
and a display waits meanwhile. The duration of a step depends on its rows' positions: attention reads all keys before
them.

A launch is estimated from the bytes and operations that dist/README.md describes, at rates that are low for any GPU.
Each run then corrects two factors of its function: of the cost that does not depend on the rows' positions, and of the
cost that does (Kaczmarz' projection: the nearest factors with which the estimate of that run is right). Usually one
submission is short enough, which costs no more than a comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod

import numpy as np

LIMIT = 0.5  # seconds of a submission by estimate: a quarter of the shortest limit of drivers
FILL = 0.7  # part of the limit that new pieces take: they remain valid for many later positions of the rows
SURE = 0.25  # part of the limit below which nothing is estimated
# Rates before anything was measured: a part of the table's bandwidth, which is that of the fastest product, or so many
# GB/s where there is none; operations for each byte (a Steam Deck multiplies and adds 18 float32 in the time of one).
PART, UNKNOWN, OPERATIONS = 0.25, 12.0, 16.0
LAUNCH = 5e-6  # seconds that any launch takes
FLOOR = 0.01  # of the factors
MOST = 64  # parts of a launch


@dataclass(frozen=True)
class LaunchPart:
    """Workgroups first .. end-1, of `groups` along the grid's longest axis, of a launch, by its number."""

    launch: int
    first: int
    end: int
    groups: int

    @property
    def whole(self) -> bool:
        return self.end - self.first == self.groups


WorkPiece = tuple[LaunchPart, ...]


@dataclass(frozen=True)
class _Cost:
    """Seconds of a call."""

    moved: float = 0.0  # for any step
    row: float = 0.0  # for each live row
    key: float = 0.0  # for each key before a sequence's rows
    score: float = 0.0  # for each row and key that it sees, at most `keys` of them
    keys: int = 0

    @classmethod
    def of(cls, entry: Mapping, rows: int, bandwidth: float) -> "_Cost":
        """entry: of the manifest's kernels; rows: that its operations are for."""
        moved, operations, rate = entry["bytes"], entry["operations"], OPERATIONS * bandwidth
        row = moved["token"] / bandwidth + operations["call"] / rows / rate
        return cls(moved["call"] / bandwidth, row, moved["key"] / bandwidth, operations["score"] / rate, entry["keys"])

    def seconds(self, before: np.ndarray, places: np.ndarray) -> tuple[float, float]:
        """(cost that does not depend on positions, cost that does). before: keys before each sequence's rows."""
        fixed = LAUNCH + max(self.moved, self.row * len(places))
        if not (self.key or self.score):
            return fixed, 0.0
        seen = self.key * float(np.minimum(before, self.keys).sum())
        return fixed, max(seen, self.score * float(np.minimum(places + 1, self.keys).sum()))


class _Function:
    """Launches of one function with their costs, and the factors that runs correct."""

    def __init__(self, entry: Mapping, kernels: Mapping, launched: Mapping, bandwidth: float, context: int, cuts: bool):
        self.fixed = self.deep = 1.0
        self.pieces: tuple[WorkPiece, ...] = ()  # of the last long step
        self.cut_for = 0.0  # seconds of the step that these were made for
        self._kinds = {"": _Cost()}  # by kernel; "": of launches that contribute little to their call
        self._of: list[int] = []  # the kind of each launch
        self.groups: list[int] = []  # workgroups of each launch that may be launched some at a time, else 1
        for call in entry["launches"]:
            name, steps = call["kernel"], launched[call["kernel"]]["steps"]
            if name not in self._kinds:
                self._kinds[name] = _Cost.of(kernels[name], entry["rows"], bandwidth)
            # The launch of a call with the most threads has its cost.
            main = max(range(len(steps)), key=lambda i: prod(steps[i]["grid"]) * prod(steps[i]["block"]))
            alone = cuts and all(param["role"] != "zero" for param in kernels[name]["params"])
            for i, step in enumerate(steps):
                self._of.append(list(self._kinds).index(name) if i == main else 0)
                self.groups.append(max(step["grid"]) if alone else 1)
        self._counts = [self._of.count(kind) for kind in range(len(self._kinds))]
        ends = np.full(entry["rows"], context - 1)
        sequences = entry["single"] + (entry["rows"] > entry["single"])
        self.most = self.total(ends[:sequences], ends)

    def seconds(self, before: np.ndarray, places: np.ndarray) -> list[tuple[float, float]]:
        """As `_Cost.seconds`, of each launch."""
        found = [cost.seconds(before, places) for cost in self._kinds.values()]
        return [found[kind] for kind in self._of]

    def total(self, before: np.ndarray, places: np.ndarray) -> tuple[float, float]:
        """The same of all launches together."""
        fixed = deep = 0.0
        for cost, count in zip(self._kinds.values(), self._counts, strict=True):
            one = cost.seconds(before, places)
            fixed, deep = fixed + count * one[0], deep + count * one[1]
        return fixed, deep

    def estimate(self, fixed: float, deep: float) -> float:
        return self.fixed * fixed + self.deep * deep

    def correct(self, fixed: float, deep: float, seconds: float) -> None:
        """A run with these costs took so many seconds."""
        error = (seconds - self.estimate(fixed, deep)) / (fixed * fixed + deep * deep)
        self.fixed = max(self.fixed + error * fixed, FLOOR)
        self.deep = max(self.deep + error * deep, FLOOR)

    def cut(self, seconds: list[float], most: float) -> tuple[WorkPiece, ...]:
        """Pieces of at most `most` seconds, more where a launch cannot be divided. seconds: of each launch."""
        pieces: list[list[LaunchPart]] = [[]]
        filled = 0.0
        for launch, (spent, groups) in enumerate(zip(seconds, self.groups, strict=True)):
            count = min(max(ceil(spent / most), 1), groups, MOST)
            for first, end in pairwise(groups * i // count for i in range(count + 1)):
                share = spent * (end - first) / groups
                if pieces[-1] and filled + share > most:
                    pieces.append([])
                    filled = 0.0
                pieces[-1].append(LaunchPart(launch, first, end, groups))
                filled += share
        return tuple(map(tuple, pieces))


def _of(piece: WorkPiece, values: list) -> float:
    return sum(values[part.launch] * (part.end - part.first) / part.groups for part in piece)


class Pacer:
    """For the functions of an artifact on one device. limit: seconds of a submission. arch: of the device's launches.
    cuts: whether it can launch some of a grid's workgroups; those of kernels that count arrivals stay together, as a
    run that is interrupted between two pieces would leave a wrong count."""

    def __init__(self, manifest: Mapping, arch: str, cuts: bool = False):
        self.limit = LIMIT
        kernels = {entry["name"]: entry for entry in manifest["kernels"]}
        bandwidth = PART * manifest["target"]["bandwidth"].get(arch, 0) or UNKNOWN
        launched, context = manifest["launches"][arch], manifest["context"]
        self._functions = {
            name: _Function(entry, kernels, launched, bandwidth * 1e9, context, cuts)
            for name, entry in manifest["functions"].items()
        }
        self._io: dict[str, np.ndarray] = {}

    def write(self, name: str, values) -> None:
        """The host writes to an io buffer: the pacer keeps the step's "state" and "rows"."""
        if name in ("state", "rows"):
            self._io[name] = np.array(values)

    def pieces(self, function: str) -> tuple[WorkPiece, ...]:
        """What to submit in order, with a wait after each; (): all at once."""
        one = self._functions[function]
        if one.estimate(*one.most) <= SURE * self.limit:
            return ()
        seconds = [one.estimate(*each) for each in one.seconds(*self._places())]
        if sum(seconds) <= self.limit:
            return ()
        moved_back = sum(seconds) < one.cut_for / 2
        if moved_back or not one.pieces or max(_of(piece, seconds) for piece in one.pieces) > self.limit:
            one.pieces, one.cut_for = one.cut(seconds, FILL * self.limit), sum(seconds)
        return one.pieces if len(one.pieces) > 1 else ()

    def record(self, function: str, seconds: float, piece: WorkPiece = ()) -> None:
        """The duration of a piece, (): of the whole function."""
        one = self._functions[function]
        if seconds <= SURE * self.limit and one.estimate(*one.most) <= SURE * self.limit:
            return
        if not piece:
            one.correct(*one.total(*self._places()), seconds)
            return
        fixed, deep = zip(*one.seconds(*self._places()), strict=True)
        one.correct(_of(piece, list(fixed)), _of(piece, list(deep)), seconds)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """(keys before the rows of each sequence, positions of the rows) of the step that was written."""
        if len(self._io) < 2:
            return np.zeros(1, np.int32), np.zeros(1, np.int32)
        single, live = (int(number) for number in self._io["state"][:2])
        places = self._io["rows"][:live, 0]
        return places[: single + (live > single)], places
