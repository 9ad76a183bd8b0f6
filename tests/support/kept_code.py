"""Code of kernels that tests compiled before, in this run or another one: LLVM and the generator of SPIR-V take most of
the time of tests that compile models.

What a kernel becomes depends on its structure and the names of its parameters, its target, the programs below
compiler/codegen and schedules/gpu/base, and TVM: with other ones of these the folder is another one, and those that no
run used for a day go. Tests that pass a kernel to a code generator themselves get what it makes.

Kernels before code generation stay in a process's memory: models that it compiles one after the other share many.
"""

import hashlib
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import tvm
import tvm_ffi

from mlc_amd.compiler.codegen import cpu
from mlc_amd.compiler.codegen.object_cache import Key, ObjectCache
from mlc_amd.compiler.codegen.rocm import HsacoModule, compile_hsaco
from mlc_amd.compiler.codegen.rocm_target import RocmTarget
from mlc_amd.compiler.codegen.spirv import SpirvModule, compile_spirv
from mlc_amd.compiler.codegen.target import Target
from mlc_amd.compiler.codegen.vulkan_target import VulkanTarget
from mlc_amd.compiler.nodes import params
from mlc_amd.schedules.gpu import base

DAY = 24 * 60 * 60  # seconds


class Kept:
    """Contents by key, in files that several processes share."""

    def __init__(self, folder: Path) -> None:
        digest = hashlib.blake2b(tvm.__version__.encode(), digest_size=16)
        for path in (cpu.__file__, base.__file__):
            for file in sorted(Path(path).parent.rglob("*.py")):
                digest.update(file.read_bytes())
        self._folder = folder / digest.hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._folder.touch()
        for other in folder.iterdir():
            with suppress(FileNotFoundError):  # another process removes it
                if other.stat().st_mtime < time.time() - DAY:
                    shutil.rmtree(other, ignore_errors=True)

    def get(self, key: object, make: Callable[[], bytes]) -> bytes:
        path = self._path(key)
        if not path.exists():
            self.put(key, make())
        return path.read_bytes()

    def put(self, key: object, content: bytes) -> None:
        path = self._path(key)
        own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        own.write_bytes(content)
        own.replace(path)

    def _path(self, key: object) -> Path:
        return self._folder / hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


class KeptObjects(ObjectCache):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def made(self, key: Key, make: Callable[[], bytes]) -> bytes:
        return self._kept.get(key, make)


def keep(folder: Path) -> None:
    """From now on this process keeps there what its targets compile."""
    kept = Kept(folder)

    def hsaco(kernels, arch) -> HsacoModule:
        key = ["hsaco", repr(arch), *(_identity(name, kernel) for name, kernel in kernels.items())]
        return pickle.loads(kept.get(key, lambda: pickle.dumps(compile_hsaco(kernels, arch))))

    def spirv(kernels, profile) -> SpirvModule:
        key = ["spirv", repr(profile), *(_identity(name, kernel) for name, kernel in kernels.items())]
        return pickle.loads(kept.get(key, lambda: pickle.dumps(compile_spirv(kernels, profile))))

    @lru_cache(maxsize=4096)
    def built(registry, workload, arch, name, plan) -> tvm.tirx.PrimFunc:
        return registry.builders[type(workload)](workload, arch, name, plan)

    Target.build = lambda self, workload, arch, name, plan=None: built(self.registry, workload, arch, name, plan)
    cpu.OBJECTS = KeptObjects(kept)
    RocmTarget.compiler, VulkanTarget.compiler = staticmethod(hsaco), staticmethod(spirv)


def _identity(name: str, kernel: tvm.tirx.PrimFunc) -> tuple:
    return name, tvm_ffi.structural_hash(kernel), [param.name for param in params(kernel)]
