"""Python's garbage collector of cycles, which takes time where many objects are made and all of them live."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Within the block, or the function that it decorates, no garbage is looked for."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
