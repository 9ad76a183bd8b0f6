"""Sparse attention by an indexer: small keys of their own choose which keys of the cache a row attends to.

Rows, positions and pages are those of attention.py. Ids int32 [m, used]: the positions of a row's chosen keys, -1 where
it sees fewer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.attention import PAGE, Attention
from mlc_amd.schedules.operators.base import PAGES_SLOT, ROWS_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import Tensor, padded


@dataclass(frozen=True, kw_only=True)
class SelectKeys(Operator, name="select_keys", sizes="{0.heads}x{0.d}_{0.used}"):
    """The `used` keys with the largest scores of those that a row sees, all if there are no more; of equal ones the
    first: (rows, pages, q float32 [m, heads * d, padded], w float32 [m, heads, padded], k float32 [m, d, padded],
    cache) -> (ids int32 [m, used], cache), where the rows' k are written first. A key's score is

        sum over heads of w * max(q . k, 0)

    cache: float16 [pages, PAGE, d]. ValueError unless 16 divides d and PAGE divides ctx.
    """

    heads: int
    d: int
    used: int
    ctx: int
    m: int

    reads_cache = True

    def __post_init__(self):
        if self.d % 16 or self.ctx % PAGE:
            raise ValueError(f"{self}: keys have a multiple of 16 columns, and a sequence whole pages")

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Q", "W", "K")), Slot("cache", ("Ik",)))
        yield Slot("output", ("Ids",))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its kernel's float32 parameters, by name."""
        m = self.m
        return {"Q": (m, padded(self.heads * self.d)), "W": (m, padded(self.heads)), "K": (m, padded(self.d))}

    def cache_shape(self) -> tuple[int, ...]:
        return self.ctx // PAGE, PAGE, self.d

    def results(self) -> list[Tensor]:
        return [((self.m, self.used), "int32")]

    @property
    def written(self) -> int:
        return 1

    @property
    def positions(self) -> int:
        return self.ctx

    def operations(self) -> tuple[int, int]:
        return 0, 2 * self.heads * self.d


@dataclass(frozen=True, kw_only=True)
class SelectedAttention(Operator, name="selected_attention", sizes="{0.layer.heads}x{0.layer.d}_{0.used}"):
    """Latent attention to chosen keys: (rows, pages, rotated q, ids int32 [m, used], cache, [sinks]) -> float32 [m,
    heads * value_d]. ValueError for attention that is not latent."""

    layer: Attention
    used: int
    m: int

    reads_cache = True

    def __post_init__(self):
        if not self.layer.values:
            raise ValueError(f"{self}: selected keys are those of latent attention")

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Qo", "Ids")), Slot("cache", ("Kc",)))
        yield from named("weight", Sinks=self.layer.sinks)
        yield Slot("output", ("Y",))

    def results(self) -> list[Tensor]:
        return [((self.m, self.layer.heads * self.layer.value_d), "float32")]

    @property
    def positions(self) -> int:
        return self.layer.ctx

    @property
    def most_keys(self) -> int:
        return self.used

    def operations(self) -> tuple[int, int]:
        return 0, 2 * self.layer.heads * (self.layer.d + self.layer.value_d)
