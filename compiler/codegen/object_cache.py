"""Object code of kernels that this process compiled before: compiling a model with kernels of another one, or the same
model again, then takes LLVM no time.

In: a kernel by its name, its structure (not the names of its variables) and its target. Out: the bytes of its object
file. The least recently used ones are dropped beyond a number of bytes.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import tirx

LIMIT = 64 << 20  # bytes: some two thousand kernels

Key = tuple[str, int, str]


class ObjectCache:
    """May be used from several threads at a time. limit: bytes."""

    def __init__(self, limit: int = LIMIT):
        self.limit, self._lock = limit, threading.Lock()
        self._objects: OrderedDict[Key, bytes] = OrderedDict()
        self._held = 0

    def get(self, name: str, kernel: tirx.PrimFunc, target: tvm.target.Target, make: Callable[[], bytes]) -> bytes:
        """The object code of `kernel` as function `name`, from `make` if it is not there yet."""
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
        """What is not held."""
        return make()
