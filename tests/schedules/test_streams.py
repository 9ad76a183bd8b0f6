"""Matrices that mix residual streams on the CPU, on Mesa's CPU driver and in the emulator, against float64."""

import numpy as np
import pytest
import tvm
from vulkan_harness import PROFILES, gpu, run
from workloads import built

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.gpu.base.arch import resolve as gfx
from mlc_amd.schedules.operators import Sinkhorn
from mlc_amd.tools.reference.case import Case
from mlc_amd.tools.reference.operators import results
from tests.schedules.gpu.test_gpu_experts import emulated

M, LIVE = 70, 67
OP = Sinkhorn(count=4, iterations=5, eps=1e-3, m=M)


def check(execute) -> None:
    """execute(arrays) runs the kernel."""
    x = np.random.default_rng(1).standard_normal((M, 16)).astype(np.float32) * 3
    arrays = {"state": np.array([0, LIVE, 0, 0], np.int32), "X": x, "Y": np.zeros((M, 16), np.float32)}
    expected = results(Case(OP, arrays, "cpu", np.arange(LIVE)))["Y"].value
    execute(arrays)
    np.testing.assert_allclose(arrays["Y"][:LIVE], expected, rtol=2e-5, atol=1e-7)
    assert not arrays["Y"][LIVE:].any()


def test_cpu():
    arch = resolve("native")
    func = built(OP, arch, "kernel")
    module = build_module({"kernel": func}, arch.target)

    def execute(arrays):
        tensors = [tvm.runtime.tensor(arrays[param.name]) for param in func.params]
        module["kernel"](*tensors)
        arrays["Y"][...] = tensors[-1].numpy()

    check(execute)


def test_vulkan():
    gpu()
    func = built(OP, PROFILES["lavapipe"])
    names = [param.name for param in func.params]

    def execute(arrays):
        for name, found in zip(names, run(func, [arrays[name] for name in names], PROFILES["lavapipe"]), strict=True):
            arrays[name][...] = found

    check(execute)


@pytest.mark.emulator
def test_in_the_emulator():
    func = built(OP, gfx("gfx1100"))
    check(lambda arrays: emulated(func, arrays, gfx("gfx1100")))
