"""The configuration of a layer with attention to compressed keys: formula, tensors, states and caches."""

from collections.abc import Iterator
from dataclasses import dataclass

from mlc_amd.schedules.operators import CompressedAttention, SelectKeys
from mlc_amd.schedules.operators.attention import PAGE, Attention

Shape = tuple[int, ...]
OVERLAPPING = 4  # the ratio whose blocks overlap, and have an indexer
SIZE = 16  # numbers in a column's state; only one is used, but kernels need 16
STEP = 32  # columns of a head of these states


@dataclass(frozen=True)
class CompressedConfig:
    """Attention to the last `window` keys, and to compressed keys, each of which stands for a block of `ratio`
    positions (DeepSeek V4).

        k = rope(norm(attn_kv h)), the key and the value of all heads
        q = rope(norm(attn_q_b norm(attn_q_a h))), where the outer norm is over each head, without weights
        result = attn_output_b attn_output_a (rope back(attention)); attn_output_a has a matrix for each group of heads

    The key of a block is rope(norm(sum over its positions i of w_i * (attn_compressor_kv h)_i)), rotated by its first
    position. w_i is, for each column, the softmax over i of (attn_compressor_gate h)_i + ape_i; ape_i is a row of a
    table, by the place of i in the block. Blocks of OVERLAPPING positions have twice the columns: the first half
    belongs to the positions of the block before, which are in the same softmax.

    Such blocks have an indexer with its own block keys, computed in the same way (indexer_compressor). If there are
    more than `used` blocks, a row attends to the `used` blocks with the largest sum over index heads of w * max(q . k,
    0), where q = rope(indexer.attn_q_b norm(attn_q_a h)) and w = indexer.proj h / sqrt(index heads * columns).

    A row attends to blocks that end at or before it. The last columns of a head rotate.
    """

    heads: int
    head_dim: int
    window: int
    query_rank: int
    groups: int  # number of groups of heads
    rank: int  # columns of a group between attn_output_a and attn_output_b
    ratio: int  # positions of a block; 0: no blocks
    index_heads: int = 0
    index_dim: int = 0
    used: int = 0

    @property
    def overlapping(self) -> bool:
        return self.ratio == OVERLAPPING

    def columns(self, dim: int) -> int:
        """The columns of the compressor of keys with `dim` columns."""
        return dim * (2 if self.overlapping else 1)

    def sums(self, dim: int) -> int:
        """The columns of its running sums: of blocks with even numbers, of odd ones, and of all blocks."""
        return 2 * dim * (3 if self.overlapping else 1)

    def compressors(self) -> Iterator[tuple[str, int]]:
        """(beginning of its tensors' names, columns of its keys) of each compressor."""
        if self.ratio:
            yield "attn_compressor", self.head_dim
        if self.overlapping:
            yield "indexer_compressor", self.index_dim

    def states(self, hidden: int) -> dict[str, Shape]:
        return {name: (self.sums(dim) // STEP, STEP * SIZE) for name, dim in self.compressors()}

    def width(self, hidden: int) -> int:
        return 3 * self.heads * self.head_dim + sum(4 * self.sums(dim) for _, dim in self.compressors())

    def tensors(self, hidden: int) -> Iterator[tuple[bool, str, Shape]]:
        """(True, name within the layer, shape)."""
        dim, rows = self.head_dim, self.heads * self.head_dim
        yield True, "attn_q_a.weight", (self.query_rank, hidden)
        yield True, "attn_q_a_norm.weight", (self.query_rank,)
        yield True, "attn_q_b.weight", (rows, self.query_rank)
        yield True, "attn_kv.weight", (dim, hidden)
        yield True, "attn_kv_a_norm.weight", (dim,)
        yield True, "attn_sinks.weight", (self.heads,)
        yield True, "attn_output_a.weight", (self.groups, self.rank, rows // self.groups)
        yield True, "attn_output_b.weight", (hidden, self.groups * self.rank)
        for name, size in self.compressors():
            for which in ("kv", "gate"):
                yield True, f"{name}_{which}.weight", (self.columns(size), hidden)
            yield True, f"{name}_ape.weight", (self.ratio, self.columns(size))
            yield True, f"{name}_norm.weight", (size,)
        if self.overlapping:
            yield True, "indexer.proj.weight", (self.index_heads, hidden)
            yield True, "indexer.attn_q_b.weight", (self.index_heads * self.index_dim, self.query_rank)

    def chooses(self, ctx: int) -> bool:
        """Whether rows attend to some blocks only, in sequences of up to ctx tokens."""
        return self.overlapping and ctx // self.ratio > self.used

    def operator(self, ctx: int, m: int) -> CompressedAttention:
        layer = Attention(self.heads, 1, self.head_dim, ctx, window=self.window, sinks=True, values=self.head_dim)
        return CompressedAttention(layer=layer, ratio=self.ratio, used=self.used if self.chooses(ctx) else 0, m=m)

    def chooser(self, ctx: int, m: int) -> SelectKeys:
        """The operator that chooses blocks, as the positions at which they end. It has one more head, and further
        columns, which exclude all other positions."""
        return SelectKeys(heads=self.index_heads + 1, d=self.index_dim + SIZE, used=self.used, ctx=ctx, m=m)

    def caches(self, ctx: int) -> dict[str, Shape]:
        """{beginning of the name: shape} of the float16 caches."""
        found = self.operator(ctx, 1).caches
        return found | ({"ik": (ctx // PAGE, PAGE, self.index_dim + SIZE)} if self.chooses(ctx) else {})
