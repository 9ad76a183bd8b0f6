"""Rows of images in decoders and engines. An image of one row whose features are a token's embedding is that token: so
logits are those of the text, to the bit. Images of llama.cpp's cases, with its features, where they are beside the
repository (`test_vision.py` has the encoders)."""

import asyncio
import hashlib
import itertools
import json
from dataclasses import replace

import architectures
import numpy as np
import pytest
import vision_models
from samples import sample

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images.features import Features
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.rows import Prompt, row_tokens
from mlc_amd.runtime.options import CompileOptions, RunOptions
from tests.dev.quality import kl_divergence

MAX_KL = 2e-5
IDS = [5, 9, 700, 31, 8, 9, 700, 31, 64, 3]  # with a repetition
SECTIONS = {"rope.dimension_sections": [6, 5, 5, 0]}
MODELS: dict[str, tuple[dict, int]] = {  # keys, layers of deepstack
    "qwen2": ({}, 0),
    "qwen2vl": (SECTIONS, 0),
    "qwen3vl": (SECTIONS, 2),
    "gemma3": ({"attention.sliding_window": 24, "attention.sliding_window_pattern": 2}, 0),
}


def image_of(features: np.ndarray, grid: tuple[int, int] | None = None) -> PreparedImage:
    key = hashlib.blake2b(features.tobytes(), digest_size=16).digest()
    return PreparedImage(np.zeros((3, 1, 1), np.float32), len(features), grid or (1, len(features)), key)


class Encoder:
    """Of images whose features are known; a piece for each, after which `between` is called."""

    def __init__(self):
        self.known, self.encoded, self.between = {}, [], lambda: None

    def image(self, features: np.ndarray, grid=None) -> PreparedImage:
        made = image_of(features, grid)
        self.known[made.key] = features
        return made

    def prepare(self, image):
        pass

    def pieces(self, images, busy):
        for image in images:
            self.encoded.append(image.key)
            self.between()
            yield
        return [self.known[image.key] for image in images]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """opened(name) -> (engine, its encoder, token number -> features of one row)"""
    made = {}

    def get(name):
        if name not in made:
            keys, layers = MODELS[name]
            model = synthetic("tiny-qwen2:f32", keys={"general.architecture": name, **keys})
            model.features = model.config.hidden * (1 + layers)
            out = tmp_path_factory.mktemp(name) / "model"
            compile_model(model, out, CompileOptions(target="cpu", ctx=512, tuned="none"))
            table = model.tensors["token_embd.weight"].dequantize() * model.config.embedding_scale
            engine = Engine.load(out, RunOptions(kv_tokens=2048))
            made[name] = engine, table.astype(np.float32), layers
        engine, table, layers = made[name]
        encoder = Encoder()
        engine.reset()
        engine.features = engine._runner.images = engine._loop._works[0]._features = Features(encoder)
        engine._loop.scheduler.admission.has_features = engine.features.__contains__

        def features(*tokens):
            return np.concatenate(
                [table[list(tokens)]] + [np.zeros((len(tokens), table.shape[1]), np.float32)] * layers, 1
            )

        return engine, encoder, features

    yield get
    for engine, *_ in made.values():
        engine.close()


def tokens_of(engine, prompt, count=8, **options) -> list[int]:
    return [piece.id for piece in engine.generate(prompt, max_tokens=count, temperature=0.0, **options)]


@pytest.mark.parametrize("name", MODELS)
def test_rows_with_the_features_of_tokens_are_these_tokens(opened, name):
    engine, encoder, features = opened(name)
    exact = engine.prefill(IDS)
    expected = tokens_of(engine, IDS)
    images = [encoder.image(features(token)) for token in IDS[2:6]]
    prompt = Prompt.of([IDS[:2], *images, IDS[6:]])
    engine.reset()
    assert (engine.prefill(prompt) == exact).all()
    assert tokens_of(engine, prompt) == expected
    assert len(encoder.encoded) == 4
    last = Prompt.of([IDS[:-1], encoder.image(features(IDS[-1]))])  # it is the row that answers
    assert tokens_of(engine, last) == expected


