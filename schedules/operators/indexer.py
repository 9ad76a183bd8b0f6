"""The operators of sparse attention. An indexer with small keys of its own chooses, for each row, the blocks of `block`
consecutive positions whose keys the row attends to.

Rows, positions and pages are those of attention.py. The choice is Ids int32 [m, sets * used]: for each row and set the
numbers of the chosen blocks, ascending, then -1. A block of 1 has its position as number. A row attends to the keys of
these blocks up to its own position.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators.attention import PAGE, Attention
from mlc_amd.schedules.operators.base import PAGES_SLOT, ROWS_SLOT, STATE_SLOT, Operator, Slot, named
from mlc_amd.schedules.operators.layouts import Tensor, padded


@dataclass(frozen=True, kw_only=True)
class SelectKeys(Operator, name="select_keys", sizes="{0.heads}x{0.d}_{0.used}"):
    """Writes the indexer's keys to its cache, then chooses for each row the `used` blocks with the largest scores, or
    all blocks if there are no more; of equal scores, the first block: (rows, pages, q float32 [m, heads * d, padded],
    [w float32 [m, heads, padded]], k float32 [m, d, padded], cache float16 [pages, PAGE, d]) -> (ids, cache).

    There are three kinds of scores:

    - block = 1: the score of a position is the sum over heads of w * max(q . k, 0). There is one set.
    - block > 1: the score of a block is the same sum with w = 1, for the k of the block's last position. There is one
      set. If a row's own block ends after the row, it has no score but is always chosen, as one of the `used` blocks;
      otherwise at most `used` - 1 blocks are chosen.
    - by_head: each head has its own set. The score of a block is the largest q . k of its positions up to the row's.
      The row's own block, and the `local` - 1 blocks before it, are always chosen.

    Raises ValueError unless d is a multiple of 16 and ctx a multiple of PAGE.
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
            raise ValueError(f"{self}: d must be a multiple of 16, and ctx a multiple of {PAGE}")

    def slots(self) -> Iterator[Slot]:
        names = ("Q", "W", "K") if self.block == 1 else ("Q", "K")
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", names), Slot("cache", ("Ik",)))
        yield Slot("output", ("Ids",))

    @property
    def sets(self) -> int:
        """The number of sets of blocks that a row chooses."""
        return self.heads if self.by_head else 1

    @property
    def blocks(self) -> int:
        """The largest number of blocks in a sequence."""
        return -(-self.ctx // self.block)

    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """The shapes of its kernel's float32 inputs, by name; None: the kernel has no such input."""
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
    """Attention to the keys of chosen blocks: (rows, pages, rotated q, ids, cache, [sinks]) -> float32 [m, heads *
    value_d]. used, block, sets: see SelectKeys; sets divides the KV heads, and consecutive KV heads share a set. tail:
    a row has `used` blocks only if its own block ends after it, and otherwise at most `used` - 1. Raises ValueError for
    a quantized cache, or if sets does not divide the KV heads."""

    layer: Attention
    used: int
    m: int
    block: int = 1
    sets: int = 1
    tail: bool = False

    reads_cache = True

    def __post_init__(self):
        if self.layer.quantized or self.layer.kv_heads % self.sets:
            raise ValueError(f"{self}: the cache must be float16, and kv_heads a multiple of sets")

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
    """Attention to the keys of a window, and to compressed keys, each of which stands for a block of `ratio` positions:
    (rows, pages, q float32 [m, heads, d], already multiplied by `query_scale`, k float32 [m, d, padded], [c, compressed
    keys in the shape of k, [ids int32 [m, used]]], sinks, cache, [cache of compressed keys]) -> (float32 [m, heads *
    d], caches). All heads share the keys, and a key is also its value.

    First the rows' k are written to the cache, and the rows' c at the last positions of blocks. A row attends to the
    keys in the layer's window, and to the compressed keys of blocks that end at or before its position. used > 0: of
    these only to blocks whose last position is in the row's ids; other ids are ignored. ratio = 0: there are no
    compressed keys.

    cache: float16 [pages, PAGE, d]. cache of compressed keys: float16 [pages, max(PAGE // ratio, 1), d]. Raises
    ValueError for a layer without window, sinks or values, for a quantized cache, and unless d is a multiple of 16.
    """

    layer: Attention
    ratio: int
    used: int
    m: int

    reads_cache = True

    def __post_init__(self):
        of = self.layer
        if not (of.window and of.sinks) or of.values != of.d or of.d % 16 or of.quantized:
            raise ValueError(f"{self}: needs a window, sinks, values = d, d a multiple of 16, and a float16 cache")

    def slots(self) -> Iterator[Slot]:
        yield from (STATE_SLOT, ROWS_SLOT, PAGES_SLOT, Slot("input", ("Q", "K")))
        yield from named("input", C=self.ratio > 0, Ids=self.used > 0)
        yield from (Slot("weight", ("Sinks",)), Slot("cache", ("Kc", "Cc")), Slot("output", ("Y",)))

    @property
    def inputs(self) -> dict[str, tuple[int, ...] | None]:
        """The shapes of its kernel's float32 inputs, by name; None: the kernel has no such input."""
        of, key = self.layer, (self.m, padded(self.layer.d))
        return {"Q": (self.m, of.heads, of.d), "K": key, "C": key if self.ratio else None}

    @property
    def caches(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the caches, by the prefix of their names."""
        of = self.layer
        blocks = {"ck": (of.blocks, max(PAGE // self.ratio, 1), of.d)} if self.ratio else {}
        return {"wk": (of.blocks, PAGE, of.d)} | blocks

    @property
    def blocks(self) -> int:
        """The largest number of compressed keys that a row attends to."""
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
