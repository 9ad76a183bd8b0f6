"""`Sample`, the operator that chooses a token for each row of logits."""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.base import STATE_SLOT, Operator, Slot
from mlc_amd.schedules.operators.layouts import Tensor


@dataclass(frozen=True, kw_only=True)
class Sample(Operator, name="sample", sizes="{0.vocab}"):
    """(logits float32 [m, columns], sampling, changes, allowed) -> (token ids int32 [m], log-probabilities float32 [m],
    workspace float32 [m, columns]). runtime/sampling/layout.py defines sampling, changes and allowed. vocab: the number
    of tokens; the columns after it are padding."""

    vocab: int
    columns: int
    m: int

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("Logits",), columns=self.vocab))
        yield Slot("input", ("sampling", "changes", "allowed"))
        yield from (Slot("output", ("Sampled", "LogProbs")), Slot("work", ("Adjusted",)))

    def results(self) -> list[Tensor]:
        return [((self.m,), "int32"), ((self.m,), "float32"), ((self.m, self.columns), "float32")]