@pytest.mark.parametrize("name", ["qwen2vl", "gemma3"])
def test_rows_of_one_image_are_not_those_of_a_text(opened, name):
    """By their places, or as they see one another; and features count."""
    engine, encoder, features = opened(name)
    exact = engine.prefill(IDS)
    engine.reset()
    whole = engine.prefill(Prompt.of([IDS[:2], encoder.image(features(*IDS[2:6])), IDS[6:]]))
    assert np.abs(whole - exact).max() > 1e-3
    if name == "gemma3":
        return
    engine.reset()
    square = engine.prefill(Prompt.of([IDS[:2], encoder.image(features(*IDS[2:6]), (2, 2)), IDS[6:]]))
    assert np.abs(whole - square).max() > 1e-3


def test_rows_in_sequence_have_the_places_of_tokens(tmp_path):
    """Where the decoder's RoPE has sections and the encoder's rows are in no grid, as MiniCPM-V 4.6 has them."""
    vision_models.write(tmp_path / "mmproj.gguf", "gemma3")
    keys = {"general.architecture": "qwen2vl", **SECTIONS, **vision_models.DECODER}
    model = synthetic("tiny-qwen2:f32", keys=keys)
    model.add_vision(VisionFile(tmp_path / "mmproj.gguf"))
    compile_model(model, tmp_path / "model", CompileOptions(target="cpu", ctx=64, tuned="none"))
    table, encoder = model.tensors["token_embd.weight"].dequantize().astype(np.float32), Encoder()
    with Engine.load(tmp_path / "model") as engine:
        exact = engine.prefill(IDS).copy()
        engine.reset()
        engine.features = engine._runner.images = engine._loop._works[0]._features = Features(encoder)
        image = encoder.image(table[IDS[2:6]])
        assert (engine.prefill(Prompt.of([IDS[:2], image, IDS[6:]])) == exact).all()


def test_deepstack_joins_the_rows_of_images_only(opened):
    engine, encoder, features = opened("qwen3vl")
    exact, hidden = engine.prefill(IDS), engine.config["hidden"]
    changed = features(IDS[2])
    changed[:, hidden:] = 1.0
    engine.reset()
    assert np.abs(engine.prefill(Prompt.of([IDS[:2], encoder.image(changed), IDS[3:]])) - exact).max() > 1e-3
    engine.reset()
    assert (engine.prefill(IDS) == exact).all()  # whatever the last step's features were


@pytest.mark.parametrize("name", ["qwen2", "qwen2vl", "gemma3"])
def test_an_image_in_the_cache_is_not_encoded_again(opened, name):
    engine, encoder, features = opened(name)
    picture = encoder.image(features(*range(100, 230)), (10, 13))
    first = Prompt.of([IDS, picture, IDS])
    answer = tokens_of(engine, first)
    assert len(encoder.encoded) == 1
    engine.features._found.clear()  # of other images in between
    assert tokens_of(engine, Prompt.of([IDS, picture, IDS, answer, IDS]), 2)
    assert engine.last.cached_tokens >= len(first)
    assert tokens_of(engine, first) == answer
    assert len(encoder.encoded) == 1
    other = Prompt.of([IDS, encoder.image(features(*range(300, 430)), (10, 13)), IDS])
    assert tokens_of(engine, other)
    assert engine.last.cached_tokens < len(IDS) + 1
    assert len(encoder.encoded) == 2


def test_a_part_of_an_image_that_sees_itself_is_computed_again(opened):
    """A prefix that ends within the image begins before it."""
    engine, encoder, features = opened("gemma3")
    picture = encoder.image(features(*range(100, 230)))
    prompt = Prompt.of([[7] * 40, picture, IDS])
    expected = tokens_of(engine, prompt)
    sequence = engine.cache.sequence(prompt)
    assert sequence.match(100) in range(41)
    sequence.free()
    assert tokens_of(engine, prompt) == expected
    with pytest.raises(UserError, match="too large: this model takes images of up to"):
        list(engine.generate(Prompt.of([encoder.image(np.zeros((600, features(1).shape[1]), np.float32)), IDS])))


