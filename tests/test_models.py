"""Tensor types in every kind of layer, from GGUF to logits, against the numpy reference."""

import gguf_blocks
import numpy as np
import pytest
import reference

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine import Engine
from mlc_amd.tools.dev.quality import kl_divergence

IDS = np.random.default_rng(7).integers(0, 1024, 40)
MAX_KL = 1e-3  # nats; the quality bar of quantized activations
NAMES = gguf_blocks.DISTINCT
# Four types make a model, of every architecture. Float types are in one model by themselves and beside an integer type.
STARTS = {0: "tiny", 3: "tiny-qwen2", 7: "tiny-qwen3", 11: "tiny", 15: "tiny", 17: "tiny"}
MIXTURES = [(preset, NAMES[start : start + 4]) for start, preset in STARTS.items()]
# By matrix, which of the four types it has in layer 0 and in layer 1. All four are among q, k and v, among gate and up,
# and among what adds to the residual.
LAYERS = {
    "attn_q": (0, 3), "attn_k": (1, 0), "attn_v": (2, 1), "attn_output": (3, 1),
    "ffn_gate": (0, 2), "ffn_up": (1, 3), "ffn_down": (2, 0),
}  # fmt: skip
ENDS = {"token_embd.weight": 2, "output.weight": 3}


def check_against_reference(model, engine: Engine) -> None:
    exact = reference.forward(model, IDS)
    ours = engine.score(IDS)
    assert kl_divergence(exact, ours) < MAX_KL
    engine.reset()
    last = engine.prefill(IDS[:-1]), engine.decode(int(IDS[-1]))
    assert kl_divergence(exact[-2:], np.stack(last)) < MAX_KL


@pytest.mark.parametrize("spec", ["tiny:f16", "tiny:q4_0"])
def test_all_matrices_of_one_type(compiled, spec):
    check_against_reference(synthetic(spec), Engine.load(compiled(spec, 64)))


@pytest.mark.parametrize(("preset", "names"), MIXTURES, ids=["-".join([preset, *names]) for preset, names in MIXTURES])
def test_tensor_types_mix_freely(tmp_path, preset, names):
    """Each type in every kind of layer; q, k and v, gate and up of different ones, integer and float weights side by
    side."""
    model = synthetic(f"{preset}:{names[0]}")
    types = {f"blk.{layer}.{matrix}.weight": names[at[layer]] for matrix, at in LAYERS.items() for layer in range(2)}
    types |= {name: names[at] for name, at in ENDS.items() if name in model.tensors}
    for name, form in types.items():
        model.tensors[name] = synthetic(f"{preset}:{form}").tensors[name]
    assert {name for name, tensor in model.tensors.items() if len(tensor.shape) == 2} == set(types)
    compile_model(model, "cpu", "native", 64, tmp_path / "mixed")
    check_against_reference(model, Engine.load(tmp_path / "mixed"))


def test_every_kind_of_type_is_in_a_mixture():
    assert set().union(*(names for _, names in MIXTURES)) == set(NAMES)
