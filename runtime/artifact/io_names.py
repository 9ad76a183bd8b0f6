"""The names of the buffers between host and kernels (dist/README.md), and which of them change from step to step. This
module imports no other packages, as machines that only measure kernels have none."""

from collections.abc import Mapping

from mlc_amd.runtime.cache.pages import STATE

CELLS = "cells"  # the io buffer with the table of each slot's cells
_TABLES = "pages."  # prefix of the names of the io buffers with page tables; the span of their layers follows
# The io buffers that kernels write, in the order in which a function returns them. The host writes the others.
CHOSEN = ("sampled", "logprobs")
OUTPUTS = ("logits", *CHOSEN)
ENCODED = "encoded"  # result of the functions of an image encoder
RESULTS = (*OUTPUTS, ENCODED)
# Inputs of an image encoder's functions, with a row for each patch. patches: pixels. added: what is added to the
# embeddings (learned positions, the class token). turns: cosines and sines of rotary positions. segments, windows:
# first row and end of the rows that the patch attends to, in layers without windows and with them. neighbours: the rows
# that convolutions take for each group.
PATCHES = ("patches", "added", "turns", "segments", "windows", "neighbours")
# Tensors with a row for each row of a step, kept for functions that guess tokens. HIDDEN and a number i: the input of
# layer i (i = number of layers: the output of the last one). DRAFTED: what the next guess needs of a guess.
HIDDEN, DRAFTED = "hidden.", "drafted"
_SELDOM = ("changes", "allowed")  # io buffers of sampling that most steps do not use
FEATURES = "features"  # io buffer with the rows of images, which most steps do not have
# io buffers that the host may write late: while the device already computes what does not read them
# (`launches_before_late`).
LATE = ("sampling", *_SELDOM)
SLOTS = 64  # rows of a page table: largest number of sequences of a step
# encoders of texts: first row and end of the text of each row (segments), of the rows of each answer (pooled)
PACKED = ("segments", "pooled")
# Buffers with a row for each row of a step (PER_ROW), or for each row of logits (PER_ANSWER). A function uses the first
# rows, as many as it has rows or logits. Kernels take all other buffers whole.
PER_ROW = ("tokens", "rows", "sources", "places", FEATURES, *PATCHES, "pooled")
PER_ANSWER = ("logits", "sampling", "changes", "allowed", "sampled", "logprobs", ENCODED)

# Io buffers that belong to one step: where a chunk is computed beside the next one, each exists twice.
OF_STEP = ("state", "answers", "tokens", "rows", "sources", "places")
BESIDE = "@"  # suffix of the second copies of these buffers, and of the functions for such chunks


def page_table(span: int) -> str:
    """The name of the io buffer with the page tables of layers of a span, or with the cells of states (STATE)."""
    return CELLS if span == STATE else f"{_TABLES}{span}"


def is_kept(name: str) -> bool:
    """Whether an io buffer usually stays the same for many steps. Devices copy it only after the host wrote it."""
    return name.startswith(_TABLES) or name in (CELLS, FEATURES, *_SELDOM, *PATCHES)


def results_of(function: Mapping) -> set[str]:
    """The io buffers of RESULTS that a function writes. function: its entry in the manifest."""
    named = {where for launch in function["launches"] for kind, where, *_ in launch["args"] if kind == "io"}
    return named & set(RESULTS)


def launches_before_late(function: Mapping, launched: Mapping) -> int | None:
    """How many launches of a function come before the first that reads a buffer of LATE; None if none reads one.
    function: the manifest's entry. launched: the launches of each kernel."""
    count = 0
    for call in function["launches"]:
        if any(kind == "io" and where in LATE for kind, where, *_ in call["args"]):
            return count
        count += len(launched[call["kernel"]]["steps"])
    return None