@pytest.mark.parametrize("name", ["qwen2vl", "gemma3"])
def test_answers_go_on_while_images_are_encoded(opened, name, monkeypatch):
    vision_models.one_piece_a_turn(monkeypatch)
    engine, encoder, features = opened(name)
    pictures = [encoder.image(features(*range(n, n + 30)), (5, 6)) for n in (100, 200, 300, 400)]
    prompts = [[3, 4, 5], Prompt.of([IDS, *pictures, IDS]), Prompt.of([pictures[0], IDS])]
    expected = [tokens_of(engine, prompt, 24) for prompt in prompts]
    engine.reset()
    engine.features._found.clear()
    encoder.encoded.clear()
    made, counts = [[], [], []], []
    encoder.between = lambda: counts.append(len(made[0]))
    for piece in engine.generate(prompts, max_tokens=24, temperature=0.0):
        made[piece.index].append(piece.id)
    assert made == expected
    assert len(encoder.encoded) == 4
    assert min(np.diff(counts)) >= 1  # tokens between each two pieces


def test_prompts_of_others_go_on_while_images_are_encoded(opened, monkeypatch):
    """Also before there are answers."""
    engine, encoder, features = opened("qwen2vl")
    scheduler, log = engine._loop.scheduler, []
    plan = scheduler.plan

    def planned():
        if (step := plan()) and step.chunk and step.chunk.request.client == "text":
            log.append("chunk")
        return step

    monkeypatch.setattr(scheduler, "plan", planned)
    monkeypatch.setattr(scheduler.admission, "limits", replace(scheduler.admission.limits, chunk=64, sizes=(64,)))
    encoder.between = lambda: log.append("piece")
    pictures = [encoder.image(features(*range(n, n + 30)), (5, 6)) for n in range(100, 900, 100)]
    prompts = {"images": Prompt.of([IDS, *pictures, IDS]), "text": [*range(3, 403)]}

    async def answer(client):
        async for _ in engine.agenerate(prompts[client], max_tokens=4, client=client):
            pass

    async def answers():
        await asyncio.gather(*map(answer, prompts))

    asyncio.run(answers())
    runs = [what for what, _ in itertools.groupby(log)]
    both = log[log.index(runs[1]) - 1 :]  # from when the later request is there
    assert both[:5] == [*runs[:2] * 2, runs[0]]


def test_images_of_a_cancelled_request_are_not_encoded_further(opened, monkeypatch):
    vision_models.one_piece_a_turn(monkeypatch)
    engine, encoder, features = opened("qwen2vl")
    scheduler, work = engine._loop.scheduler, engine._loop._works[0]
    pictures = [encoder.image(features(*range(n, n + 30)), (5, 6)) for n in (100, 200, 300, 400)]
    seen, expected = Prompt.of([IDS, pictures[1], IDS]), tokens_of(engine, [3, 4, 5], 24)
    encoder.between = lambda: len(encoder.encoded) == 2 and scheduler.cancel(work._requests[0])
    made = [[], []]
    for piece in engine.generate([[3, 4, 5], Prompt.of([IDS, *pictures, IDS])], max_tokens=24, temperature=0.0):
        made[piece.index].append(piece.id)
    assert made == [expected, []]
    assert len(encoder.encoded) == 2 and not work.waits and pictures[1] not in engine.features
    encoder.between = lambda: None
    assert len(tokens_of(engine, seen)) == 8  # those of the next request are
    assert len(encoder.encoded) == 3 and not work.waits


def test_guesses_are_no_rows_of_images(opened):
    engine, encoder, features = opened("qwen2vl")
    picture = encoder.image(features(*range(100, 160)), (6, 10))
    prompt = Prompt.of([IDS[:4], picture, IDS[:4]])  # what followed these tokens was an image
    expected = tokens_of(engine, prompt, 16, repetition_penalty=1.1)
    from mlc_amd.runtime.speculation.prompt_lookup import PromptLookup

    engine.speculate(PromptLookup())
    try:
        assert tokens_of(engine, prompt, 16, repetition_penalty=1.1) == expected
    finally:
        engine.speculate(None)


