"""The cache on disk with models of every kind of cache, on every device that runs here: what a new process finds is
what was computed, and the tokens that follow are the same."""

import io
import os
import resource
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import further_architectures
import numpy as np
import pytest
import vulkan_harness
from image_cases import picture
from PIL import ImageOps
from samples import sample

from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.cache import page_files
from mlc_amd.runtime.cache.page_files import ABOUT
from mlc_amd.runtime.cache.pages import PAGE
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.options import CompileOptions, RunOptions

IDS = np.random.default_rng(4).integers(0, 1000, 450).tolist()
NEXT = IDS[400:410]
ONE, TWO = RunOptions(threads=2), RunOptions(devices=(0, 0), kv_tokens=1024)
# name -> (target, arch, model, type of the cache, context, options). On the CPU with integer weights, whose products
# do not depend on how many rows a step has.
MODELS = {
    "f16": ("cpu", "native", "tiny:q4_0", "f16", 512, ONE),
    "q8_0": ("cpu", "native", "tiny:q4_0", "q8_0", 512, ONE),
    "states": ("cpu", "native", ("lfm2", "q8_0"), "f16", 512, ONE),
    "windows": ("cpu", "native", ("gemma3", "q8_0"), "f16", 512, ONE),
    "latent": ("cpu", "native", ("deepseek2", "q8_0"), "f16", 512, ONE),
    "states alone": ("cpu", "native", ("mamba2", "q8_0"), "f16", 512, ONE),
    "states and keys": ("cpu", "native", ("falcon-h1", "q8_0"), "f16", 512, ONE),
    "vulkan": ("vulkan", "lavapipe", "tiny:q4_0", "f16", 128, RunOptions(kv_tokens=1024)),
    "two GPUs": ("vulkan", "lavapipe", "tiny:q4_0", "f16", 128, TWO),
}
EVERY = pytest.mark.parametrize("load", sample(MODELS, ["q8_0", "states", "windows", "two GPUs"]), indirect=True)
SOME = pytest.mark.parametrize("load", sample(MODELS, ["states"]), indirect=True)


class Load:
    """Loads a model with its options, and others. prompt: of more than a page."""

    def __init__(self, artifact, options: RunOptions, context: int) -> None:
        self._artifact, self._options, self.prompt = artifact, options, IDS[: context * 3 // 5]

    def __call__(self, **more) -> Engine:
        return Engine.load(self._artifact, RunOptions(**vars(self._options) | more))


@pytest.fixture
def load(request, compiled_for, tmp_path, monkeypatch) -> Load:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, arch, source, kv_type, context, options = MODELS[request.param]
    if target == "vulkan":
        vulkan_harness.gpu()  # skips without a device
    return Load(compiled_for(target, arch, source, context, kv_type), options, context)


def answer(engine, prompt, count=8, **options) -> list[int]:
    return [piece.id for piece in engine.generate(prompt, max_tokens=count, temperature=0.0, **options)]


def scored(engine, prompt) -> list[tuple[int, float | None]]:
    """An answer's tokens with the logarithms of their probabilities."""
    return [(piece.id, piece.logprob) for piece in engine.generate(prompt, max_tokens=8, temperature=0.0, logprobs=0)]


@EVERY
def test_an_answer_continues_in_a_new_process(load):
    with load(cache_disk="1G") as engine:
        following = [*load.prompt, *answer(engine, load.prompt), *NEXT]
        assert engine.last.cached_tokens == 0
        engine.stored._writer.close()  # before the next prompt takes the end of the answer, all is written
        second = scored(engine, following)
        memory = engine.last.cached_tokens
        assert memory == len(following) - len(NEXT) - 1  # the last token of an answer is not computed
    with load(cache_disk="1G") as engine:
        assert scored(engine, following) == second  # bit by bit
        assert engine.last.cached_tokens == memory


@SOME
def test_what_was_evicted_comes_back(load):
    """A cache of one sequence, and another prompt between."""
    with load(cache_disk="1G", kv_tokens=512) as engine:
        first = answer(engine, load.prompt)
        engine.stored._writer.close()  # all is written
        answer(engine, IDS[: -len(load.prompt) : -1])
        assert answer(engine, load.prompt) == first
        assert engine.last.cached_tokens == len(load.prompt) // PAGE * PAGE


@SOME
def test_damage_is_computed_again(load):
    with load(cache_disk="1G") as engine:
        first = answer(engine, load.prompt)
    (folder,) = page_files.folders()
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with load(cache_disk="1G") as engine:
        assert answer(engine, load.prompt) == first and engine.last.cached_tokens == 0
    with load(cache_disk="1G") as engine:
        assert answer(engine, load.prompt) == first and engine.last.cached_tokens


@SOME
def test_a_full_disk_costs_the_disk_only(load, caplog):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with load(cache_disk="1G") as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))  # stands in for a full disk
        try:
            first = answer(engine, load.prompt)
            assert answer(engine, load.prompt) == first
            engine.stored._writer.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    (folder,) = page_files.folders()
    assert [path.name for path in folder.iterdir()] == [ABOUT]
    assert caplog.text.count("cannot write the KV cache") == 1
    with load(cache_disk="1G") as engine:
        assert answer(engine, load.prompt) == first and engine.last.cached_tokens == 0
    assert len(list(folder.iterdir())) > 1


