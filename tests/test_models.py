"""Every architecture and every tensor type, from GGUF to logits, against the numpy reference."""

import numpy as np
import pytest
import reference

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine import Engine
from mlc_amd.schedules.formats import FORMATS

IDS = np.random.default_rng(7).integers(0, 1024, 40)
MAX_KL = 1e-3  # nats; the quality bar of quantized activations


def check_against_reference(model, engine: Engine) -> None:
    exact = reference.forward(model, IDS)
    ours = engine.score(IDS)
    assert reference.kl_divergence(exact, ours) < MAX_KL
    engine.reset()
    last = engine.prefill(IDS[:-1]), engine.decode(int(IDS[-1]))
    assert reference.kl_divergence(exact[-2:], np.stack(last)) < MAX_KL


@pytest.mark.parametrize("spec", ["tiny-qwen2:q4_k", "tiny-qwen3:q6_k"])
def test_architecture(compiled, spec):
    check_against_reference(synthetic(spec), Engine.load(compiled(spec, 64)))


@pytest.mark.parametrize("name", FORMATS)
def test_tensor_type(compiled, name):
    check_against_reference(synthetic(f"tiny:{name}"), Engine.load(compiled(f"tiny:{name}", 64)))


def test_types_mix_freely(tmp_path):
    """Each matrix of a model in another type; q, k and v, gate and up as well, integer and float weights side by side."""
    model = synthetic("tiny:q4_0")
    matrices = [name for name, tensor in model.tensors.items() if len(tensor.shape) == 2]
    for name, form in zip(matrices, list(FORMATS) * 2, strict=False):
        model.tensors[name] = synthetic(f"tiny:{form}").tensors[name]
    assert {model.tensors[name].format for name in matrices} == set(FORMATS)
    compile_model(model, "cpu", "native", 64, tmp_path / "mixed")
    check_against_reference(model, Engine.load(tmp_path / "mixed"))
