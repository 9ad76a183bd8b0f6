"""Object code of the CPU's kernels that tests compiled before, in this run or another one: LLVM takes most of the time
of tests that compile models.

What a kernel becomes depends on its structure, its target, the programs below compiler/codegen and TVM: with other ones
of these the folder is another one, and the old one goes.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import tvm

from mlc_amd.compiler.codegen import cpu
from mlc_amd.compiler.codegen.object_cache import Key, ObjectCache


class KeptObjects(ObjectCache):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        digest = hashlib.blake2b(tvm.__version__.encode(), digest_size=16)
        for path in sorted(Path(cpu.__file__).parent.rglob("*.py")):
            digest.update(path.read_bytes())
        self._folder = folder / digest.hexdigest()
        for other in folder.glob("*"):
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    def made(self, key: Key, make: Callable[[], bytes]) -> bytes:
        path = self._folder / hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
        if path.exists():
            return path.read_bytes()
        content = make()
        own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        own.write_bytes(content)
        own.replace(path)
        return content
