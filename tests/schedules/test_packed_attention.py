"""Attention of packed rows on the CPU and on Mesa's CPU driver, against float64; and that a row's result has the same
bits whatever else is in the step."""

import os

import numpy as np
import pytest
import spirv_emulation
import tvm
from samples import sample
from vulkan_harness import PROFILES, gpu, run
from workloads import built

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.gpu.attention.attention_packed_matrix import suits
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.arch import resolve as gfx
from mlc_amd.schedules.operators import PackedAttention
from mlc_amd.tools.reference.case import Case
from mlc_amd.tools.reference.operators import results
from tests.schedules.gpu.test_gpu_experts import emulated

os.environ.setdefault("TVM_NUM_THREADS", "2")  # before the first kernel call
TOLERANCE = 1e-5  # of the largest number
FLOAT16, ROUNDING = 1e-3, 1e-4  # the same, where matrix units round; that what else is in a step changes
TEXTS = (1, 35, 5, 70, 3, 16)  # rows of each segment
CASES = {
    "heads of 64": {"heads": 3, "kv_heads": 3, "d": 64},
    "groups": {"heads": 4, "kv_heads": 2, "d": 32, "scale": 0.2},
    "heads of 72": {"heads": 2, "kv_heads": 2, "d": 72},
    "heads of 88, causal window": {"heads": 2, "kv_heads": 1, "d": 88, "window": 9, "causal": True},
    "large heads": {"heads": 2, "kv_heads": 1, "d": 256},
    "heads of 8": {"heads": 2, "kv_heads": 2, "d": 8},
    "window": {"heads": 2, "kv_heads": 2, "d": 64, "window": 9},
    "alibi": {"heads": 6, "kv_heads": 3, "d": 64, "alibi": 8.0},
    "causal": {"heads": 4, "kv_heads": 2, "d": 64, "causal": True},
    "heads of 128": {"heads": 2, "kv_heads": 2, "d": 128},
}
QUICK = [("heads of 88, causal window", "lavapipe"), ("alibi", "lavapipe")]


def arrays_of(op, texts=TEXTS):
    rng, live = np.random.default_rng(3), sum(texts)
    ends = np.cumsum(texts)
    segments = np.repeat(np.stack([ends - texts, ends], 1), texts, 0).astype(np.int32)
    found = {"state": np.array([0, live, 0, 0], np.int32)}
    found["segments"] = np.concatenate([segments, np.full((op.m - live, 2), -7, np.int32)])
    for name, shape in op.shapes().items():
        found[name] = np.full(shape, np.nan, np.float32)
        found[name][:live] = rng.standard_normal((live, *shape[1:]), np.float32)
    found["Y"][:] = np.nan
    return found


def check(op, layout, execute):
    arrays = arrays_of(op)
    expected = results(Case(op, {k: v.copy() for k, v in arrays.items()}, layout, np.arange(sum(TEXTS))))["Y"]
    found = execute(arrays)["Y"]
    error = np.abs(found[expected.rows] - expected.value).max()
    assert error < TOLERANCE * np.abs(expected.value).max()
    assert np.isnan(found[sum(TEXTS) :]).all()
    # the fourth text alone
    first, count = sum(TEXTS[:3]), TEXTS[3]
    alone = arrays_of(op, (count,))
    for name in "QKV":
        alone[name][:count] = arrays[name][first : first + count]
    assert (execute(alone)["Y"][:count] == found[first : first + count]).all()


def operator_of(case, m=144):
    return PackedAttention(m=m, **CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_cpu(case):
    op, arch = operator_of(case), resolve("native")
    func = built(op, arch)
    module = build_module({"kernel": func}, arch.target)

    def execute(arrays):
        names = [param.name for param in func.params]
        tensors = [tvm.runtime.tensor(arrays[name]) for name in names]
        module["kernel"](*tensors)
        return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}

    check(op, "cpu", execute)


@pytest.mark.parametrize(
    ("case", "profile"),
    sample([*((case, "lavapipe") for case in CASES), ("alibi", "generic")], QUICK),
)
def test_vulkan(case, profile):
    gpu()
    op = operator_of(case)
    func = built(op, PROFILES[profile])

    def execute(arrays):
        names = [param.name for param in func.params]
        return dict(zip(names, run(func, [arrays[name] for name in names], PROFILES[profile]), strict=True))

    check(op, "gpu", execute)


ON_MATRICES = [case for case in CASES if case != "alibi"]


def check_matrices(case, arch, execute):
    """Keys, values and weights are float16 there, and the order of sums depends on what is in the step."""
    op = operator_of(case)
    func = built(op, arch)
    assert suits(op, arch)

    def run_on(texts, of=None):
        arrays = arrays_of(op, texts)
        if of:
            first = sum(TEXTS[:3])
            for name in "QKV":
                arrays[name][: texts[0]] = of[name][first : first + texts[0]]
        given = {name: array.copy() for name, array in arrays.items()}
        execute(func, arrays, arch)
        return given, arrays["Y"]

    given, found = run_on(TEXTS)
    expected = results(Case(op, {k: v.copy() for k, v in given.items()}, "gpu", np.arange(sum(TEXTS))))["Y"]
    assert np.abs(found[expected.rows] - expected.value).max() < FLOAT16 * np.abs(expected.value).max()
    assert np.isnan(found[sum(TEXTS) :]).all()
    _, alone = run_on(TEXTS[3:4], given)
    same = found[sum(TEXTS[:3]) :][: TEXTS[3]]
    assert np.abs(alone[: TEXTS[3]] - same).max() < ROUNDING * np.abs(same).max()


@pytest.mark.parametrize(
    ("case", "profile"),
    sample(
        [(case, profile) for case in ON_MATRICES for profile in ("nvidia", "rdna3", "rdna4")],
        [("heads of 8", "nvidia"), ("window", "rdna3")],
    ),
)
def test_cooperative_matrices(case, profile):
    check_matrices(case, profiles.resolve(profile), spirv_emulation.execute)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("case", "name"),
    sample(
        [(case, name) for case in ON_MATRICES for name in ("gfx1100", "gfx1201", "gfx942")],
        [("heads of 88, causal window", "gfx1100")],
    ),
)
def test_matrix_units(case, name):
    check_matrices(case, gfx(name), emulated)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("name", ["gfx1100", "gfx1201", "gfx942"])
def test_in_the_emulator(name):
    op = PackedAttention(m=40, heads=2, kv_heads=1, d=64, alibi=8.0)
    func, arrays = built(op, gfx(name)), arrays_of(op, (3, 30))
    expected = results(Case(op, {k: v.copy() for k, v in arrays.items()}, "gpu", np.arange(33)))["Y"]
    emulated(func, arrays, gfx(name))
    assert np.abs(arrays["Y"][:33] - expected.value).max() < TOLERANCE * np.abs(expected.value).max()
