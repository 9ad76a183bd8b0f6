"""Operators of residual streams (compiler/models/residuals/config.py)."""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.base import STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor


@dataclass(frozen=True, kw_only=True)
class Sinkhorn(Operator, name="sinkhorn", sizes="{0.count}"):
    """A matrix of a row whose rows and columns are divided by their sums by turns: (x float32 [m, count * count]) ->
    float32 [m, count * count]. It is the softmax of each row of x, plus eps; then columns are divided by their sums
    plus eps `iterations` times, with rows between."""

    count: int
    iterations: int
    eps: float
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("output", ("Y",)))

    def results(self) -> list[Tensor]:
        return [((self.m, self.count**2), "float32")]
