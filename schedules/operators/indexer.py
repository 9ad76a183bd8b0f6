"""Sparse attention by an indexer: small keys of their own choose which keys of the cache a row attends to.

Rows, positions and pages are those of attention.py. Ids int32 [m, sets * used]: of each set the numbers of the chosen
blocks of `block` positions, ascending, then -1; with blocks of 1 they are positions. A row attends to the keys of these
blocks up to its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.attention import PAGE, Attention
from mlc_amd.schedules.operators.base import PAGES_SLOT, ROWS_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import Tensor, padded


@dataclass(frozen=True, kw_only=True)
class SelectKeys(Operator, name="select_keys", sizes="{0.heads}x{0.d}_{0.used}"):
    """The `used` blocks with the largest scores of those that a row sees, all if there are no more; of equal ones the
    first: (rows, pages, q float32 [m, heads * d, padded], [w float32 [m, heads, padded]], k float32 [m, d, padded],
    cache) -> (ids, cache), where the rows' k are written first. Blocks of 1 position have w, and the score

        sum over heads of w * max(q . k, 0)

    Larger ones have one set, and that score with w = 1 of the k of their last position; a row takes its own block
    besides if it does not see all of it, then among `used`. by_head: each head has a set, of which a block's score is
    the largest q . k of the positions that the row sees; the row's own block and `local` - 1 before it come first.

    cache: float16 [pages, PAGE, d]. ValueError unless 16 divides d and PAGE divides ctx.
    """

    heads: int
    d: int
    used: int
    ctx: int
    m: int
    block: int = 1
    by_head: bool = False
    local: int = 0

    reads_cache = True

    def __post_init__(self):
        if self.d % 16 or self.ctx % PAGE:
            raise ValueError(f"{self}: keys have a multiple of 16 columns, and a sequence whole pages")

    def slots(self) -> Iterator[Slot]:
        names = ("Q", "W", "K") if self.block == 1 else ("Q", "K")
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", names), Slot("cache", ("Ik",)))
        yield Slot("output", ("Ids",))

    @property
    def sets(self) -> int:
        return self.heads if self.by_head else 1

    @property
    def blocks(self) -> int:
        """Of a sequence."""
        return -(-self.ctx // self.block)

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Of its kernel's float32 parameters, by name; None: it has none."""
        m, w = self.m, (self.m, padded(self.heads)) if self.block == 1 else None
        return {"Q": (m, padded(self.heads * self.d)), "W": w, "K": (m, padded(self.d))}

    def cache_shape(self) -> tuple[int, ...]:
        return self.ctx // PAGE, PAGE, self.d

    def results(self) -> list[Tensor]:
        return [((self.m, self.sets * self.used), "int32")]

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
    """Attention to chosen keys: (rows, pages, rotated q, ids, cache, [sinks]) -> float32 [m, heads * value_d]. used,
    block, sets: as SelectKeys has them; of several sets each is that of as many KV heads. tail: a row has `used` blocks
    only where it does not see all of its own. ValueError for a quantized cache."""

    layer: Attention
    used: int
    m: int
    block: int = 1
    sets: int = 1
    tail: bool = False

    reads_cache = True

    def __post_init__(self):
        if self.layer.quantized or self.layer.kv_heads % self.sets:
            raise ValueError(f"{self}: chosen keys are of a cache of float16")

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Qo", "Ids")))
        yield Slot("cache", ("Kc",) if self.layer.values else ("Kc", "Vc"))
        yield from named("weight", Sinks=self.layer.sinks)
        yield Slot("output", ("Y",))

    def results(self) -> list[Tensor]:
        return [((self.m, self.layer.heads * self.layer.value_d), "float32")]

    @property
    def positions(self) -> int:
        return self.layer.ctx

    @property
    def most_keys(self) -> int:
        return self.used * self.block

    def operations(self) -> tuple[int, int]:
        return 0, 2 * self.layer.heads * (self.layer.d + self.layer.value_d)
