"""Models whose layers keep the last keys only, in a ring: any way through the cache gives the logits of the numpy
reference, behind several turns of the ring, too."""

import numpy as np
import pytest
import reference

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine import Engine
from mlc_amd.tools.dev.quality import kl_divergence

MAX_KL = 2e-5  # nats: float weights and activations
CONTEXT, WINDOW = 2048, 24
PLACES = 576  # of the ring: the window and all but one key of the longest chunk, in whole blocks
KEYS: dict[str, object] = {
    "general.architecture": "gemma2", "attention.sliding_window": WINDOW, "attention.key_length": 48,
    "attention.value_length": 48, "rope.dimension_count": 48,
}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """(engine, ids that nearly fill the context, exact logits behind each id)"""
    model, out = synthetic("tiny:f16", keys=KEYS), tmp_path_factory.mktemp("ring") / "model"
    compile_model(model, "cpu", "native", CONTEXT, out, tuned="none")
    ids = np.random.default_rng(5).integers(0, 1024, CONTEXT - 40)
    return Engine.load(out), ids, reference.forward(model, ids)


def check(exact, found):
    """found: logits by the number of the last id that they are behind."""
    assert kl_divergence(exact[list(found)], np.stack(list(found.values()))) < MAX_KL


def test_the_cache_is_a_ring(case):
    engine, _, _ = case
    manifest = engine.artifact.manifest
    assert manifest["rings"] == [{"places": PLACES, "span": WINDOW}]
    sizes = {entry["name"]: np.prod(entry["shape"]) for entry in manifest["kv"]}
    assert sizes["k.0"] * engine.context == sizes["k.1"] * PLACES


def test_scores(case):
    engine, ids, exact = case
    engine.reset()
    check(exact, dict(enumerate(engine.score(ids))))


def test_chunks_and_steps(case):
    engine, ids, exact = case
    engine.reset()
    found, edge = {}, (len(ids) // PLACES) * PLACES  # where the ring begins anew
    cuts = [1, 5, WINDOW, 65, 130, edge - 70, edge - 6]
    for start, stop in zip([0, *cuts], cuts, strict=False):
        found[stop - 1] = engine.prefill(ids[start:stop])
    for i in range(edge - 6, edge + 6):
        found[i] = engine.decode(int(ids[i]))
    check(exact, found)


def test_truncation(case, monkeypatch):
    """Going back by what the ring has to spare computes nothing again; going back further does, with the same
    result."""
    engine, ids, exact = case
    engine.reset()
    engine.prefill(ids)
    steps, run = [], engine.device.run
    monkeypatch.setattr(engine.device, "run", lambda function: (steps.append(function), run(function)))
    near = len(ids) - (PLACES - WINDOW + 1)
    engine.truncate(near)
    assert not steps and engine.position == near
    check(exact, {near + 9: engine.prefill(ids[near : near + 10]), near + 10: engine.decode(int(ids[near + 10]))})
    steps.clear()
    engine.truncate(near - 1)  # behind the places that were written first, up to the end of `ids`
    assert steps and engine.position == near - 1
    check(exact, {near + 9: engine.prefill(ids[near - 1 : near + 10])})
    assert engine.match([*ids[:near], 1]) == near
    engine.prefill(ids[near:])
    assert engine.match(ids[:50]) == 0 and engine.position == 0
    check(exact, {49: engine.prefill(ids[:50])})
    engine.truncate(20)  # the ring has not turned
    assert engine.position == 20
    steps.clear()
    check(exact, {60: engine.prefill(ids[20:61])})
    assert len(steps) <= 2
