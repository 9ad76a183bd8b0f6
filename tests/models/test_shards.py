"""Models divided between GPUs by tensor: parts that compute one after the other on the CPU, in the way that GPUs do at
the same time."""

import architectures
import numpy as np
import pytest
from few_functions import few_functions
from samples import sample

from mlc_amd.compiler.gguf.synthetic import synthetic
from mlc_amd.compiler.models.shards import ShardedModel, named
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.sequence import ChunkRows
from mlc_amd.runtime.devices.steps import write_private_pages, write_step
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.operators import exchange
from mlc_amd.tools.reference.plan import plan_of
from tests.models.cpu_ranks import CpuRanks

MOST = 1e-4  # KL divergence from exact logits
CASES = [("deepseek2", 2), ("gpt-oss", 4), ("hy_v4", 2), ("qwen3next", 2)]
FULL = sorted({(name, gpus) for name in architectures.MODELS for gpus in (2, 4)} - set(CASES))


def log_probabilities(logits):
    exact = logits.astype(np.float64)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def divergence(name, gpus, out) -> float:
    """From exact logits."""
    options = CompileOptions(target="cpu", ctx=128, split="tensor", gpus=gpus, tuned="none")
    with few_functions(("decode", "prefill_128", "score_128")):
        compile_model(architectures.tiny(name), out, options)
    artifact, exact = Artifact.open(out), architectures.exact()
    with Engine(artifact, CpuRanks(artifact)) as engine:
        logits = engine.score(exact["ids"])[exact["positions"]]
    expected, found = log_probabilities(exact[name]), log_probabilities(logits)
    return (np.exp(expected) * (expected - found)).sum(-1).mean()


@pytest.mark.parametrize(("name", "gpus"), sample([*CASES, *FULL], CASES))
def test_logits_are_exact(name, gpus, tmp_path):
    assert divergence(name, gpus, tmp_path / "model") < MOST


def test_rows_that_are_copied_cross_as_float16(tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_WORDS", 512)  # all but single rows
    assert 1e-9 < divergence("qwen2", 3, tmp_path / "model") < MOST
    kernels = Artifact.open(tmp_path / "model").manifest["kernels"]
    assert {one["args"].get("half", False) for one in kernels if one["operator"] == "all_reduce"} == {True, False}


@pytest.mark.parametrize("gpus", sample([2, 4, 8], [4]))
@pytest.mark.parametrize("name", architectures.MODELS)
def test_parts_together_are_the_whole(name, gpus):
    """Every weight is on some GPU, once where it is a part of a sum."""
    model = architectures.tiny(name)
    divided = ShardedModel(model, gpus)
    for tensor in divided.sums:
        whole = model.tensors[tensor].dequantize()
        parts = [divided.tensors[named(tensor, rank)].dequantize() for rank in range(gpus)]
        assert np.isclose(sum(part.sum(dtype=np.float64) for part in parts), whole.sum(dtype=np.float64))
        assert len({part.shape for part in parts}) == 1
    for tensor in divided.joins:
        source = model.tensors.get(tensor) or model.tensors["token_embd.weight"]
        rows = np.concatenate([divided.tensors[named(tensor, rank)].dequantize() for rank in range(gpus)])
        np.testing.assert_array_equal(rows[: source.rows], source.dequantize())


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_large_model_is_divided_evenly(gpus):
    """All of a Llama 3 70B but its embedding, in a format with blocks of 256 columns."""
    model = synthetic("llama3-70b:q4_k")
    divided = ShardedModel(model, gpus)
    matrices = {name: of for name, of in model.tensors.items() if len(of.shape) == 2 and name != "token_embd.weight"}
    assert divided.config.layers[0].attention.kv_heads == 8 // gpus
    for name, whole in matrices.items():
        assert divided.tensors[name].nbytes * gpus == pytest.approx(whole.nbytes, rel=0.02), name


def test_fewer_key_heads_than_gpus_are_repeated():
    divided = ShardedModel(architectures.tiny("qwen2"), 4)  # two heads of keys
    first, second, third, _ = (divided.tensors[named("blk.0.attn_k.weight", i)].dequantize() for i in range(4))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, third)


@pytest.mark.parametrize("arch", ["generic", "nvidia"])  # the latter sums with norms for matrix units
def test_the_reference_computes_all_parts(tmp_path, arch):
    """Against the logits of the whole model's plan, which has other shapes."""
    found = []
    for gpus in (1, 2):
        split = {"split": "tensor", "gpus": gpus} if gpus > 1 else {}
        with few_functions():
            options = CompileOptions(target="vulkan", arch=arch, ctx=64, tuned="none", **split)
            compile_model(synthetic("tiny:q4_0"), tmp_path / str(gpus), options)
        artifact = Artifact.open(tmp_path / str(gpus))
        plan, function = plan_of(artifact), artifact.manifest["functions"]["score_64"]
        write_private_pages(plan, artifact.manifest)
        write_step(plan, function, (), ChunkRows(np.arange(5, 17), 0, 0))
        plan.run("score_64")
        found.append(plan.read("logits", 12)[:, :1000].copy())
    np.testing.assert_allclose(found[0], found[1], atol=0.05 * found[0].std())
