"""Operators of a model that several GPUs compute together, each a part of every product (compiler/models/shards.py).

P has what each GPU computed, in the order of the GPUs: it is filled before the kernel is launched, or by the kernel
itself, as the transport does it (runtime/devices/tensor.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mlc_amd.schedules.operators.base import OUTPUT_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import Tensor
from mlc_amd.schedules.operators.linear import prepared_inputs, prepared_outputs, prepared_results

MOST_WORDS = 1 << 17  # that a GPU sends in a round while kernels run: more cross faster in copies between segments
PARTS_SLOT = Slot("work", ("P",))


@dataclass(frozen=True, kw_only=True)
class Exchange(Operator):
    """parts: the number of GPUs; n: columns of what each one computed; words: what a GPU sends to each other one, if
    kernels exchange it while they run (runtime/exchange_layout.py)."""

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
    """The sum of what the GPUs computed, in their order: (x, [residual], [g, [scale]]) -> float32 [m, n], P, and what
    it prepares of a norm. half: x and P are float16; norm_out: as of Linear."""

    residual: bool = False
    half: bool = False
    norm_out: str = ""
    per_word = 4  # rounded to float16

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
    """What the GPUs computed side by side: x -> float32 [m, parts * n], P."""

    per_word = 2

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, Slot("input", ("X",)), OUTPUT_SLOT, PARTS_SLOT)

    def results(self) -> list[Tensor]:
        return [((self.m, self.parts * self.n), "float32"), ((self.parts, self.m, self.n), "float32")]
