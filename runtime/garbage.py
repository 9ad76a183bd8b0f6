"""Pauses Python's collector of cyclic garbage. It takes time while many objects are made that all stay alive."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pauses the collector within the block, or within the function that this decorates."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
