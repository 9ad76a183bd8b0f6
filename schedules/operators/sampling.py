"""The choice of a token for each row of logits, as an operator."""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.base import STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor


@dataclass(frozen=True, kw_only=True)
class Sample(Operator, name="sample", sizes="{0.vocab}"):
    """(logits [m, columns], sampling, changes, allowed) -> (ids int32 [m], log-probabilities [m], workspace [m,
    columns]); all but the logits are those of runtime/sampling/layout.py. vocab: columns of the logits that count."""

    vocab: int
    columns: int
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("Logits",), columns=self.vocab))
        yield Slot("input", ("sampling", "changes", "allowed"))
        yield from (Slot("output", ("Sampled", "LogProbs")), Slot("work", ("Adjusted",)))

    def results(self) -> list[Tensor]:
        return [((self.m,), "int32"), ((self.m,), "float32"), ((self.m, self.columns), "float32")]
