"""Encoders end to end: vectors and scores of tiny models of each architecture, those of llama.cpp."""

import numpy as np
import pytest
from emulator_suite import emulated_device
from encoders import MODELS, WITHOUT_ORACLE, relative_error, texts, tiny
from samples import sample
from vulkan_harness import gpu

from mlc_amd.compiler.codegen.cpu import CpuTarget
from mlc_amd.compiler.codegen.gpu_target import GpuTarget
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.engine.encoder import Encoder, normalized
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions, RunOptions
from tests.dev.encoder_fixtures import FIXTURE

COSINE = 0.99999
SCORES = {"qwen3-rank": 1e-5, "bert-rank": 1e-3, "modern-bert-rank": 1e-3}  # of the largest
ON_GPU = ("bert-rank", "modern-bert", "jina-bert-v2-code", "qwen3-last")
EXACT = np.load(FIXTURE)
SHORT = 64  # tokens: a driver for CPUs takes long for more
SEVERAL = "bert"  # whose short texts are computed by a function of their own


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """encoder(name, target, form): that model, compiled once; with one function, but for `SEVERAL`, which compilers and
    drivers take less time for."""
    made: dict[tuple[str, str, str], Encoder] = {}

    def get(name, target="cpu", form="f32") -> Encoder:
        if (name, target, form) not in made:
            out = tmp_path_factory.mktemp("encoder") / name
            arch, device, ctx = ("native", None, None) if target == "cpu" else ("lavapipe", gpu().name, SHORT)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GpuTarget, "encoder_rows", (SHORT,))
                patch.setattr(CpuTarget, "encoder_rows", CpuTarget.encoder_rows if name == SEVERAL else (512,))
                compile_model(tiny(name, form), out, CompileOptions(target=target, arch=arch, ctx=ctx, tuned="none"))
            made[name, target, form] = Encoder.load(out, RunOptions(device=device))
        return made[name, target, form]

    yield get
    for one in made.values():
        one.close()


def check(encoder: Encoder, name: str, count: int | None = None) -> None:
    """Of the first `count` texts."""
    ids = encoder.ids(texts()[:count])
    together, alone = encoder.encode(ids), [encoder.encode([one])[0] for one in ids[::4]]
    for one, other in zip(together[::4], alone, strict=True):
        assert np.abs(one - other).max() <= 2e-6 * np.abs(other).max()
    expected = EXACT[name][:count].astype(np.float64)
    if encoder.ranks:
        scores = encoder.scores(ids)
        assert np.abs(scores - expected[:, 0]).max() < SCORES[name] * np.abs(expected).max()
        return
    found = np.stack([rows[-1] for rows in together]).astype(np.float64)
    cosines = (normalized(found) * normalized(expected)).sum(-1)
    assert cosines.min() > COSINE
    assert np.abs(np.linalg.norm(found, axis=-1) / np.linalg.norm(expected, axis=-1) - 1).max() < 5e-3


@pytest.mark.parametrize("name", [name for name in MODELS if name not in WITHOUT_ORACLE])
def test_cpu(name, encoder):
    check(encoder(name), name)


@pytest.mark.parametrize("name", sample([name for name in MODELS if name not in WITHOUT_ORACLE], ON_GPU[:1]))
def test_lavapipe(name, encoder):
    check(encoder(name, "vulkan"), name, 9)  # of fewer tokens together


@pytest.mark.parametrize("name", sample([name for name in MODELS if name not in WITHOUT_ORACLE], ["nomic-bert"]))
def test_errors_of_quantized_models(name, encoder):
    """At most 1.5 times llama.cpp's own."""
    one = encoder(name, form="q8_0")
    ids = one.ids(texts())
    found = one.scores(ids)[:, None] if one.ranks else np.stack([rows[-1] for rows in one.encode(ids)])
    assert relative_error(found, EXACT[f"{name}-q8_0"]) < 1.5 * EXACT[f"{name}-q8_0-error"]


def test_matrices_after_pooling(encoder):
    """EmbeddingGemma's, against NumPy."""
    with tiny("gemma-embedding-dense") as model:
        matrices = [model.tensors[f"dense_{i}.weight"].dequantize() for i in (2, 3)]
    plain, whole = encoder("gemma-embedding"), encoder("gemma-embedding-dense")
    before, after = (one.embed(texts()[:3], normalize=False) for one in (plain, whole))
    assert np.allclose(before @ matrices[0].T @ matrices[1].T, after, atol=1e-4 * np.abs(after).max())


def test_what_callers_give(encoder):
    bert, rank, none = encoder("bert"), encoder("bert-rank"), encoder("llama-none")
    assert np.allclose(np.linalg.norm(bert.embed([[5, 6]]), axis=1), 1)
    assert bert.embed([[5, 6], [7]], dimensions=8).shape == (2, 8) and bert.embed([]).shape == (0, 256)
    long = list(range(600))
    with pytest.raises(UserError, match="600 tokens, this model takes 1 to 512"):
        bert.embed([long])
    assert (bert.embed([long], truncate=True) == bert.embed([[*long[:511], 599]])).all()
    assert [rows.shape for rows in none.embed([[1, 2, 3], [4]])] == [(3, 256), (1, 256)]
    for wrong, message in (([[]], "0 tokens"), ([[-1]], "outside"), ([[1 << 20]], "outside"), ([[1 << 70]], "outside")):
        with pytest.raises(UserError, match=message):
            bert.embed(wrong)
    with pytest.raises(UserError, match="ranking model"):
        rank.embed([[1]])
    with pytest.raises(UserError, match="makes vectors"):
        bert.rerank("a", ["b"])
    assert rank.rerank("a", []).shape == (0,)


@pytest.mark.full
@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["gfx1100", "gfx942"])
def test_in_the_emulator(arch, emulator, linker, tmp_path):
    """One layer for AMD's own API, in the instruction set emulator, against the CPU."""
    architecture, keys, tensors = MODELS["bert"]
    small = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    small |= {"attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": 32}
    small |= {"attention.value_length": 32, "rope.dimension_count": 32, "vocab_size": 320}
    keys = {"general.architecture": architecture} | keys | small
    vectors = []
    for target, name in (("cpu", "native"), ("rocm", arch)):
        with synthetic("tiny-qwen2:q8_0", keys=keys, tensors=tensors) as model:
            compile_model(model, tmp_path / target, CompileOptions(target=target, arch=name, tuned="none"))
        artifact = Artifact.open(tmp_path / target)
        device = open_device(artifact) if target == "cpu" else emulated_device(artifact, arch, emulator)
        with Encoder(artifact, device) as one:
            texts = [np.array(ids, np.int32) for ids in ([5, 6, 7], [9], list(range(20)))]
            vectors.append(np.concatenate(one.step(texts, one.sizes[0][1])))
    assert (normalized(vectors[0]) * normalized(vectors[1])).sum(-1).min() > 0.9999
