"""The buffers between host and kernels: how large they are follows from the functions, the vocabulary and the context.

The compiler writes them into the manifest, and an artifact whose buffers are others is refused. dist/README.md says
what they hold.
"""

from collections.abc import Iterable

from mlc_amd.runtime.artifact.manifest import Buffer
from mlc_amd.runtime.cache.pages import CELL_COLUMNS, STATE
from mlc_amd.runtime.engine.steps import page_table
from mlc_amd.runtime.sampling.layout import row_shapes

SLOTS = 64  # rows of a page table: sequences of a step, at most
# Buffers with a row for each row of a step, or for each row of logits. A function uses the first ones, as many as it
# has rows or logits; of all other buffers kernels take the whole.
PER_ROW = ("tokens", "rows", "sources")
PER_ANSWER = ("logits", "sampling", "changes", "allowed", "sampled", "logprobs")


def io_buffers(
    rows: int, logits: int, sampled: int, columns: int, blocks: int, spans: Iterable[int], drafts: bool
) -> dict[str, Buffer]:
    """rows, logits: of a function, at most; sampled: rows of logits of a function that samples, at most; columns: of
    logits; blocks: pages of a sequence of full length; spans: of the cached layers, STATE of those that keep states;
    drafts: whether there are functions that guess tokens."""
    shapes: dict[str, tuple[int, ...]] = {
        "state": (4,),
        "answers": (4,),
        "tokens": (rows,),
        "rows": (rows, 2),
        **({"sources": (rows,)} if drafts else {}),
        **{page_table(span): (SLOTS, CELL_COLUMNS if span == STATE else blocks) for span in sorted(spans)},
        "logits": (logits, columns),
        **row_shapes(sampled, columns),
        "sampled": (sampled,),
        "logprobs": (sampled,),
    }
    return {
        name: {"dtype": "float32" if name in ("logits", "logprobs") else "int32", "shape": list(shape)}
        for name, shape in shapes.items()
    }
