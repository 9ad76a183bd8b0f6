"""The names of the buffers between host and kernels (dist/README.md), and which of them differ from step to
step. Without other packages, for machines that only measure kernels."""

from collections.abc import Mapping

from mlc_amd.runtime.cache.pages import STATE

CELLS = "cells"  # the table of the cells of each slot, in io
_TABLES = "pages."  # prefix of the names of page tables in io, before the span of their layers
# io buffers that kernels write, in the order in which a function returns them; the host writes the others.
CHOSEN = ("sampled", "logprobs")
OUTPUTS = ("logits", *CHOSEN)
ENCODED = "encoded"  # what functions of an image encoder return
RESULTS = (*OUTPUTS, ENCODED)
# Inputs of an image encoder's functions, with a row for each patch: its pixels; what is added to the embeddings
# (learned positions, the class token); cosines and sines of rotary positions; the first row and the end of what it
# attends to, in layers without windows and with them; the rows that convolutions take for each group.
PATCHES = ("patches", "added", "turns", "segments", "windows", "neighbours")
# Kept tensors with a row for each row of a step, for functions that guess tokens: inputs of layers, by their numbers
# (of as many as there are layers: the output of the last one), and what the next guess takes of one.
HIDDEN, DRAFTED = "hidden.", "drafted"
_SELDOM = ("changes", "allowed")  # io buffers of sampling that most steps do not use
FEATURES = "features"  # of the rows of images, which most steps do not have
# io buffers that the host may write while the device computes what does not read them: see `launches_before_late`.
LATE = ("sampling", *_SELDOM)
SLOTS = 64  # rows of a page table: sequences of a step, at most
# Buffers with a row for each row of a step, or for each row of logits. A function uses the first ones, as many as it
# has rows or logits; of all other buffers kernels take the whole.
PACKED = ("segments", "pooled")  # of encoders of texts: first row and end of each row's text, of each answer's rows
PER_ROW = ("tokens", "rows", "sources", "places", FEATURES, *PATCHES, "pooled")
PER_ANSWER = ("logits", "sampling", "changes", "allowed", "sampled", "logprobs", ENCODED)

# What each step has of its own besides: a chunk that is computed beside the next one has them a second time.
OF_STEP = ("state", "answers", "tokens", "rows", "sources", "places")
BESIDE = "@"  # after the names of these, and of functions for such chunks


def page_table(span: int) -> str:
    """The io buffer of the page tables of layers of that span, or of the cells of those that keep a state."""
    return CELLS if span == STATE else f"{_TABLES}{span}"


def is_kept(name: str) -> bool:
    """Whether an input stays the same for many steps: devices copy it only after it was written."""
    return name.startswith(_TABLES) or name in (CELLS, FEATURES, *_SELDOM, *PATCHES)


def results_of(function: Mapping) -> set[str]:
    """The io buffers of RESULTS that a function of the manifest writes."""
    named = {where for launch in function["launches"] for kind, where, *_ in launch["args"] if kind == "io"}
    return named & set(RESULTS)


def launches_before_late(function: Mapping, launched: Mapping) -> int | None:
    """How many launches of a function come before the first that reads what may be LATE; None if none reads that.
    function: the manifest's entry; launched: the launches of each kernel."""
    count = 0
    for call in function["launches"]:
        if any(kind == "io" and where in LATE for kind, where, *_ in call["args"]):
            return count
        count += len(launched[call["kernel"]]["steps"])
    return None
