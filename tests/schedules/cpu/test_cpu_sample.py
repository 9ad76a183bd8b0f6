"""The choice of tokens on the CPU against the host's sampler, on every instruction set that this machine runs."""

import functools
from itertools import product

import numpy as np
import pytest
import sampling_cases as cases
import tvm
from samples import sample
from workloads import built

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.runtime.sampling.settings import Sampling
from mlc_amd.schedules.cpu.base.arch import resolve
from mlc_amd.schedules.operators import Sample
from tests.schedules.cpu.test_cpu_experts import ARCHS

VOCAB = 5003


@functools.cache
def kernel_of(n, vocab, name):
    arch = resolve(name)
    func = built(Sample(m=n, vocab=vocab, columns=-(-vocab // 16) * 16), arch, "sample")
    return build_module({"sample": func}, arch.target)["sample"]


def sampled(rows, vocab, arch, n=None):
    """(ids, log-probabilities) of rows in one call of a kernel for n rows."""
    columns, n = -(-vocab // 16) * 16, n or len(rows)
    out = cases.outputs(n, columns)
    arrays = {"state": np.array([len(rows), len(rows), 0, 0], np.int32)} | cases.inputs(rows, columns, n) | out
    held = [tvm.runtime.tensor(array) for array in arrays.values()]
    kernel_of(n, vocab, arch)(*held)
    for array, tensor in zip(arrays.values(), held, strict=True):
        array[...] = tensor.numpy()
    assert (out["Sampled"][len(rows) :] == -7).all() and (out["LogProbs"][len(rows) :] == 7).all()
    return out["Sampled"], out["LogProbs"]


@pytest.mark.parametrize(
    ("arch", "group"),
    sample(product(ARCHS, cases.GROUPS), [*product(ARCHS[-1:], cases.GROUPS), (ARCHS[0], "filtered")]),
)
def test_as_the_host(arch, group):
    rows = cases.GROUPS[group](VOCAB)
    cases.check(rows, *sampled(rows, VOCAB, arch))


@pytest.mark.parametrize("vocab", [1, 16, 33])
def test_small_vocabularies(vocab):
    rows = cases.greedy(max(vocab, 2))[:3] + cases.filtered(max(vocab, 2))[:9]
    cases.check(rows, *sampled(rows, max(vocab, 2), ARCHS[0]))


def test_draws_follow_the_probabilities():
    """Chi-square of 4000 positions over twelve tokens: below 30 in all but one of 600 tries."""
    vocab, draws = 12, 4000
    logits = cases.gaussian(vocab, 3, 1.0)
    rows = [cases.SamplingRow(logits, Sampling(temperature=1.0, seed=1), position=i) for i in range(draws)]
    counts = np.bincount(sampled(rows, vocab, ARCHS[0])[0], minlength=vocab)
    expected = np.exp(logits - logits.max()) * draws / np.exp(logits - logits.max()).sum()
    assert ((counts - expected) ** 2 / expected).sum() < 30


def test_other_rows_do_not_matter():
    rows = cases.filtered(VOCAB)[:20]
    together = sampled(rows, VOCAB, ARCHS[0], n=32)[0][:20]
    for i in (0, 7, 19):
        assert sampled([rows[i]], VOCAB, ARCHS[0])[0][0] == together[i]
