"""Latent attention: sequences in one step do not disturb one another, files of the older form, what is refused.
(Logits: test_architectures.py, test_rocm_models.py.)"""

import architectures
import numpy as np
import pytest
import vulkan_harness

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.reader import GGUFModel
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.models.config import LatentConfig
from mlc_amd.compiler.models.registry import read_config
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from tests.dev.quality import kl_divergence
from tests.models.test_architectures import EXACT, MAX_CHANGE

CONTEXT, MAX_KL = 128, 1e-4
IDS = np.random.default_rng(3).integers(0, 1024, 120)
PROMPTS = [IDS[7 * i : 12 * i + 5].tolist() for i in range(9)]


@pytest.fixture(scope="module", params=["deepseek2", pytest.param("deepseek32", marks=pytest.mark.full)])
def engine(request, tmp_path_factory):
    """With integer weights, whose products do not depend on how many rows a step has; without experts, for which LLVM
    would take most of the time."""
    out, (keys, _) = tmp_path_factory.mktemp("latent") / "model", architectures.MODELS[request.param]
    dense = {name: of for name, of in keys.items() if "expert" not in name}
    model = synthetic(
        "tiny-qwen2:q8_0", keys={"general.architecture": request.param} | dense | {"leading_dense_block_count": 2}
    )
    compile_model(model, out, CompileOptions(target="cpu", ctx=CONTEXT, tuned="none"))
    with Engine.load(out) as loaded:
        yield loaded


def test_answers_together_are_those_alone(engine):
    def answers(prompts) -> dict[int, list[int]]:
        engine.reset()
        found: dict[int, list[int]] = {}
        for piece in engine.generate(prompts, max_tokens=12, temperature=0.0):
            found.setdefault(piece.index, []).append(piece.id)
        return found

    together = answers(PROMPTS)
    assert [together[i] for i in range(len(PROMPTS))] == [answers(prompt)[0] for prompt in PROMPTS]


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek2", "kimi-linear"])
def test_on_a_vulkan_device(tmp_path, name):
    """Exact logits; the same in a chunk and steps after a truncated cache."""
    vulkan_harness.gpu()
    compile_model(
        architectures.tiny(name),
        tmp_path / "model",
        CompileOptions(target="vulkan", arch="auto", ctx=128, tuned="none"),
    )
    with Engine.load(tmp_path / "model") as engine:
        logits = engine.score(EXACT["ids"])
        assert kl_divergence(EXACT[name], logits[EXACT["positions"]]) < MAX_KL
        engine.truncate(10)
        later = engine.prefill(EXACT["ids"][10:50]), *(engine.decode(int(i)) for i in EXACT["ids"][50:])
        change = np.abs(np.stack(later) - logits[49:]).max()
        assert change < MAX_CHANGE * (logits.max() - logits.min())


def merged(model: GGUFModel) -> GGUFModel:
    """The same with attn_kv_b in the place of attn_k_b and attn_v_b, as files have it that were converted before."""
    latent = model.config.layers[0].attention.latent
    assert isinstance(latent, LatentConfig)
    stored = dict(model.stored)
    for i in range(len(model.config.layers)):
        k, v = (stored.pop(f"blk.{i}.attn_{which}_b.weight") for which in "kv")
        keys = k.dequantize().reshape(k.shape).transpose(0, 2, 1)
        both = np.concatenate([keys, v.dequantize().reshape(v.shape)], 1).astype(np.float16)
        rows = both.reshape(-1, latent.rank).view(np.uint8)
        name = f"blk.{i}.attn_kv_b.weight"
        stored[name] = Tensor(name, "f16", both.reshape(-1, latent.rank).shape, lambda a, b, rows=rows: rows[a:b])
    metadata = dict(model.metadata) | {
        "deepseek2.attention.key_length": model.metadata["deepseek2.attention.key_length_mla"],
        "deepseek2.attention.value_length": model.metadata["deepseek2.attention.value_length_mla"],
    }
    return GGUFModel("merged", metadata, stored, read_config(metadata, stored, "merged"))


def test_a_merged_matrix_gives_the_same_parts():
    model = architectures.tiny("deepseek2")
    other = merged(model)
    for name, tensor in model.tensors.items():
        assert other.tensors[name].shape == tensor.shape
        for start, stop in ((0, tensor.rows), (tensor.rows // 3, tensor.rows // 2 + 1)):
            assert (other.tensors[name].blocks(start, stop) == tensor.blocks(start, stop)).all(), name


def test_sizes_that_do_not_fit(monkeypatch):
    own, tensors = architectures.MODELS["deepseek2"]
    monkeypatch.setitem(architectures.MODELS, "deepseek2", (own | {"attention.key_length_mla": 16}, tensors))
    with pytest.raises(UserError, match=r"rope.dimension_count \(32\) must be at most a key's 16 columns"):
        architectures.tiny("deepseek2")
