"""Images with what else an engine may do at once: guesses, constraints, quantized caches, several GPUs. Answers are
those without. An image of one row whose features are a token's embedding is that token, as in `test_image_rows.py`."""

from collections.abc import Callable

import drafts
import further_architectures
import numpy as np
import pytest
import vision_models
import vulkan_harness
from few_functions import few_functions
from residues import Residues
from samples import sample

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.images.features import Features
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.runtime.speculation.draft_model import LOOKUP, open_drafter
from tests.models.test_drafts import with_draft
from tests.models.test_image_rows import IDS, Encoder
from tests.runtime.engine.test_speculation import Eager, guess_always

MODELS: dict[str, Callable] = {
    **dict.fromkeys(("q8_0", "q4_0"), lambda folder: synthetic("tiny-qwen2:f32")),  # types of the cache
    "qwen35": lambda folder: further_architectures.predicting("qwen35"),
    "glm4moe": lambda folder: further_architectures.predicting("glm4moe"),
    "eagle3": lambda folder: with_draft(drafts.target("eagle3"), "eagle3", folder),
    "dflash": lambda folder: with_draft(drafts.target("dflash"), "dflash", folder),
}
DRAFTS = sample(["qwen35", "glm4moe", "eagle3", "dflash"], ["qwen35", "eagle3"])


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """opened(name) -> (engine, a prompt with images in the places of some of IDS)"""
    made = {}

    def get(name: str) -> tuple[Engine, Prompt]:
        if name not in made:
            build, folder = MODELS[name], tmp_path_factory.mktemp(name)
            model = build(folder)
            model.features = model.config.hidden
            kv_type = name if name in ("q8_0", "q4_0") else None
            options = CompileOptions(target="cpu", ctx=256, kv_type=kv_type, tuned="none")
            compile_model(model, folder / "model", options)
            table = model.tensors["token_embd.weight"].dequantize() * model.config.embedding_scale
            engine, encoder = Engine.load(folder / "model", RunOptions(kv_tokens=2048)), Encoder()
            engine.features = engine._runner.images = engine._loop._works[0]._features = Features(encoder)
            engine._loop.scheduler.admission.has_features = engine.features.__contains__
            images = [encoder.image(table[[token]].astype(np.float32)) for token in IDS[2:6]]
            made[name] = engine, Prompt.of([IDS[:2], *images, IDS[6:]])
        engine, prompt = made[name]
        engine.speculate(None)
        engine.reset()
        return engine, prompt

    yield get
    for engine, _ in made.values():
        engine.close()


def answer(engine: Engine, prompt, **options) -> list[int]:
    return [piece.id for piece in engine.generate(prompt, max_tokens=16, **({"temperature": 0.0} | options))]


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", DRAFTS)
def test_guesses_after_images(opened, name, constrained):
    engine, prompt = opened(name)
    options = {"constraint": lambda: Residues(engine.vocab, engine.tokenizer.end_ids)} if constrained else {}
    expected = answer(engine, IDS, **options)
    assert answer(engine, prompt, **options) == expected
    guess_always(engine)
    assert answer(engine, prompt, **options) == expected
    assert engine.guesses.drafted


@pytest.mark.parametrize("draft", [LOOKUP, "model"])
@pytest.mark.parametrize("kv_type", sample(["q8_0", "q4_0"], ["q4_0"]))
def test_guesses_of_others_with_a_quantized_cache(opened, kv_type, draft):
    engine, prompt = opened(kv_type)
    expected = answer(engine, IDS)
    assert answer(engine, prompt) == expected
    path = LOOKUP if draft == LOOKUP else engine.artifact.path
    engine.speculate(open_drafter(path, engine.tokenizer, None, None, KvSize.of(256, None)))
    engine._loop.speculation = Eager(engine._loop.speculation.drafter, engine._loop.speculation._rows)
    engine.reset()
    assert answer(engine, prompt) == expected
    assert engine.guesses.accepted


@pytest.mark.parametrize("split", ["layer", "tensor"])
def test_images_on_several_gpus(split, tmp_path):
    """An encoder's features are those of one GPU, and logits after them but for the order of sums."""
    vulkan_harness.gpu()
    vision_models.write_pair(tmp_path / "files")
    pixels, logits, features = vision_models.pixels("gemma3"), {}, {}
    image = PreparedImage.of(pixels, 16, (1, 16), "")
    for gpus in (1, 2):
        model = GGUFModel.open(tmp_path / "files" / "model.gguf")
        with model, few_functions():
            model.add_vision(VisionFile(tmp_path / "files" / "mmproj.gguf"))
            divided = {"split": "tensor", "gpus": gpus} if split == "tensor" and gpus > 1 else {}
            options = CompileOptions(target="vulkan", arch="lavapipe", ctx=128, tuned="none", **divided)
            compile_model(model, tmp_path / str(gpus), options)
        with Engine.load(tmp_path / str(gpus), RunOptions(devices=(0,) * gpus, kv_tokens=512)) as engine:
            logits[gpus] = engine.prefill(Prompt.of([[5, 9], image, [7, 300]])).copy()
            (features[gpus],) = engine.features._found.values()
    np.testing.assert_array_equal(features[1], features[2])
    np.testing.assert_allclose(logits[1], logits[2], atol=1e-4 * np.ptp(logits[1]) if split == "tensor" else 0)
