"""Each architecture end to end on the CPU, against logits of independent implementations.

tests/fixtures/architectures*.npz: of the models in architectures.py, computed in float64 with NumPy from the GGUF files
that `write_gguf` makes of them, by a program that shares nothing with this repository; of those in LLAMACPP, and of
delta nets, by llama.cpp, in float32. ../shared/archs, where it is at hand: other models, by llama.cpp.
"""

import json

import architectures
import encoders
import further_architectures
import numpy as np
import pytest
import vulkan_harness
from few_functions import few_functions
from samples import sample

from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.models import registry
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from tests.dev.quality import kl_divergence

EXACT = architectures.exact()
IDS, POSITIONS = EXACT["ids"], EXACT["positions"]
MAX_KL = 2e-5  # nats
MAX_GPU_KL, MAX_GPU_CHANGE = 2e-4, 5e-3
MAX_CHANGE = 2e-3  # of the logits' range, however the tokens come


# Of decoders that are others put together anew, those with a part of their own
PARTS = {
    "afmoe", "arctic", "bloom", "cohere2moe", "dbrx", "deci", "deepseek32", "deepseek4", "falcon", "gpt2", "hy_v3",
    "hy_v4", "kimi-k3", "laguna", "mamba", "minimax-01", "minimax-m3", "muse-glimmer", "olmo", "openelm", "plamo3",
    "qwen4exp", "smallthinker", "stablelm", "step35",
}  # fmt: skip
KEPT = [name for name in architectures.MODELS if name not in architectures.LLAMACPP or name in PARTS]


@pytest.mark.parametrize("name", sample(architectures.MODELS, KEPT))
def test_logits(tmp_path, name):
    """All at once, and in chunks and steps after a cache that was truncated, across the edge of a window."""
    with few_functions(("decode", "prefill_128", "score_128")):  # test_operators.py has all operators of the others
        compile_model(architectures.tiny(name), tmp_path / "model", CompileOptions(target="cpu", ctx=128, tuned="none"))
    engine = Engine.load(tmp_path / "model")
    logits = engine.score(IDS)
    assert kl_divergence(EXACT[name], logits[POSITIONS]) < MAX_KL
    engine.truncate(10)
    found = {33: engine.prefill(IDS[10:34]), 36: engine.prefill(IDS[34:37])}
    found |= {i: engine.decode(int(IDS[i])) for i in range(37, len(IDS))}
    change = np.abs(np.stack(list(found.values())) - logits[list(found)]).max()
    assert change < MAX_CHANGE * (logits.max() - logits.min())


