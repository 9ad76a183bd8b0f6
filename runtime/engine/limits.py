"""How much a scheduler takes on at once."""

from dataclasses import dataclass
from typing import NamedTuple

from mlc_amd.runtime.errors import UserError


class QueueFull(UserError):
    """As many requests wait as may wait."""


class RequestCounts(NamedTuple):
    """How many requests wait, and how many are running."""

    waiting: int
    running: int


@dataclass(frozen=True)
class SchedulerLimits:
    """Maxima. singles: answers of a step; chunk: tokens of a chunk; rows: tokens of a step with a chunk and single
    rows; scored: tokens of a chunk of which all logits are wanted; running: requests that hold pages; queue: requests
    that wait. sizes: rows of the functions for a chunk without single rows, see `chunk_size`."""

    singles: int = 64
    chunk: int = 512
    rows: int = 512
    scored: int = 64
    running: int = 128
    queue: int = 1024
    sizes: tuple[int, ...] = ()

    @property
    def step_rows(self) -> int:
        """Rows of a step without a chunk."""
        return min(self.singles, self.rows)
