"""The tensors that persist between steps, with as many pages as an engine wants: shapes and bytes. Those with a "span"
in the manifest are caches, whose first dimension is the page."""

from collections.abc import Mapping
from math import prod

import numpy as np

KvTypes = dict[str, tuple[tuple[int, ...], str]]


def kv_types(manifest: Mapping, pages: Mapping[int, int] | None = None) -> KvTypes:
    """pages: their number, by span; None: as many as one sequence of full length takes."""
    found = {}
    for entry in manifest["kv"]:
        shape = tuple(entry["shape"])
        if pages is not None and "span" in entry:
            shape = (pages[entry["span"]], *shape[1:])
        found[entry["name"]] = shape, entry["dtype"]
    return found


def kv_bytes(types: KvTypes) -> int:
    return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in types.values())


def page_parts(manifest: Mapping, span: int) -> list[tuple[str, int]]:
    """The caches of a span, in the manifest's order, and how many bytes a page has in each of them."""
    entries = [entry for entry in manifest["kv"] if entry.get("span") == span]
    return [(entry["name"], prod(entry["shape"][1:]) * np.dtype(entry["dtype"]).itemsize) for entry in entries]
