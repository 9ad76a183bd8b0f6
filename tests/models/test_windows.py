"""Models with layers that see the last keys only, and keep no pages for others: any way through the cache has the
logits of the numpy reference, also where pages were released."""

import numpy as np
import pytest
import reference

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools import cli
from tests.dev.quality import kl_divergence

MAX_KL = 2e-5  # nats: float weights and activations
CONTEXT, TOKENS, WINDOW = 8192, 2008, 24
PAGES = 11  # of layers with the window: two for it, eight for the longest chunk's own keys, one for a part of a page
KEYS: dict[str, object] = {
    "general.architecture": "gemma2", "attention.sliding_window": WINDOW, "attention.key_length": 48,
    "attention.value_length": 48, "rope.dimension_count": 48, "context_length": CONTEXT,
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """(engine, ids, exact logits after each id)"""
    model, out = synthetic("tiny:f16", keys=KEYS), tmp_path_factory.mktemp("ring") / "model"
    compile_model(model, out, CompileOptions(target="cpu", ctx=CONTEXT, tuned="none"))
    ids = np.random.default_rng(5).integers(0, 1024, TOKENS)
    return Engine.load(out), ids, reference.forward(model, ids)


def check(exact, found):
    """found: logits by the number of the last id that they follow."""
    assert kl_divergence(exact[list(found)], np.stack(list(found.values()))) < MAX_KL


def test_layers_with_a_window_have_few_pages(case):
    engine, _, _ = case
    pages = {(entry["span"], entry["shape"][0]) for entry in engine.artifact.manifest["kv"]}
    assert pages == {(0, CONTEXT // 64), (WINDOW, PAGES)}


def test_measurements_make_room_for_all_sequences(case, capsys):
    """Each has its own window, however short it is beside the context."""
    folder = str(case[0].artifact.path)
    command = ["bench", folder, "-p", "0", "-n", "2", "-d", "70", "-r", "1", "-np", "24"]
    assert cli.main(command) == 0
    assert "tg2 x 24 @ d70" in capsys.readouterr().out
    assert cli.main([*command, "--kv-memory", "1M"]) == 1
    assert "tg2 x 24 @ d70 needs a KV cache of 3072 tokens of 24 sequences" in capsys.readouterr().err


def test_scores(case):
    engine, ids, exact = case
    engine.reset()
    check(exact, dict(enumerate(engine.score(ids))))


def test_chunks_and_steps(case):
    engine, ids, exact = case
    engine.reset()
    found, edge = {}, 1152  # of a page
    cuts = [1, 5, WINDOW, 65, 130, edge - 70, edge - 6]
    for start, stop in zip([0, *cuts], cuts, strict=False):
        found[stop - 1] = engine.prefill(ids[start:stop])
    for i in range(edge - 6, edge + 6):
        found[i] = engine.decode(int(ids[i]))
    check(exact, found)


@pytest.mark.parametrize("near", [1990, 1984, 1983, 1400, 64, 20])
def test_truncation(case, near):
    """Whatever must be computed again, the result is the same."""
    engine, ids, exact = case
    engine.reset()
    engine.prefill(ids)
    engine.truncate(near)
    assert engine.position == near
    check(exact, {near + 9: engine.prefill(ids[near : near + 10]), near + 10: engine.decode(int(ids[near + 10]))})
    assert engine.match([*ids[: near - 3], 1]) == near - 3
    check(exact, {near: engine.prefill(ids[near - 3 : near + 1])})


def test_several_sequences(case):
    """Each sequence's keys, with and without a window, are its own."""
    engine, ids, exact = case
    engine.reset()
    prompts = [ids[:n] for n in (3, 70, 200, 400)]
    together = [[] for _ in prompts]
    for piece in engine.generate(prompts, max_tokens=8):
        together[piece.index].append(piece.id)
    for prompt, made in zip(prompts, together, strict=True):
        engine.reset()
        assert made == [piece.id for piece in engine.generate(prompt, max_tokens=8)]
        assert made[0] == int(exact[len(prompt) - 1].argmax())
