"""The choice of tokens on the GPU, on Mesa's CPU driver and in the emulators, against the host's sampler."""

import functools

import numpy as np
import pytest
import sampling_cases as cases
from samples import sample
from spirv_emulation import execute as execute_spirv
from vulkan_harness import PROFILES

from mlc_amd.compiler.codegen.spirv import compile_spirv
from mlc_amd.schedules.gpu.base import profiles
from mlc_amd.schedules.gpu.base.arch import resolve
from tests.schedules.gpu.test_gpu_experts import build, emulated, execute, profile

__all__ = ["profile"]  # a fixture
VOCAB = 5003
MOST = 64  # rows of the kernel that most tests share


@functools.cache
def kernel_of(n, vocab, arch):
    return build("sample", arch, m=n, vocab=vocab, columns=-(-vocab // 16) * 16)


def sampled(rows, vocab, arch, run_kernel, n=None):
    """(ids, log-probabilities) of rows in one call of a kernel for n rows."""
    columns, n = -(-vocab // 16) * 16, n or len(rows)
    out = cases.outputs(n, columns)
    arrays = {"state": np.array([len(rows), len(rows), 0, 0], np.int32)} | cases.inputs(rows, columns, n) | out
    run_kernel(kernel_of(n, vocab, arch), arrays, arch)
    assert (out["Sampled"][len(rows) :] == -7).all() and (out["LogProbs"][len(rows) :] == 7).all()
    return out["Sampled"], out["LogProbs"]


@pytest.mark.parametrize(
    ("profile_name", "group"),
    sample(
        [*(("lavapipe", group) for group in cases.GROUPS), ("generic", "changed")],
        [("lavapipe", "changed"), ("lavapipe", "filtered")],
    ),
)
def test_as_the_host(profile, group):
    rows = cases.GROUPS[group](VOCAB)
    for first in range(0, len(rows), MOST):
        part = rows[first : first + MOST]
        ids, logprobs = sampled(part, VOCAB, profile, execute, MOST)
        cases.check(part, ids[: len(part)], logprobs[: len(part)])


def test_other_rows_do_not_matter():
    rows, arch = cases.filtered(VOCAB)[:20], PROFILES["lavapipe"]
    together = sampled(rows, VOCAB, arch, execute, MOST)[0][:20]
    assert sampled([rows[7]], VOCAB, arch, execute)[0][0] == together[7]


def few_of_each(vocab):
    """A few rows of each kind: whole rows, lists, short lists, masks."""
    return [
        *(cases.filtered(vocab)[i] for i in (0, 4, 9, 14)),
        *cases.changed(vocab)[8:10],
        *cases.broken(vocab)[:1],
        *cases.greedy(vocab)[:1],
    ]


@pytest.mark.parametrize(
    ("name", "vocab"),
    sample([("nvidia", 12000), ("vangogh", 12000), ("gfx90c", 12000), ("generic", 515)], [("nvidia", 12000)]),
)
def test_in_the_spirv_emulator(name, vocab):
    """With workgroups and waves of other sizes than that driver's, and no races; more pieces than top_k asks for."""
    rows = few_of_each(vocab)[::2]
    cases.check(rows, *sampled(rows, vocab, profiles.resolve(name), execute_spirv))


def test_the_code_does_not_grow_with_the_vocabulary():
    """No loop over a row is unrolled: one workgroup would read all of that code once."""
    sizes = []
    for vocab in (VOCAB, 262144):
        kernels = {"sample": build("sample", PROFILES["lavapipe"], m=1, vocab=vocab, columns=-(-vocab // 16) * 16)}
        sizes.append(sum(len(one.binary) for one in compile_spirv(kernels, PROFILES["lavapipe"]).modules.values()))
    assert sizes[1] < 1.2 * sizes[0]


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("name", ["gfx1100", "gfx1201", "gfx942"])
def test_in_the_emulator(name):
    check_emulated(name)


def check_emulated(name):
    rows = few_of_each(515)
    cases.check(rows, *sampled(rows, 515, resolve(name), emulated))