def test_an_encoder_that_fails_ends_the_answers_that_need_it(opened):
    engine, encoder, features = opened("qwen2")
    picture = encoder.image(features(*range(30)))
    encoder.known.clear()

    async def both():
        good = engine.agenerate(IDS, max_tokens=8, temperature=0.0)
        bad = engine.agenerate(Prompt.of([picture, IDS]), max_tokens=8)
        found = [piece.id async for piece in good]
        with pytest.raises(KeyError):
            [piece async for piece in bad]
        return found

    assert asyncio.run(both()) == tokens_of(engine, IDS)
    engine.features.encoder = None
    with pytest.raises(UserError, match="takes no images"):
        list(engine.generate(Prompt.of([picture, IDS])))


def test_ids_below_zero_are_images_of_the_prompt_only(opened):
    engine, encoder, features = opened("qwen2")
    picture = encoder.image(features(1, 2))
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.generate(row_tokens(picture))


def test_models_without_an_encoder_take_no_images(demo_artifact):
    with Engine.load(demo_artifact) as engine, pytest.raises(UserError, match="compiled without an encoder"):
        engine.generate(Prompt.of([image_of(np.zeros((4, 8), np.float32))]))


def test_without_an_encoder_sections_change_nothing(tmp_path):
    """Text has the same angles in all sections; there are no further kernels and buffers."""
    manifests, logits = [], []
    for name, keys in (("qwen2", {}), ("qwen2vl", SECTIONS)):
        model = synthetic(
            "tiny-qwen2:q4_0", keys={"general.architecture": name, **keys}, tensors=architectures.QKV_BIAS
        )
        compile_model(model, tmp_path / name, CompileOptions(target="cpu", ctx=128, tuned="none"))
        with Engine.load(tmp_path / name) as engine:
            manifests.append(engine.artifact.manifest)
            logits.append(engine.prefill(IDS))
    assert all(manifests[0][key] == manifests[1][key] for key in ("functions", "io", "kernels", "kv"))
    assert (logits[0] == logits[1]).all()


CASES = ("gemma3", "gemma4v", "glm4v", "idefics3", "internvl", "janus_pro", "lfm2", "lightonocr", "llama4",
         "llava_next", "mlp", "pixtral", "pixtral_merge", "qwen25vl", "qwen2vl", "qwen3vl")  # fmt: skip


@pytest.mark.parametrize("kv", sample(["f16", "q8_0"], ["f16"]))
@pytest.mark.parametrize("name", sample(list(CASES), ["gemma3", "qwen3vl"]))
def test_logits_after_images_are_those_of_llama_cpp(shared, tmp_path, name, kv):
    folder = shared / "tools" / "llamacpp" / "vision_refs" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    runs = json.loads((folder / "info.json").read_text())["runs"]
    model = GGUFModel.open(folder / "text.gguf")
    if kv == "q8_0" and model.config.layers[0].attention and model.config.layers[0].attention.head_dim % 32:
        pytest.skip("heads of 16 columns have no blocks of 32")
    model.features = next(iter(runs.values()))["n_embd_inp"]
    compile_model(model, tmp_path / "model", CompileOptions(target="cpu", ctx=1024, kv_type=kv, tuned="none"))
    with Engine.load(tmp_path / "model") as engine:
        for number, run in zip(("1", "2"), runs.values(), strict=False):
            features = np.fromfile(folder / f"embd{number}.f32", np.float32).reshape(-1, run["n_embd_inp"])
            pieces, done = [], 0
            for chunk in run["chunks"]:
                if chunk["kind"] == "text":
                    pieces.append(chunk["tokens"])
                    continue
                count = chunk["n_tokens"]
                grid = tuple(max(chunk[axis]) - chunk[axis][0] + 1 for axis in "yx") if run["mrope"] else None
                pieces.append(image_of(features[done : done + count], grid))
                engine.features.add(pieces[-1], features[done : done + count])
                done += count
            first = next(i for i, piece in enumerate(pieces) if isinstance(piece, PreparedImage))
            engine.reset()
            found = []
            for i, piece in enumerate(pieces):
                if isinstance(piece, PreparedImage):
                    engine.advance(Prompt.of([piece]))
                else:
                    found += [engine.score(piece)] if i > first else [engine.advance(piece)][:0]
            exact = np.fromfile(folder / f"logits{number}.f32", np.float32).reshape(-1, run["n_vocab"])
            assert kl_divergence(exact, np.concatenate(found)) < MAX_KL
