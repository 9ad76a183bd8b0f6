"""Writes a step's rows to a device's io buffers (dist/README.md). First come single rows, each the newest token of a
different sequence, then a chunk: consecutive tokens of one more sequence. A sequence's slot is its row in the page
tables. Models whose images have positions in a grid also have a place for each row."""

from collections.abc import Mapping, Sequence

import numpy as np

from mlc_amd.runtime.artifact.io_names import CELLS, page_table
from mlc_amd.runtime.cache.pages import CELL_COLUMNS, STATE
from mlc_amd.runtime.cache.sequence import ChunkRows, SingleRow


def write_step(
    device, function: Mapping, singles: Sequence[SingleRow] | np.ndarray = (), chunk: ChunkRows | None = None
) -> int:
    """Writes all io buffers of a step but the page tables. function: its entry in the manifest. singles: int32 rows of
    `SingleRow`'s fields.

    Returns the number of rows of logits that the function computes: one for each single row, in their order, then one
    for the chunk's last token, or one for each of its tokens where the function computes the logits of all rows
    (`answer_rows`). Raises ValueError for no rows, and for more than the function takes."""
    ids, position, slot, places, _, together = chunk or ChunkRows((), 0, 0)
    single = len(singles)
    live = single + len(ids)
    if not 0 < live <= function["rows"] or single > function["single"]:
        raise ValueError(
            f"{single} single rows and a chunk of {len(ids)} are no step of a function of {function['rows']} rows, "
            f"{function['single']} of them single"
        )
    tokens, rows, table = np.empty(live, np.int32), np.empty((live, 2), np.int32), np.asarray(singles, np.int32)
    if single:
        tokens[:single], rows[:single] = table[:, 0], table[:, 1:3]
    tokens[single:] = ids
    rows[single:, 0] = np.arange(position, position + live - single)
    rows[single:, 1] = slot
    answers = answer_rows(function, single, live)
    device.write("state", (single, live, together, 0))
    device.write("answers", (answers, answers, 0, 0))
    device.write("tokens", tokens)
    device.write("rows", rows)
    if places is not None or (single and table.shape[1] > 3):
        of_singles = np.repeat(table[:, 3:], 3, 1) if single else np.empty((0, 3), np.int32)
        device.write("places", of_singles if places is None else np.concatenate([of_singles, places]))
    return answers


def answer_rows(function: Mapping, single: int, live: int) -> int:
    """The number of rows of logits that a function computes. single: number of single rows; live: of all rows."""
    if function["logits"] == function["rows"]:
        return live
    return 1 if function["logits"] == 1 else single + (live > single)


def pages_of(device, manifest: Mapping) -> dict[int, int]:
    """{span: number of the device's pages for layers of that span}; the pages of span STATE are cells."""
    return {entry["span"]: device.kv_types[entry["name"]][0][0] for entry in manifest["kv"] if "span" in entry}


def write_private_pages(device, manifest: Mapping, short: int = 0) -> None:
    """Writes page tables for a device that is used without an engine. Each of the first `short` slots has one page; all
    later slots share the remaining pages. A sequence that needs more pages than its slot has uses them again from the
    first one. Each slot has a cell of its own, as long as there are cells. Raises ValueError for too few pages."""
    for span, pages in pages_of(device, manifest).items():
        if span == STATE:
            slots = manifest["io"][CELLS]["shape"][0]
            device.write(CELLS, np.repeat(np.arange(slots, dtype=np.int32)[:, None] % pages, CELL_COLUMNS, 1))
            continue
        if pages <= short:
            raise ValueError(f"{pages} pages do not suffice for {short} slots and one more")
        name = page_table(span)
        slots, blocks = manifest["io"][name]["shape"]
        slot, block = np.arange(slots)[:, None], np.arange(blocks)
        device.write(name, np.where(slot < short, slot, short + block % (pages - short)).astype(np.int32))
