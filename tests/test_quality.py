"""The models compiled for the CPU against exact logits and llama.cpp's greedy texts."""

import pytest

from mlc_amd.runtime.engine import Engine
from mlc_amd.tools.dev.quality import MODELS, Reference

SAMPLE = ("llama-q4_k_m", "qwen3-iq4_xs")  # of every run


@pytest.fixture(params=[pytest.param(name, marks=() if name in SAMPLE else pytest.mark.full) for name in MODELS])
def case(request, shared, compiled):
    """(engine, reference results) of one model."""
    name = request.param
    return Engine.load(compiled(shared / "models" / f"{name}.gguf", 512)), Reference(shared, name)


def test_logits_and_perplexity(case):
    engine, expected = case
    found = expected.logits(engine)
    assert found.good, found


def test_greedy_text(case):
    engine, expected = case
    compared, wrong = expected.greedy(engine)
    assert compared and not wrong
