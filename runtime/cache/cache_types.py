"""Shapes and bytes of the tensors that persist between steps, for any number of pages. Tensors with a "span" in the
manifest are caches: their first dimension is the page."""

from collections.abc import Mapping
from math import prod

import numpy as np

KvTypes = dict[str, tuple[tuple[int, ...], str]]


def kv_types(manifest: Mapping, pages: Mapping[int, int] | None = None) -> KvTypes:
    """The shape and dtype of each tensor. pages: by span; None: as many as one sequence of full length needs."""
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
    """(name, bytes of a page) of each cache of a span, in the manifest's order."""
    entries = [entry for entry in manifest["kv"] if entry.get("span") == span]
    return [(entry["name"], prod(entry["shape"][1:]) * np.dtype(entry["dtype"]).itemsize) for entry in entries]
