"""Divides a function's launches into pieces, so that no submission to a GPU takes longer than LIMIT.

In: the manifest's costs of kernels, a step's io buffers "state" and "rows", the durations of earlier runs. Out: the
pieces of a step.

Drivers reset a GPU that works too long on one submission (AMD's on Linux after 2 to 10 s, amdgpu.lockup_timeout), and a
display freezes meanwhile. A step's duration depends on the positions of its rows: attention reads all earlier keys.

The duration of a launch is estimated from its bytes and operations (dist/README.md) and from rates that are low for any
GPU. Each function has two factors on its estimates: one for the cost that does not depend on positions, and one for the
cost that does. Each run corrects them by Kaczmarz' projection: they become the nearest factors for which the estimate
of this run is exact. Most functions are always short enough for one submission; this costs only a comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod

import numpy as np

LIMIT = 0.5  # seconds of a submission, estimated: a quarter of the shortest limit of a driver
FILL = 0.7  # new pieces take at most this fraction of LIMIT, so that they remain valid for many later positions
SURE = 0.25  # functions that never take more than this fraction of LIMIT are not estimated step by step
# Rates before the first measurement. PART: fraction of the target's bandwidth in the manifest, which is that of the
# fastest product of its arch. UNKNOWN: GB/s if the manifest has no bandwidth. OPERATIONS: operations per byte (a Steam
# Deck does 18 float32 multiply-adds in the time in which it reads a byte).
PART, UNKNOWN, OPERATIONS = 0.25, 12.0, 16.0
LAUNCH = 5e-6  # seconds that any launch takes at least
FLOOR = 0.01  # smallest value of a factor
MOST = 64  # upper limit of the parts of a launch


@dataclass(frozen=True)
class LaunchPart:
    """Some workgroups of a launch: first .. end-1 of `groups`, along the longest axis of the grid. launch: its index in
    the function."""

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
    """The estimated seconds of a kernel call, as terms of a sum."""

    moved: float = 0.0  # per call, whatever the step
    row: float = 0.0  # per live row
    key: float = 0.0  # per key before a sequence's first row
    score: float = 0.0  # per pair of a row and a key that it attends to
    keys: int = 0  # upper limit of the keys that a row attends to

    @classmethod
    def of(cls, entry: Mapping, rows: int, bandwidth: float) -> "_Cost":
        """entry: the kernel's entry in the manifest. rows: the number of rows for which the entry counts operations.
        bandwidth: bytes per second."""
        moved, operations, rate = entry["bytes"], entry["operations"], OPERATIONS * bandwidth
        row = moved["token"] / bandwidth + operations["call"] / rows / rate
        return cls(moved["call"] / bandwidth, row, moved["key"] / bandwidth, operations["score"] / rate, entry["keys"])

    def seconds(self, before: np.ndarray, places: np.ndarray) -> tuple[float, float]:
        """(seconds that do not depend on positions, seconds that do). before: int [sequences], keys before each
        sequence's first row. places: int [rows], positions."""
        fixed = LAUNCH + max(self.moved, self.row * len(places))
        if not (self.key or self.score):
            return fixed, 0.0
        seen = self.key * float(np.minimum(before, self.keys).sum())
        return fixed, max(seen, self.score * float(np.minimum(places + 1, self.keys).sum()))


class _Function:
    """The launches of a function with their costs, and the two factors `fixed` and `deep` that runs correct."""

    def __init__(self, entry: Mapping, kernels: Mapping, launched: Mapping, bandwidth: float, context: int, cuts: bool):
        self.fixed = self.deep = 1.0
        self.pieces: tuple[WorkPiece, ...] = ()  # pieces of the last long step
        self.cut_for = 0.0  # estimated seconds of the step that `pieces` were made for
        self._kinds = {"": _Cost()}  # cost of each kernel; "": of launches that contribute little to their call
        self._of: list[int] = []  # index in _kinds of each launch
        self.groups: list[int] = []  # workgroups of each launch if it may be divided, otherwise 1
        for call in entry["launches"]:
            name, steps = call["kernel"], launched[call["kernel"]]["steps"]
            if name not in self._kinds:
                self._kinds[name] = _Cost.of(kernels[name], entry["rows"], bandwidth)
            # The whole cost of a call is attributed to its launch with the most threads.
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
        """`_Cost.seconds` of each launch."""
        found = [cost.seconds(before, places) for cost in self._kinds.values()]
        return [found[kind] for kind in self._of]

    def total(self, before: np.ndarray, places: np.ndarray) -> tuple[float, float]:
        """`_Cost.seconds` of all launches together."""
        fixed = deep = 0.0
        for cost, count in zip(self._kinds.values(), self._counts, strict=True):
            one = cost.seconds(before, places)
            fixed, deep = fixed + count * one[0], deep + count * one[1]
        return fixed, deep

    def estimate(self, fixed: float, deep: float) -> float:
        return self.fixed * fixed + self.deep * deep

    def correct(self, fixed: float, deep: float, seconds: float) -> None:
        """Corrects the factors: launches with these costs took `seconds`."""
        error = (seconds - self.estimate(fixed, deep)) / (fixed * fixed + deep * deep)
        self.fixed = max(self.fixed + error * fixed, FLOOR)
        self.deep = max(self.deep + error * deep, FLOOR)

    def cut(self, seconds: list[float], most: float) -> tuple[WorkPiece, ...]:
        """Pieces of at most `most` seconds each, or more where a launch cannot be divided. seconds: of each launch."""
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
    """Divides the steps of an artifact's functions on one device. arch: the device's, a key of the manifest's launches.
    cuts: whether the device can launch a part of a grid. Kernels that count arrivals in memory (role "zero") are never
    divided, because a run that is interrupted between two pieces would leave a wrong count. limit: seconds of a
    submission."""

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
        """To be called with every write to an io buffer; keeps the values of "state" and "rows"."""
        if name in ("state", "rows"):
            self._io[name] = np.array(values)

    def pieces(self, function: str) -> tuple[WorkPiece, ...]:
        """The pieces to submit in order, with a wait after each; (): the whole function is one submission."""
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
        """Records the measured duration of a piece; (): of the whole function."""
        one = self._functions[function]
        if seconds <= SURE * self.limit and one.estimate(*one.most) <= SURE * self.limit:
            return
        if not piece:
            one.correct(*one.total(*self._places()), seconds)
            return
        fixed, deep = zip(*one.seconds(*self._places()), strict=True)
        one.correct(_of(piece, list(fixed)), _of(piece, list(deep)), seconds)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """(keys before each sequence's first row, positions of all rows) of the step whose inputs were written."""
        if len(self._io) < 2:
            return np.zeros(1, np.int32), np.zeros(1, np.int32)
        single, live = (int(number) for number in self._io["state"][:2])
        places = self._io["rows"][:live, 0]
        return places[: single + (live > single)], places
