"""The models compiled for the CPU against exact logits and llama.cpp's greedy texts."""

import pytest
from samples import sample

from mlc_amd.runtime.engine.engine import Engine
from tests.dev.quality import MODELS, Reference

BUNDLED = "llama-q4_k_m"


@pytest.fixture(params=sample(MODELS, [BUNDLED]))
def case(request, shared, compiled):
    """(engine, reference results) of one model. One of them is the bundled one."""
    name = request.param
    if name == BUNDLED:
        return Engine.load(request.getfixturevalue("demo_artifact")), Reference(shared, name)
    return Engine.load(compiled(shared / "models" / f"{name}.gguf", 512)), Reference(shared, name)


def test_logits_and_perplexity(case):
    engine, expected = case
    found = expected.logits(engine)
    assert found.good, found


def test_greedy_text(case):
    engine, expected = case
    compared, wrong = expected.greedy(engine)
    assert compared and not wrong