@SOME
def test_others_answer_while_pages_are_read(load):
    with load(cache_disk="1G", kv_tokens=2048) as engine:
        expected = answer(engine, load.prompt), answer(engine, NEXT, 60)
    with load(cache_disk="1G", kv_tokens=2048) as engine:
        found: dict[int, list[int]] = {}
        calls = [partial(answer, engine, NEXT, 60), partial(answer, engine, load.prompt)]
        threads = [threading.Thread(target=lambda i=i, of=of: found.update({i: of()})) for i, of in enumerate(calls)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (found[1], found[0]) == expected


@SOME
def test_clients_that_need_more_than_the_memory(load):
    """Answers are those without a disk, also after some that were cancelled, and no page stays held."""
    prompts = [load.prompt[: len(load.prompt) * i // 6] + IDS[400 - 4 * i : 410] for i in range(6)]
    with load(kv_tokens=4096) as engine:
        expected = [answer(engine, prompt) for prompt in prompts]
    wrong: list[int] = []

    def ask(engine, first: int) -> None:
        for number in [(first + 5 * i) % len(prompts) for i in range(8)]:
            generation, found = engine.generate(prompts[number], max_tokens=8, temperature=0.0), []
            for piece in generation:
                found.append(piece.id)
                if first == 1 and len(found) == 3:
                    generation.close()
            wrong.extend([number] * (found != expected[number][: len(found)]))

    for _ in range(2):
        with load(cache_disk="1G", kv_tokens=512) as engine:
            threads = [threading.Thread(target=ask, args=(engine, first)) for first in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert engine.kv_usage.used == 0
    assert not wrong


@SOME
def test_a_sequence_in_a_file(load, tmp_path):
    path = tmp_path / "saved"
    with load() as engine:
        generation = engine.generate(load.prompt, max_tokens=8, temperature=0.0)
        first = [piece.id for piece in generation]
        following = [*load.prompt, *first, *NEXT]
        size = engine.stored.save(generation.sequences[0], path)
        assert size.tokens == len(load.prompt) + 7 and size.nbytes == path.stat().st_size
        second = answer(engine, following)
    assert not page_files.folders()
    with load() as engine:
        assert engine.stored.open("me", path) == size
        assert answer(engine, following) == second and engine.last.cached_tokens == size.tokens
        engine.stored.erase("me", Prompt([*following, *second]))
        assert answer(engine, following) == second and engine.last.cached_tokens == 0


def test_guesses_continue_in_a_new_process(tmp_path, monkeypatch):
    """The layer that guesses has keys in the same pages."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = CompileOptions(target="cpu", arch="native", ctx=256, tuned="none")
    compile_model(further_architectures.predicting("qwen35"), tmp_path / "model", options)

    def load(**more):
        return Engine.load(tmp_path / "model", RunOptions(threads=2, draft="mtp", **more))

    prompt = IDS[:100]
    with load() as engine:
        first = answer(engine, prompt, 20)
        second = answer(engine, [*prompt, *first, *NEXT], 20)
    with load(cache_disk="1G") as engine:
        assert answer(engine, prompt, 20) == first
    with load(cache_disk="1G") as engine:
        assert answer(engine, [*prompt, *first, *NEXT], 20) == second
        assert engine.last.cached_tokens >= PAGE


def test_an_image_is_not_computed_again(seeing, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def load(**more):
        return Engine.load(seeing, RunOptions(threads=2, **more))

    def asked(engine, image):
        file = io.BytesIO()
        image.save(file, "PNG")
        return answer(engine, engine.images.prompt("What is this? " * 20, [file.getvalue()]))

    image = picture(40, 40)

    with load(cache_disk="1G") as engine:
        first = asked(engine, image)
    with load(cache_disk="1G") as engine:
        assert asked(engine, image) == first and engine.last.cached_tokens >= PAGE
        asked(engine, ImageOps.invert(image))
        assert engine.last.cached_tokens == 0


def test_nothing_of_the_prompt_is_stored(compiled_for, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with Engine.load(compiled_for("cpu", "native", "tiny:q4_0", 512, "f16"), RunOptions(cache_disk="1G")) as engine:
        answer(engine, IDS[:200])
        engine.stored.save(Prompt(IDS[:200]), tmp_path / "saved")
    (folder,) = page_files.folders()
    assert any(path.name != ABOUT for path in folder.iterdir())
    for path in [*folder.iterdir(), tmp_path / "saved"]:
        data = path.read_bytes()
        for kind in (np.int32, np.int64, np.uint16):
            assert np.array(IDS[:4], kind).tobytes() not in data


def test_killed_processes_leave_what_is_right(compiled_for, tmp_path):
    """A share of what tests/dev/fuzz/kill_cache.py tries."""
    artifact = compiled_for("cpu", "native", ("lfm2", "q8_0"), 1024)
    command = [sys.executable, "-m", "tests.dev.fuzz.kill_cache", str(artifact), "--count", "3", "--life", "0.3"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "3 of" in done.stdout, done.stdout + done.stderr
