"""Whether GPUs get each other's words while kernels run, and how long a round takes: thousands of rounds of the
exchange kernel (schedules/gpu/exchange) whose sums tell whether every word was right.

Parts are whole numbers, the residual of a round is the sum of the one before, so a single wrong word shows in the end.
Parts repeat after FRAMES rounds, and slots after two: an old word is a wrong one.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mlc_amd.runtime.devices.exchange.unsuitable import Unsuitable
from mlc_amd.runtime.exchange_layout import PROBE

FRAMES = 5  # parts of each rank
AT_ONCE = 160  # rounds at once, about those of a step; even, as sums alternate between two buffers
LARGEST = 100  # of a part's numbers; all sums of float32 are exact below 2**24


class Kernel(NamedTuple):
    """The kernel of `values`, with a residual. code: what the API has of it; args: of its parameters (state, X, R, Y,
    P, Inbox, Outbox0.., Control) the numbers of those that the code has, in its order."""

    code: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[int, ...]
    values: int


class CheckedGpu(Protocol):
    """A GPU of a check. begin: starts AT_ONCE rounds; wait: for their end; sums: float32 [values], the last."""

    name: str

    def begin(self) -> None: ...
    def wait(self) -> None: ...
    def sums(self) -> np.ndarray: ...


def probe(artifact, arch: str) -> tuple[dict, int]:
    """(The launch of the artifact's kernel for a check, how many values it exchanges.)"""
    (step,) = artifact.manifest["launches"][arch][PROBE]["steps"]
    return step, 4 * artifact.manifest["exchange"]["words"][PROBE]


def one_arch(archs: Sequence[str]) -> str:
    """Of all GPUs. Unsuitable if they run different code, whose workgroups may differ."""
    if len(set(archs)) > 1:
        raise Unsuitable("GPUs of different kinds")
    return archs[0]


def parts(gpus: int, values: int) -> np.ndarray:
    """float32 [gpus, FRAMES, values]: what each GPU adds, in turn."""
    numbers = np.random.default_rng(1).integers(-LARGEST, LARGEST, (gpus, FRAMES, values), endpoint=True)
    return numbers.astype(np.float32)


def arguments(kernel: Kernel, frames: int, sums: int, boxes: Sequence[int]) -> Iterator[list[int]]:
    """The addresses that the code's parameters get in each of AT_ONCE launches. frames, sums: of a GPU's parts, and of
    two buffers of sums, of which the first one has them before and afterwards."""
    nbytes = kernel.values * 4
    for i in range(AT_ONCE):
        before, after = (sums + (i + j) % 2 * nbytes for j in (0, 1))
        given = {1: frames + i % FRAMES * nbytes, 2: before, 3: after} | dict(enumerate(boxes, 5))
        yield [given[number] for number in kernel.args]


def check(gpus: Sequence[CheckedGpu], boxes, values: int, rounds: int) -> float:
    """Seconds of a round, at best, launches included. gpus: by rank; boxes: the transport between them, which no kernel
    uses yet; rounds: at least so many. Unsuitable when words are wrong or do not come."""
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
