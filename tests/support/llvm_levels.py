"""How much LLVM optimizes kernels for CPUs in a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tvm

from mlc_amd.schedules.cpu.base.arch import Arch


@contextmanager
def unoptimized() -> Iterator[None]:
    """LLVM does not optimize what this process compiles here for CPUs, which takes half of the time or less: for tests
    of graphs and the runtime."""

    def target(arch: Arch) -> tvm.target.Target:
        return tvm.target.Target({"kind": "llvm", "mcpu": arch.mcpu, "opt-level": 0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arch, "target", property(target))
        yield
