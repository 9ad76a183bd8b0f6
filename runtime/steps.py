"""A step's rows, written to a device's io buffers (dist/README.md: `state`, `answers`, `tokens`, `rows`, `pages`).

A step has single rows, each the newest token of a sequence of its own, and behind them a chunk: consecutive tokens of
one more sequence. A sequence is known by its slot, the row of the page tables that says where its keys are.
"""

from collections.abc import Mapping, Sequence

import numpy as np

Single = tuple[int, int, int]  # token, position, slot
Chunk = tuple[Sequence[int] | np.ndarray, int, int]  # tokens, position of the first, slot
TABLES = "pages."  # prefix of the names of page tables in io, before the span of their layers


def write_step(
    device, function: Mapping, singles: Sequence[Single] | np.ndarray = (), chunk: Chunk | None = None
) -> int:
    """Writes everything but the page tables. function: the manifest's entry. Returns how many rows of logits the step
    gives: of its single rows in their order, then of the chunk's last token, or of all its tokens where the function
    gives all rows' (`answer_rows`).

    ValueError for more rows than the function takes, and for none.
    """
    ids, position, slot = ((), 0, 0) if chunk is None else chunk
    single = len(singles)
    live = single + len(ids)
    if not 0 < live <= function["rows"] or single > function["single"]:
        raise ValueError(
            f"{single} single rows and a chunk of {len(ids)} are no step of a function of {function['rows']} rows, "
            f"{function['single']} of them single"
        )
    tokens, rows = np.empty(live, np.int32), np.empty((live, 2), np.int32)
    if single:
        table = np.asarray(singles, np.int32)
        tokens[:single], rows[:single] = table[:, 0], table[:, 1:]
    tokens[single:] = ids
    rows[single:, 0] = np.arange(position, position + live - single)
    rows[single:, 1] = slot
    answers = answer_rows(function, single, live)
    device.write("state", (single, live, 0, 0))
    device.write("answers", (answers, answers, 0, 0))
    device.write("tokens", tokens)
    device.write("rows", rows)
    return answers


def answer_rows(function: Mapping, single: int, live: int) -> int:
    """Rows of logits that a step with so many single rows and live rows gives."""
    if function["logits"] == function["rows"]:
        return live
    return 1 if function["logits"] == 1 else single + (live > single)


def write_private_pages(device, manifest: Mapping, slots: int = 1) -> None:
    """Page tables for a device that is used without an engine: the pages of each span are divided among the first
    `slots` slots, which have them in order. A sequence that is longer than its share begins with it again, which layers
    with a window bear if the share holds the window and a step's rows."""
    counts = {entry["span"]: device.kv_types[entry["name"]][0][0] for entry in manifest["kv"] if "span" in entry}
    for span, pages in counts.items():
        name = f"{TABLES}{span}"
        all_slots, blocks = manifest["io"][name]["shape"]
        share = pages // slots
        slot = np.minimum(np.arange(all_slots), slots - 1)[:, None]
        device.write(name, (slot * share + np.arange(blocks) % share).astype(np.int32))
