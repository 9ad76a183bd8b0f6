"""The choice of tokens on the CPU against the host's sampler, on every instruction set that this machine runs."""

import functools

import numpy as np
import pytest
import sampling_cases as cases
import tvm
from test_cpu_experts import ARCHS

from mlc_amd.compiler.codegen.cpu import build_module
from mlc_amd.schedules.cpu.arch import resolve
from mlc_amd.schedules.cpu.kernels import BUILDERS

VOCAB = 5003


@functools.cache
def kernel_of(n, vocab, name):
    arch = resolve(name)
    func = BUILDERS["sample"](m=n, vocab=vocab, columns=-(-vocab // 16) * 16, arch=arch, name="sample", plan=None)
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


@pytest.mark.parametrize("group", cases.GROUPS)
@pytest.mark.parametrize("arch", ARCHS)
def test_as_the_host(arch, group):
    rows = cases.GROUPS[group](VOCAB)
    cases.check(rows, *sampled(rows, VOCAB, arch))


@pytest.mark.parametrize("vocab", [1, 16, 33])
def test_small_vocabularies(vocab):
    rows = cases.greedy(max(vocab, 2))[:3] + cases.filtered(max(vocab, 2))[:9]
    cases.check(rows, *sampled(rows, max(vocab, 2), ARCHS[0]))
