"""Computes the number of pages of the KV cache by span: for a number of tokens or bytes, or a device's free memory."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from mlc_amd.runtime.cache.cache_types import kv_bytes, kv_types
from mlc_amd.runtime.cache.pages import PAGE, STATE
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.quantities import BYTES, number

ELEMENTS = (1 << 31) - 1  # largest number of elements of a tensor: kernels compute indices in it with int32
# largest number of cells for states; more than a step has sequences: the other cells are for snapshots
MOST_CELLS = 128

log = logging.getLogger("mlc_amd")


@dataclass(frozen=True)
class KvSize:
    """The size of the KV cache. tokens: of all sequences together. memory: bytes. auto: the free memory of the device,
    but at most what the sequences of a step need at full length. If none of these is given: one sequence of full
    length. sequences: the expected number of sequences, 0 if unknown."""

    tokens: int | None = None
    memory: int | None = None
    auto: bool = False
    sequences: int = 0

    @classmethod
    def of(cls, tokens: int | None = None, memory: int | str | None = None) -> "KvSize":
        """memory: bytes, or a text such as "4G" or "auto". Raises UsageError for invalid values."""
        if tokens is not None and memory is not None:
            raise UsageError("--kv-memory and --kv-tokens both say how large the KV cache is: give one of them")
        if tokens is not None and tokens < PAGE:
            raise UsageError(f"a cache of {tokens} tokens is too small: it needs at least {PAGE}")
        if isinstance(memory, str) and memory.strip().lower() == "auto":
            return cls(auto=True)
        if isinstance(memory, str):
            memory = int(number(memory, "--kv-memory", BYTES, "4G, or auto"))
        return cls(tokens, memory)

    def pages(self, manifest: Mapping, room: int = 0, largest: int | None = None) -> dict[int, int]:
        """The number of pages by span. room: for `auto`, bytes of the device that are free for the cache. largest: the
        largest size of a tensor in bytes, None without a limit. Logs a warning if this limit or int32 indices make the
        cache smaller. Raises UserError if there is no room for a page."""
        whole = {entry["span"]: entry["shape"][0] for entry in manifest["kv"] if "span" in entry}
        limits, why = _limits(manifest, largest)
        paged = whole.keys() - {STATE}
        most = PAGE * min((limits[span] for span in paged if not span or 0 not in paged), default=0)
        if STATE in whole and not paged:  # a sequence takes one cell, whatever its length is
            most, why = manifest["context"] * min(limits[STATE], MOST_CELLS), "no step has more sequences"
        if not whole or (self == KvSize() and all(limits[span] >= pages for span, pages in whole.items())):
            return whole
        if self.auto or self.memory is not None:
            useful = manifest["context"] * max(entry["single"] for entry in manifest["functions"].values())
            bound = min(most, useful) if self.auto else most + PAGE
            tokens = _tokens(manifest, limits, room if self.auto else self.memory or 0, bound, self.sequences)
        else:
            tokens = manifest["context"] if self.tokens is None else self.tokens
        if tokens > most:
            log.warning("the KV cache holds %d tokens and no more: %s", most, why)
            tokens = most
        if tokens < PAGE:
            least = kv_bytes(kv_types(manifest, _spread(manifest, limits, PAGE)))
            place = "what the device has left" if self.auto else "--kv-memory"
            raise UserError(f"{place} is too small for a KV cache of {PAGE} tokens, which takes {_size(least)}")
        return _spread(manifest, limits, tokens, self.sequences)


ONE_SEQUENCE = KvSize()


def _limits(manifest: Mapping, largest: int | None) -> tuple[dict[int, int], str]:
    """The largest number of pages by span, and the reason for the limit."""
    found: dict[int, int] = {}
    why = "kernels cannot address more than 2^31 elements of a tensor"
    for entry in manifest["kv"]:
        if "span" in entry:
            page = prod(entry["shape"][1:])
            pages = ELEMENTS // page
            if largest is not None and (fitting := largest // (page * np.dtype(entry["dtype"]).itemsize)) < pages:
                pages, why = fitting, f"this driver allows {_size(largest)} for one tensor"
            found[entry["span"]] = min(pages, found.get(entry["span"], pages))
    return found, why


def _spread(manifest: Mapping, limits: Mapping[int, int], tokens: int, sequences: int = 0) -> dict[int, int]:
    """The number of pages by span for a cache of `tokens` tokens. Layers with a window need the pages of a window for
    each sequence, but at most as many as layers that attend to all keys. There are as many cells as in the manifest for
    each sequence, up to MOST_CELLS. If the number of sequences is unknown, it is estimated from the number of full
    contexts: one sequence for each, but four for layers with a window."""
    whole, full = -(-tokens // PAGE), -(-tokens // manifest["context"])
    windows, states = sequences or -(-4 * tokens // manifest["context"]), sequences or full
    found = {entry["span"]: entry["shape"][0] for entry in manifest["kv"] if "span" in entry}
    pages = {span: min(whole, pages * windows) if span else whole for span, pages in found.items()}
    if STATE in found:
        pages[STATE] = max(found[STATE], min(found[STATE] * states, MOST_CELLS))
    return {span: min(count, limits[span]) for span, count in pages.items()}


def _tokens(manifest: Mapping, limits: Mapping[int, int], nbytes: int, most: int, sequences: int) -> int:
    """The largest number of tokens, up to `most`, whose cache fits `nbytes` bytes."""
    low, high = 0, most // PAGE
    while low < high:
        middle = (low + high + 1) // 2
        fits = kv_bytes(kv_types(manifest, _spread(manifest, limits, middle * PAGE, sequences))) <= nbytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * PAGE


def _size(count: int) -> str:
    unit, name = (1 << 20, "MiB") if count >= 1 << 20 else (1 << 10, "KiB")
    return f"{-(-count // unit)} {name}"
