"""The choice of tokens on the GPU, on Mesa's CPU driver and in the ISA emulator, against the host's sampler."""

import functools

import numpy as np
import pytest
import sampling_cases as cases
from samples import sample
from test_gpu_experts import build, emulated, execute, profile
from vulkan_harness import PROFILES

from mlc_amd.schedules.gpu.arch import resolve

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
    for some in (rows[:MOST], rows[MOST:]):
        if some:
            ids, logprobs = sampled(some, VOCAB, profile, execute, MOST)
            cases.check(some, ids[: len(some)], logprobs[: len(some)])


def test_other_rows_do_not_matter():
    rows, arch = cases.filtered(VOCAB)[:20], PROFILES["lavapipe"]
    together = sampled(rows, VOCAB, arch, execute, MOST)[0][:20]
    assert sampled([rows[7]], VOCAB, arch, execute)[0][0] == together[7]


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("name", ["gfx1100", "gfx1201", "gfx942"])
def test_in_the_emulator(name):
    check_emulated(name)


def check_emulated(name):
    vocab = 515
    rows = [
        *cases.filtered(vocab)[:6],
        *cases.changed(vocab)[8:12],
        *cases.broken(vocab)[:1],
        *cases.greedy(vocab)[:1],
    ]
    cases.check(rows, *sampled(rows, vocab, resolve(name), emulated))
