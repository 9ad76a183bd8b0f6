"""Models with a few of their functions: compiling all takes a compiler or a driver most of a test's time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlc_amd.compiler.codegen.cpu import CpuTarget
from mlc_amd.compiler.codegen.gpu_target import GpuTarget

# One row, a chunk, whose linear layers are on matrix units where there are any, and what no model can do without.
FUNCTIONS = ("decode", "prefill_64", "score_64")


@contextmanager
def few_functions(names: tuple[str, ...] = FUNCTIONS) -> Iterator[None]:
    """What this process compiles here has these functions only."""
    with pytest.MonkeyPatch.context() as patch:
        for target in (CpuTarget, GpuTarget):
            every = target.functions

            def functions(self, ctx, every=every):
                return [function for function in every(self, ctx) if function.name in names]

            patch.setattr(target, "functions", functions)
        yield
