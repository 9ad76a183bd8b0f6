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


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(Operator, name="compressed_attention", sizes="{0.layer.heads}x{0.layer.d}_{0.ratio}"):
    """Attention to the last keys, and to those that stand for `ratio` positions each: (rows, pages, q float32 [m,
    heads, d], times `query_scale`, k float32 [m, d, padded], [c as k, [ids int32 [m, used]]], sinks, cache, [cache of
    blocks]) -> (float32 [m, heads * d], caches). Keys are the values, too, of all heads.

    The rows' k are written first, and c of those at whose positions blocks end. A row sees the layer's window, and the
    blocks that end at or before it; with `used` those of them that end at its ids, of which others do not count. ratio
    0: there are no blocks. Caches: float16 [pages, PAGE, d] and, of blocks, [pages, PAGE / ratio, at least 1, d].
    ValueError for a layer without window, sinks or values, and unless 16 divides d.
    """

    layer: Attention
    ratio: int
    used: int
    m: int

    reads_cache = True

    def __post_init__(self):
        of = self.layer
        if not (of.window and of.sinks) or of.values != of.d or of.d % 16 or of.quantized:
            raise ValueError(f"{self} is no attention to compressed keys")

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Q", "K")))
        yield from named("input", C=self.ratio > 0, Ids=self.used > 0)
        yield from (Slot("weight", ("Sinks",)), Slot("cache", ("Kc", "Cc")), Slot("output", ("Y",)))

    @property
    def inputs(self) -> dict[str, tuple[int, ...] | None]:
        """Shapes of its kernel's float32 inputs, by name; None: it has none."""
        of, key = self.layer, (self.m, padded(self.layer.d))
        return {"Q": (self.m, of.heads, of.d), "K": key, "C": key if self.ratio else None}

    @property
    def caches(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the caches, by the beginnings of their names."""
        of = self.layer
        blocks = {"ck": (of.blocks, max(PAGE // self.ratio, 1), of.d)} if self.ratio else {}
        return {"wk": (of.blocks, PAGE, of.d)} | blocks

    @property
    def blocks(self) -> int:
        """That a row sees at most."""
        return self.used or (self.layer.ctx // self.ratio if self.ratio else 0)

    def results(self) -> list[Tensor]:
        return [((self.m, self.layer.heads * self.layer.d), "float32")]

    @property
    def written(self) -> int:
        return len(self.caches)

    @property
    def positions(self) -> int:
        return self.layer.ctx

    @property
    def most_keys(self) -> int:
        return self.layer.window + self.blocks

    def operations(self) -> tuple[int, int]:
        return 0, 4 * self.layer.heads * self.layer.d
