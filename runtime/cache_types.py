"""The tensors that live from step to step, with the pages that an engine gives them: shapes and bytes.

In: a manifest, whose `kv` has every tensor as for one sequence of full length; those with a "span" are caches, whose
first dimension is the page. Out: name to (shape, dtype).
"""

from collections.abc import Mapping
from math import prod

import numpy as np

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.pages import PAGE

KvTypes = dict[str, tuple[tuple[int, ...], str]]


def kv_types(manifest: Mapping, pages: Mapping[int, int] | None = None) -> KvTypes:
    """pages: how many there are, by span; None: as many as one sequence of full length takes."""
    found = {}
    for entry in manifest["kv"]:
        shape = tuple(entry["shape"])
        if pages is not None and "span" in entry:
            shape = (pages[entry["span"]], *shape[1:])
        found[entry["name"]] = shape, entry["dtype"]
    return found


def pool_pages(manifest: Mapping, tokens: int | None) -> dict[int, int] | None:
    """Pages by span for a cache of so many tokens, of all sequences together; None: the manifest's. Layers with a
    window get what four sequences for each context's worth of tokens need, at most as much as layers that see all keys.
    UserError for less than a page."""
    if tokens is None:
        return None
    if tokens < PAGE:
        raise UserError(f"a cache of {tokens} tokens is too small: it needs at least {PAGE}")
    whole, sequences = -(-tokens // PAGE), -(-4 * tokens // manifest["context"])
    found = {entry["span"]: entry["shape"][0] for entry in manifest["kv"] if "span" in entry}
    return {span: min(whole, pages * sequences) if span else whole for span, pages in found.items()}


def kv_bytes(types: KvTypes) -> int:
    return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in types.values())
