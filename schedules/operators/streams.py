"""`Sinkhorn`, an operator of models with several residual streams (compiler/models/residuals/config.py)."""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.base import STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor


@dataclass(frozen=True, kw_only=True)
class Sinkhorn(Operator, name="sinkhorn", sizes="{0.count}"):
    """Sinkhorn normalization of a matrix [count, count] for each row of a step: (x float32 [m, count * count]) ->
    float32 [m, count * count]. It starts with the softmax of each row of the matrix, plus eps. Then it divides columns
    by (their sum + eps) `iterations` times, and rows by (their sum + eps) between two of these."""

    count: int
    iterations: int
    eps: float
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), Slot("output", ("Y",)))

    def results(self) -> list[Tensor]:
        return [((self.m, self.count**2), "float32")]
