"""A cache of object code of the kernels that this process has compiled. Compiling another model with the same kernels,
or the same model again, then takes LLVM no time.

In: a kernel: its name, its structure (not the names of its variables) and its target. Out: the bytes of its object
file. Above a limit of bytes, the least recently used entries are removed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import tirx

LIMIT = 64 << 20  # bytes: about two thousand kernels

Key = tuple[str, int, str]


class ObjectCache:
    """The cache. Safe to use from several threads. limit: bytes."""

    def __init__(self, limit: int = LIMIT):
        self.limit, self._lock = limit, threading.Lock()
        self._objects: OrderedDict[Key, bytes] = OrderedDict()
        self._held = 0

    def get(self, name: str, kernel: tirx.PrimFunc, target: tvm.target.Target, make: Callable[[], bytes]) -> bytes:
        """The object code of `kernel` as function `name`. Calls `make` if the cache does not have it."""
        key = name, tvm_ffi.structural_hash(kernel), str(target)
        with self._lock:
            if key in self._objects:
                self._objects.move_to_end(key)
                return self._objects[key]
        made = self.made(key, make)
        with self._lock:
            self._held += len(made) - len(self._objects.pop(key, b""))
            self._objects[key] = made
            while self._held > self.limit:
                self._held -= len(self._objects.popitem(last=False)[1])
        return made

    def made(self, key: Key, make: Callable[[], bytes]) -> bytes:
        """Makes object code that the cache does not have. Subclasses may look elsewhere first."""
        return make()
