"""A large image is encoded in pieces, and steps of the decoder come between them: results are the same, to the bit."""

import asyncio
import itertools
import json
import threading

import numpy as np
import pytest
import vision_models
import vulkan_harness
from few_functions import few_functions

from mlc_amd.compiler import plan
from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.gguf.mmproj import VisionFile
from mlc_amd.compiler.models.vision import build
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact.manifest import is_encoder
from mlc_amd.runtime.artifact.manifest_check import ManifestFault, check
from mlc_amd.runtime.artifact.memory import of_manifest
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.images import encoder as encoder_module
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.options import CompileOptions, RunOptions
from mlc_amd.tools.commands import inspect

IDS = [*range(3, 43)]
FUNCTIONS = {
    "cpu": ("decode", "prefill_512", "mixed_512", "score_512"),
    "vulkan": ("decode", "prefill_64", "mixed_512", "score_64"),
}
SIZES = 256, 1024  # patches of functions, fewer than usual
LEAST = 1 << 18  # bytes of a step: for pieces of a small encoder
IMAGE = 18, 16  # patches, more than the smallest function takes


@pytest.fixture(scope="module", params=[("cpu", "native"), ("vulkan", "lavapipe")], ids=["cpu", "lavapipe"])
def engine(request, tmp_path_factory):
    target, arch = request.param
    if target == "vulkan":
        vulkan_harness.gpu()
    folder = tmp_path_factory.mktemp("pieces")
    vision_models.write(folder / "mmproj.gguf", "qwen3vl_merger")
    model = synthetic("tiny-qwen2:f16", keys=vision_models.DECODER | {"block_count": 1})
    model.add_vision(VisionFile(folder / "mmproj.gguf"))
    with few_functions(FUNCTIONS[target]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SIZES", SIZES)
        patch.setattr(plan, "LEAST", LEAST)
        compile_model(model, folder / "model", CompileOptions(target=target, arch=arch, ctx=512))
    with Engine.load(folder / "model", RunOptions(kv_tokens=2048)) as engine:
        yield engine


def picture(seed: int, shape: tuple[int, int] = IMAGE) -> PreparedImage:
    height, width = shape
    pixels = np.random.default_rng(seed).standard_normal((3, 8 * height, 8 * width)).astype(np.float32)
    return PreparedImage.of(pixels, height * width // 4, (height // 2, width // 2), "")


def test_only_functions_that_encode_images_have_their_part_of_the_arena(engine):
    made = engine.artifact.manifest
    spans = {True: [], False: []}
    for name, function in made["functions"].items():
        spans[is_encoder(name)] += [
            (arg[1], arg[1] + int(np.prod(arg[3])) * np.dtype(arg[2]).itemsize)
            for launch in function["launches"]
            for arg in launch["args"]
            if arg[0] == "arena"
        ]
    assert max(end for _, end in spans[False]) <= min(first for first, _ in spans[True])
    assert max(end for _, end in spans[True]) <= made["arena_bytes"] < of_manifest(made).buffers


def in_pieces(engine, image, busy, between):
    """The encoder's features of an image; `between` is called between its pieces."""
    run = engine.features.encoder.pieces([image], lambda: busy)
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value
        between()


@pytest.mark.parametrize("other", [False, True], ids=["steps", "another image"])
def test_features_do_not_depend_on_what_comes_between_pieces(engine, other):
    engine.reset()
    between = Prompt.of([IDS, picture(2), IDS] if other else [IDS])
    logits, image = engine.prefill(between).copy(), picture(1)
    (expected,) = engine.features.encoder.encode([image])
    count = 1

    def step():
        nonlocal count
        count += 1
        engine.reset()
        if count == 3:
            engine.features._found.clear()  # the other image is encoded again, once
        assert (engine.prefill(between) == logits).all()

    (found,) = in_pieces(engine, image, True, step)
    assert count > 2
    assert expected.std() > 0.01 and (found == expected).all()


def test_pieces_are_submitted_together_while_nobody_waits(engine):
    encoder, image, waits = engine.features.encoder, picture(4), []
    for busy, known in ((False, True), (True, True), (True, False)):
        each: list[None] = []
        encoder._written = encoder._written if known else None
        (found,) = in_pieces(engine, image, busy, lambda each=each: each.append(None))
        waits.append(len(each))
        assert (found == encoder.encode([image])[0]).all()
    pieces = {name: len(cut) for name, cut in encoder._cut.items()}
    together, one, further = -(-pieces["image_1024"] // pieces["image_256"]) - 1, pieces["image_1024"], 3
    assert waits == [together, one, one + further]  # inputs of a new shape: positions, angles, places


@pytest.mark.parametrize("engine", [("cpu", "native")], ids=["cpu"], indirect=True)  # GPUs have no part in it
def test_what_depends_on_the_shape_of_an_image_is_computed_by_the_thread_of_its_request(engine, monkeypatch):
    """Not by the one that computes steps, also where the images of more shapes wait than are kept without images."""
    threads, of_steps, encoder = [], [], engine.features.encoder
    images = [picture(number, (2 * number, 12)) for number in range(1, encoder_module._SHAPES + 3)]
    compute, pieces = encoder_module.layout, encoder.pieces

    def layout(*arguments):
        threads.append(threading.current_thread())
        return compute(*arguments)

    def observed(*arguments):
        of_steps.append(threading.current_thread())
        return pieces(*arguments)

    async def answers():
        async for _ in engine.agenerate([Prompt.of([IDS, image]) for image in images], max_tokens=1):
            pass

    monkeypatch.setattr(encoder_module, "layout", layout)
    monkeypatch.setattr(encoder, "pieces", observed)
    asyncio.run(answers())
    assert len(threads) == len(images) and of_steps and not {*threads} & {*of_steps}


def test_images_that_the_encoder_cannot_take_are_refused_before_there_are_answers(engine):
    generation = engine.generate(Prompt.of([IDS, picture(5, (3, 4))]))
    with pytest.raises(UserError, match="squares of 16"):
        next(generation)
    assert not generation.answers


def test_tokens_come_between_pieces(engine, monkeypatch):
    prompts = [IDS, Prompt.of([IDS, picture(3), IDS])]
    expected = [[piece.id for piece in engine.generate(one, max_tokens=32, temperature=0.0)] for one in prompts]
    engine.reset()
    engine.features._found.clear()
    made, calls = [[], []], []
    vision_models.one_piece_a_turn(monkeypatch)

    def counted(run):
        def call(function, *more, **options):
            calls.append(is_encoder(function))
            return run(function, *more, **options)

        return call

    for name in {"run", "start", "start_ahead"} & {*dir(engine.device)}:  # a step is begun by one of them
        monkeypatch.setattr(engine.device, name, counted(getattr(engine.device, name)))
    for piece in engine.generate(prompts, max_tokens=32, temperature=0.0):
        made[piece.index].append(piece.id)
    assert made == expected
    assert sum(calls) > 1 and (True, True) not in itertools.pairwise(calls)


def test_a_function_in_pieces_is_one_for_inspect_and_checked_as_a_whole(engine, capsys):
    made, path = engine.artifact.manifest, engine.artifact.path
    pieces = {name: len(function["launches"]) for name, function in made["functions"].items() if "_1024" in name}
    inspect.run(str(path), options=CompileOptions(), json=True)
    found = json.loads(capsys.readouterr().out)
    (kernel, *_) = (launch["kernel"] for launch in made["functions"]["image_1024"]["launches"])
    assert len(pieces) > 2 and found["launches"]["image_1024"]["launches"] == sum(pieces.values())
    assert next(one["calls"] for one in found["kernels"] if one["name"] == kernel).keys() == {"image_1024"}
    others = {name: function for name, function in made["functions"].items() if name != [*pieces][-1]}
    with pytest.raises(ManifestFault, match="none computes encoded"):
        check({**made, "functions": others}, {**engine.artifact.weights.header})
