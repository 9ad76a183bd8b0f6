"""What the operators of a mixture of experts compute, and the order in which rows reach their experts.

A router gives each live row `used` of `count` experts: a pair (row, j) is number row * used + j. An expert's weights
are n rows of a stack of matrices: row e * n + i of a packed matrix of count * n rows.

Few rows (tiles of one slot): the number of a pair is that of its slot, and the kernels take the expert of each slot
from `Ids` [m, used].

Many rows: pairs are sorted by expert, and each expert's pairs padded to whole tiles of `tile` slots, so that a tile
needs one expert. `expert_order` makes

    Slots   int32 [m, used]             slot of each pair
    Pairs   int32 [slots]               pair in each slot; -1: padding
    Groups  int32 [tiles + 2 count + 1] expert of each tile (-1: unused, behind the others), the first tile of each
                                        expert, the number of used tiles, the number of pairs of each expert

All sizes are static: `tiles` is the maximum for any assignment of m rows.
"""

from dataclasses import dataclass

GATINGS = (
    "softmax",  # probabilities over all experts
    "sigmoid",  # of each logit
    "softmax_used",  # the logits choose, softmax over the chosen ones
)
MIN_SUM = 6.103515625e-5  # lower bound of the sum that weights are divided by: llama.cpp (float16's smallest normal)


@dataclass(frozen=True)
class Experts:
    """count: experts of a layer; used: of them by a row; tile: slots of a tile; 1: pairs are not sorted."""

    count: int
    used: int
    tile: int = 1

    def tiles(self, m: int) -> int:
        """Tiles of m rows at most: each of up to min(count, pairs) experts has one tile that is not full."""
        pairs = m * self.used
        return min(pairs, (pairs + min(self.count, pairs) * (self.tile - 1)) // self.tile)

    def slots(self, m: int) -> int:
        return self.tiles(m) * self.tile

    def groups(self, m: int) -> int:
        """Entries of `Groups`."""
        return self.tiles(m) + 2 * self.count + 1
