"""Models for GPUs with a few of their functions: compiling all takes a compiler or a driver most of a test's time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlc_amd.compiler.codegen.gpu_target import GpuTarget

# One row, a chunk, whose linear layers are on matrix units where there are any, and what no model can do without.
FUNCTIONS = ("decode", "prefill_64", "score_64")


@contextmanager
def few_functions(names: tuple[str, ...] = FUNCTIONS) -> Iterator[None]:
    """What this process compiles here for GPUs has these functions only."""
    every = GpuTarget.functions

    def functions(self, ctx):
        return [function for function in every(self, ctx) if function.name in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuTarget, "functions", functions)
        yield
