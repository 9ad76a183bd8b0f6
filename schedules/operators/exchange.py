"""All-reduce and all-gather, the operators that combine the parts of products that several GPUs computed with --split
tensor (compiler/models/shards.py).

The result P holds the parts of all GPUs, in the order of ranks. The runtime fills it before the kernel is launched, or
the kernel exchanges the parts itself and does not use P (runtime/devices/tensor.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlc_amd.schedules.operators.base import OUTPUT_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import Tensor
from mlc_amd.schedules.operators.linear import prepared_inputs, prepared_outputs, prepared_results

# The most words that a GPU sends in a round of an exchange inside kernels. With more words, copies between two segments
# of a step are faster.
MOST_WORDS = 1 << 17
PARTS_SLOT = Slot("work", ("P",))


@dataclass(frozen=True, kw_only=True)
class Exchange(Operator):
    """m, n: rows and columns of a GPU's part. parts: the number of GPUs. words: how many words of
    runtime/exchange_layout.py a GPU sends to each other GPU in a round. per_word: values in a word."""

    n: int
    parts: int
    per_word: ClassVar[int]

    @property
    def variant(self) -> str:
        return f"_{self.parts}"

    @property
    def words(self) -> int:
        return self.m * self.n // self.per_word


@dataclass(frozen=True, kw_only=True)
class AllReduce(Exchange, name="all_reduce", sizes="{0.n}"):
    """The residual plus the sum of the parts of all GPUs, added in the order of ranks: (x [m, n], [residual float32
    [m, n]], [g, [scale]]) -> (float32 [m, n], P [parts, m, n], [outputs of a prepared norm]). x is this GPU's part.
    half: x and P are float16, otherwise float32. norm_out: see Linear."""

    residual: bool = False
    half: bool = False
    norm_out: str = ""
    per_word = 4  # as float16

    @property
    def dtype(self) -> str:
        return "float16" if self.half else "float32"

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), *named("input", R=self.residual))
        yield from (*prepared_inputs(self.norm_out), OUTPUT_SLOT, PARTS_SLOT, *prepared_outputs(self.norm_out))

    def results(self) -> list[Tensor]:
        sums: list[Tensor] = [((self.m, self.n), "float32"), ((self.parts, self.m, self.n), self.dtype)]
        return sums + prepared_results(self.m, self.n, self.norm_out)


@dataclass(frozen=True, kw_only=True)
class AllGather(Exchange, name="all_gather", sizes="{0.n}"):
    """The columns of all GPUs' parts, concatenated in the order of ranks: (x float32 [m, n],) -> (float32 [m, parts *
    n], P float32 [parts, m, n])."""

    per_word = 2  # as float32

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), OUTPUT_SLOT, PARTS_SLOT)

    def results(self) -> list[Tensor]:
        return [((self.m, self.parts * self.n), "float32"), ((self.parts, self.m, self.n), "float32")]