# with operators, or parts of them, that others do not have
ON_GPUS = (
    "bailingmoe3", "bloom", "deepseek32", "deepseek4", "dots3note", "grovemoe", "hy_v4", "kimi-k3", "mamba", "maple",
    "mimo2", "minimax-01", "minimax-m3", "qwen4exp",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", ON_GPUS)
def test_on_a_vulkan_device(tmp_path, name):
    """As `test_logits`."""
    vulkan_harness.gpu()
    options = CompileOptions(target="vulkan", arch="auto", ctx=128, tuned="none")
    compile_model(architectures.tiny(name), tmp_path / "model", options)
    with Engine.load(tmp_path / "model") as engine:
        logits = engine.score(IDS)
        assert kl_divergence(EXACT[name], logits[POSITIONS]) < MAX_GPU_KL
        engine.truncate(10)
        later = engine.prefill(IDS[10:50]), *(engine.decode(int(i)) for i in IDS[50:])
        change = np.abs(np.stack(later) - logits[49:]).max()
        assert change < MAX_GPU_CHANGE * (logits.max() - logits.min())


def test_every_architecture_is_tested():
    of_encoders = {architecture for architecture, _, _ in encoders.MODELS.values()}
    tested = of_encoders | {architectures.architecture_of(name) for name in architectures.MODELS}
    assert set(registry.architectures()) == tested


REFERENCES = sorted(
    (registry.architectures().keys() & architectures.MODELS.keys())
    - architectures.SAME_TEXT.keys()
    - architectures.LLAMACPP.keys()
    - {"ernie4_5", "gemma", "granitemoe", "olmoe", "qwen2", "qwen3"}
)  # that ../shared/archs has


@pytest.mark.full
@pytest.mark.parametrize("name", REFERENCES)
def test_exact_logits(shared, tmp_path, name):
    """A random f16 model against logits that llama.cpp computed from the same weights in float32."""
    path = tmp_path / "model.gguf"
    facts, exact = further_architectures.referenced(shared, name, path)
    with GGUFModel.open(path) as model:
        # the references' context: it decides between RoPE's factors for short and for long ones
        compile_model(model, tmp_path / "model", CompileOptions(target="cpu", ctx=512, tuned="none"))
    engine = Engine.load(tmp_path / "model")
    theirs = facts["f16_file_run_vs_ref"]["mean_kl"]
    assert kl_divergence(exact["logits"], engine.score(exact["ids"])[exact["positions"]]) < max(2 * theirs, MAX_KL)
    engine.reset()
    logits, start = engine.prefill(exact["ids"][: facts["greedy_prefix"]]), facts["greedy_prefix"]
    for step, (token, margin) in enumerate(zip(facts["greedy_tokens"], facts["greedy_margins"], strict=True)):
        assert margin < 0.05 or int(logits.argmax()) == token, f"step {step} after {start} tokens"
        if margin < 0.05:
            break
        logits = engine.decode(token)


QUANTIZED = ["gemma3", "gemma4", "lfm2", "mistral3", "olmo2", "phi3", "qwen35"]  # that ../shared/archs has in q8_0


@pytest.mark.full
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_logits(shared, tmp_path, name):
    """Against exact logits of the weights that the quantized file stands for, as near as llama.cpp comes."""
    refs = shared / "archs" / "refs"
    exact = np.load(refs / f"{name}-0-q8_0.npz")
    theirs = json.loads((refs / f"{name}-0-q8_0.json").read_text())["llamacpp_on_quantized_vs_ref"]["mean_kl"]
    with GGUFModel.open(refs / f"{name}-0-q8_0.gguf") as model:
        compile_model(model, tmp_path / "model", CompileOptions(target="cpu", ctx=512, tuned="none"))
    logits = Engine.load(tmp_path / "model").score(exact["ids"])
    assert kl_divergence(exact["logits"], logits[exact["positions"]]) < max(1.5 * theirs, 1e-3)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen3moe", {"expert_count": 0}, "expert_count is 0, expected an integer >= 1"),
        ("qwen3moe", {"expert_used_count": 9}, "uses 9 of 8 experts"),
        ("qwen3moe", {"expert_used_count": 0}, "expert_used_count is 0"),
        ("glm4moe", {"expert_gating_func": 7}, "gating function 7 is not supported; supported are 1 .softmax"),
        ("glm4moe", {"nextn_predict_layers": 2}, "all 2 layers are for multi-token prediction"),
        ("gpt-oss", {"attention.sliding_window": 0}, "sliding_window is 0"),
        ("gemma4", {"attention.sliding_window_pattern": [True]}, "expected a list of 4 flags"),
        ("gemma4", {"attention.head_count_kv": [1, 2]}, "has 2 entries, the model has 4 layers"),
        ("gemma4", {"attention.shared_kv_layers": 4}, "4 of 4 layers share keys and values"),
        ("gemma4", {"attention.shared_kv_layers": 3}, "which is of another kind"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("lfm2", {"shortconv.l_cache": 100}, "l_cache is 100, expected an integer >= 2 and <= 16"),
        ("qwen35", {"ssm.group_count": 5}, r"value heads \(6\) must be a multiple of key heads \(5\)"),
        ("qwen35", {"ssm.state_size": 40}, r"columns of a head of delta nets \(40\) must be a multiple of 16"),
        ("qwen35", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("kimi-linear", {"kda.head_dim": 40}, r"columns of a head of delta nets \(40\) must be a multiple of 16"),
        ("kimi-linear", {"attention.head_count_kv": [1, 0]}, "has 2 entries, the model has 4 layers"),
        (
            "glm-dsa",
            {"rope.dimension_count": 48, "attention.indexer.key_length": 32},
            "keys have 32 columns, of which 48 rotate",
        ),
        ("qwen4exp", {"hyper_connection.count": 9}, "count is 9, expected an integer >= 1 and <= 8"),
    ],
)
def test_metadata_that_makes_no_sense(monkeypatch, name, keys, message):
    own, tensors = architectures.MODELS[name]
    monkeypatch.setitem(architectures.MODELS, name, (own | keys, tensors))
    with pytest.raises(UserError, match=message):
        architectures.tiny(name)
