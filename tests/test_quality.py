"""The compiled models against exact logits and llama.cpp's greedy texts: the reference models that lie beside the repository."""

import json

import numpy as np
import pytest
import reference

from mlc_amd.runtime.engine import Engine

MODELS = (
    "llama-q4_k_m", "llamaspm-q8_0", "qwen2-q4_k_m", "qwen3-f16", "qwen3-iq4_xs", "qwen3-q2_k", "qwen3-q3_k_m", "qwen3-q4_0",
    "qwen3-q4_k_m", "qwen3-q5_0", "qwen3-q5_k_m", "qwen3-q6_k", "qwen3-q8_0",
)  # fmt: skip
TIE = 0.25  # logits; below this margin either token is right


@pytest.fixture(params=MODELS)
def case(request, shared, compiled):
    """(engine, reference arrays, reference facts) of one model."""
    name = request.param
    engine = Engine.load(compiled(shared / "models" / f"{name}.gguf", 512))
    return engine, np.load(shared / "refs" / f"{name}.npz"), json.loads((shared / "refs" / f"{name}.json").read_text())


def test_logits_and_perplexity(case):
    engine, arrays, facts = case
    summary, ids = facts["summary"], arrays["ids"]
    logits = engine.score(ids)
    kl = reference.kl_divergence(arrays["logits"], logits[arrays["positions"]])
    assert kl <= max(1.5 * summary["kl_llamacpp_vs_exact_mean"], 1e-3)
    perplexity = np.exp(-reference.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]].mean())
    assert abs(perplexity / summary["ppl_exact"] - 1) < 0.01


def test_greedy_text(case):
    engine, _, facts = case
    for text in facts["greedy"]:
        engine.reset()
        logits = engine.prefill(text["prompt_ids"])
        for token, margin in zip(text["greedy_ids"], text["margins"], strict=True):
            if margin < TIE:
                break
            assert int(logits.argmax()) == token
            logits = engine.decode(token)
