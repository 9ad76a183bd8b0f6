"""Tests whether GPUs receive each other's words while kernels run, and measures the duration of a round. It runs
thousands of rounds of the exchange kernel (schedules/gpu/exchange) and compares the final sums with exact ones.

The residual of a round is the sum of the round before, so one wrong word changes the final sum. Parts are whole
numbers, so that sums are exact. Parts repeat after FRAMES = 5 rounds, but slots after two: an old word that is still in
its slot differs from the expected one.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.exchange_layout import PROBE

FRAMES = 5  # different parts of each rank
AT_ONCE = 160  # rounds that are started together, about those of a step; even, as sums alternate between two buffers
LARGEST = 100  # largest absolute value in a part; float32 sums of whole numbers are exact below 2**24


class Kernel(NamedTuple):
    """The exchange kernel of `values` values, with a residual. code: the kernel in the API's form. Its parameters are
    numbered in the order state, X, R, Y, P, Inbox, Outbox0, .., Control. args: the numbers of the parameters that the
    code takes, in the order in which it takes them."""

    code: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[int, ...]
    values: int


class CheckedGpu(Protocol):
    """A GPU of a check. begin: starts AT_ONCE rounds. wait: for their end. sums: the last round's, float32 [values]."""

    name: str

    def begin(self) -> None: ...
    def wait(self) -> None: ...
    def sums(self) -> np.ndarray: ...


def probe(artifact, arch: str) -> tuple[dict, int]:
    """(launch, values): the manifest's launch of the check's kernel, and the number of values that it exchanges."""
    (step,) = artifact.manifest["launches"][arch][PROBE]["steps"]
    return step, 4 * artifact.manifest["exchange"]["words"][PROBE]


def one_arch(archs: Sequence[str]) -> str:
    """The arch that all GPUs have. Raises Unsuitable if archs differ: their kernels may have other workgroups."""
    if len(set(archs)) > 1:
        raise Unsuitable("GPUs of different kinds")
    return archs[0]


def parts(gpus: int, values: int) -> np.ndarray:
    """float32 [gpus, FRAMES, values]: the part of each GPU in round i is frame i % FRAMES."""
    numbers = np.random.default_rng(1).integers(-LARGEST, LARGEST, (gpus, FRAMES, values), endpoint=True)
    return numbers.astype(np.float32)


def arguments(kernel: Kernel, frames: int, sums: int, boxes: Sequence[int]) -> Iterator[list[int]]:
    """The addresses of the kernel's arguments in each of AT_ONCE launches. frames: address of a GPU's parts. sums:
    address of two buffers of sums; the first one has the sums before the first launch and after the last."""
    nbytes = kernel.values * 4
    for i in range(AT_ONCE):
        before, after = (sums + (i + j) % 2 * nbytes for j in (0, 1))
        given = {1: frames + i % FRAMES * nbytes, 2: before, 3: after} | dict(enumerate(boxes, 5))
        yield [given[number] for number in kernel.args]


def check(gpus: Sequence[CheckedGpu], boxes, values: int, rounds: int) -> float:
    """Runs at least `rounds` rounds. Returns the seconds of a round, launches included, the minimum of several runs.
    gpus: in the order of ranks. boxes: the transport between them, which no kernel uses yet. Raises Unsuitable if words
    are wrong or do not arrive."""
    repeats = -(-rounds // AT_ONCE)
    assert repeats * AT_ONCE * LARGEST * len(gpus) < 1 << 24, "sums would not be exact"
    uses = np.bincount(np.arange(AT_ONCE) % FRAMES, minlength=FRAMES) * repeats
    expected, best = np.einsum("f,rfn->n", uses, parts(len(gpus), values)), math.inf
    boxes.reset()
    for _ in range(repeats):
        boxes.begin(AT_ONCE, values // 4)
        start = time.perf_counter()
        for gpu in gpus:
            gpu.begin()
        for gpu in gpus:
            gpu.wait()
        best = min(best, (time.perf_counter() - start) / AT_ONCE)
        if failed := boxes.failed():
            raise Unsuitable(f"words of the other GPUs do not reach {', '.join(gpus[i].name for i in failed)}")
    for gpu in gpus:
        if wrong := int((gpu.sums() != expected).sum()):
            raise Unsuitable(f"{gpu.name} got wrong words: {wrong} of {values} sums differ after {rounds} rounds")
    return best
