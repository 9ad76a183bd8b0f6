"""How much LLVM optimizes kernels for CPUs in a test."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tvm

from mlc_amd.schedules.cpu.arch import Arch


@contextmanager
def unoptimized() -> Iterator[None]:
    """LLVM does not optimize what is compiled here, which takes half of the time: for tests of graphs and the runtime.
    Others have kernels as users get them."""

    def target(arch: Arch) -> tvm.target.Target:
        return tvm.target.Target({"kind": "llvm", "mcpu": arch.mcpu, "opt-level": 0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arch, "target", property(target))
        yield
