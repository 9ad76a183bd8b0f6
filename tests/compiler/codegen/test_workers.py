"""Code generation by several processes: the same code, in the same order; what fails in one of them fails here."""

import os
import re

import pytest

from mlc_amd.compiler.codegen import hsaco
from mlc_amd.compiler.codegen.rocm import compile_hsaco
from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.codegen.workers import spread
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.lowering import lower


def kernels_of(target: str, arch: str) -> tuple[dict, object]:
    """Some kernels of a small model, and their arch."""
    made_for = make_target(target, arch)
    with synthetic("tiny:q4_0") as model:
        lower(model, made_for, 64)
    found = {name: kernel for name, kernel in made_for.kernels.items() if re.match("linear|rope|norm", name)}
    return dict(list(found.items())[:4]), made_for.archs[0]


def test_shaders_are_the_same():
    kernels, profile = kernels_of("vulkan", "rdna3")
    done = []
    assert compile_spirv(kernels, profile, done.append, workers=3) == compile_spirv(kernels, profile)
    assert sorted(done) == sorted(kernels) and len(kernels) == 4


def test_code_objects_are_the_same_and_name_all_kernels():
    kernels, arch = kernels_of("rocm", "gfx1100")
    several = compile_hsaco(kernels, arch, workers=3)
    assert several == compile_hsaco(kernels, arch)
    launched = {launch.symbol for function in several.functions.values() for launch in function.launches}
    assert set(hsaco.parse(several.hsaco).kernels) == launched and len(launched) >= 4


def test_order_and_errors():
    def work(number: int) -> int:
        if number == 13:
            raise ValueError("thirteen")
        return number * os.getpid() ** 0

    assert spread(work, range(13), 3, lambda _: None) == list(range(13))
    with pytest.raises(ValueError, match="thirteen"):
        spread(work, range(20), 3, lambda _: None)
    with pytest.raises(RuntimeError, match="was ended"):
        spread(lambda _: os._exit(1), range(3), 2, lambda _: None)
