"""Each architecture end to end on the CPU: random tiny models against the numpy reference, and against exact logits of
an independent implementation where these are at hand (../shared/archs)."""

import json
import subprocess
import sys

import numpy as np
import pytest
import reference

from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine import Engine
from mlc_amd.tools.dev.quality import kl_divergence

# Metadata of a tiny model of each architecture; sizes are those of the preset "tiny".
MODELS: dict[str, dict[str, object]] = {
    "gemma2": {"attention.sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "llama": {},
    "qwen2": {},
    "qwen3": {},
}
MAX_KL = {"f16": 2e-5, "q4_0": 1e-3}  # nats: float activations, activations quantized to int8
IDS = np.random.default_rng(7).integers(0, 1024, 90)


@pytest.mark.parametrize("form", MAX_KL)
@pytest.mark.parametrize("name", MODELS)
def test_random_model(tmp_path, name, form):
    """All logits at once, and in chunks and steps behind a cache that was truncated."""
    model = synthetic(f"tiny:{form}", keys={"general.architecture": name} | MODELS[name])
    compile_model(model, "cpu", "native", 128, tmp_path / "model", tuned="none")
    engine, exact = Engine.load(tmp_path / "model"), reference.forward(model, IDS)
    assert kl_divergence(exact, engine.score(IDS)) < MAX_KL[form]
    engine.truncate(10)
    found = {33: engine.prefill(IDS[10:34]), 36: engine.prefill(IDS[34:37])}
    found |= {i: engine.decode(int(IDS[i])) for i in range(37, len(IDS))}
    assert kl_divergence(exact[list(found)], np.stack(list(found.values()))) < MAX_KL[form]


@pytest.mark.parametrize("name", ["gemma2"])
def test_exact_logits(shared, tmp_path, name):
    """A random f16 model against logits that llama.cpp computed from the same weights in float32."""
    folder, path = shared / "archs", tmp_path / "model.gguf"
    facts = json.loads((folder / "refs" / f"{name}-0.json").read_text())
    command = [sys.executable, str(folder / "mkarch.py"), name, str(path), "--variant", "0", "--seed", facts["seed"]]
    subprocess.run([str(part) for part in command], check=True, capture_output=True, cwd=tmp_path)
    exact = np.load(folder / "refs" / f"{name}-0.npz")
    with GGUFModel.open(path) as model:
        compile_model(model, "cpu", "native", 128, tmp_path / "model", tuned="none")
    engine = Engine.load(tmp_path / "model")
    theirs = facts["f16_file_run_vs_ref"]["mean_kl"]
    assert kl_divergence(exact["logits"], engine.score(exact["ids"])[exact["positions"]]) < max(2 * theirs, 2e-5)
    engine.reset()
    logits, start = engine.prefill(exact["ids"][: facts["greedy_prefix"]]), facts["greedy_prefix"]
    for step, (token, margin) in enumerate(zip(facts["greedy_tokens"], facts["greedy_margins"], strict=True)):
        assert margin < 0.05 or int(logits.argmax()) == token, f"step {step} after {start} tokens"
        if margin < 0.05:
            break
        logits = engine.decode(token)
