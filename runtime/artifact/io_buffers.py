"""The dtypes and shapes of the buffers between host and kernels (dist/README.md). They follow from the functions, the
vocabulary and the context. An artifact with other buffers is rejected."""

from collections.abc import Iterable

from mlc_amd.runtime.artifact.io_names import ENCODED, FEATURES, PACKED, SLOTS, page_table
from mlc_amd.runtime.artifact.manifest import Buffer, ManifestImages, Vision
from mlc_amd.runtime.cache.pages import CELL_COLUMNS, STATE
from mlc_amd.runtime.sampling.layout import row_shapes


def io_buffers(
    rows: int,
    logits: int,
    sampled: int,
    columns: int,
    blocks: int,
    spans: Iterable[int],
    drafts: bool,
    vision: Vision | None,
    images: ManifestImages | None,
) -> dict[str, Buffer]:
    """The buffers by name.

    rows, logits: the largest rows and rows of logits of any function. sampled: the largest number of rows of logits of
    functions that sample; 0 for encoders of texts. columns: of logits. blocks: pages of a sequence of full length.
    spans: the spans of the cached layers; STATE for layers that keep states. drafts: whether there are functions that
    guess tokens. vision, images: entries of the manifest; None without an image encoder.
    """
    shapes: dict[str, tuple[int, ...]] = {
        "state": (4,),
        "answers": (4,),
        "tokens": (rows,),
        "rows": (rows, 2),
        **({"sources": (rows,)} if drafts else {}),
        **({FEATURES: (rows, images["columns"])} if images else {}),
        **({"places": (rows, 3)} if images and images["positions"] == "grid" else {}),
        **{page_table(span): (SLOTS, CELL_COLUMNS if span == STATE else blocks) for span in sorted(spans)},
        "logits": (logits, columns),
    }
    if sampled:
        shapes |= {**row_shapes(sampled, columns), "sampled": (sampled,), "logprobs": (sampled,)}
    else:
        shapes |= dict.fromkeys(PACKED, (rows, 2))
    if vision:
        rows, each = max(vision["buckets"].values()), vision["merge"] ** 2
        for name, columns in vision["io"].items():
            shapes[name] = (rows // each if name == ENCODED else rows, columns)
    types: dict[str, str] = dict.fromkeys(("logits", "logprobs", "patches", "added", "turns"), "float32")
    if images:
        types |= {FEATURES: images["features"], ENCODED: images["features"]}
    return {name: {"dtype": types.get(name, "int32"), "shape": [*of]} for name, of in shapes.items()}
