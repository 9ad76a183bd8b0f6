"""Tensor types in every kind of layer, from GGUF to logits, against the numpy reference."""

import gguf_blocks
import numpy as np
import pytest
import reference
from few_functions import few_functions
from samples import sample

from mlc_amd.compiler.gguf import synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import CompileOptions
from tests.dev.quality import kl_divergence

IDS = np.random.default_rng(7).integers(0, 1024, 40)
MAX_KL = 1e-3  # nats; the quality bar of quantized activations
NAMES = gguf_blocks.DISTINCT
# Float types are in one model by themselves and beside an integer type. Every run has each of the others, nine in a
# model of one layer; `make test-all` each in every kind of layer, four in a model.
SHORT = [("tiny", NAMES[:4]), ("tiny", NAMES[3:12]), ("tiny", NAMES[12:])]
STARTS = {3: "tiny-qwen2", 7: "tiny-qwen3", 11: "tiny", 15: "tiny", 17: "tiny"}
MIXTURES = SHORT + [(preset, NAMES[start : start + 4]) for start, preset in STARTS.items()]
# By matrix, which of the types it has in layer 0 and in layer 1. Of four types all are among q, k and v, among gate and
# up, and among what adds to the residual.
FOUR = {
    "attn_q": (0, 3), "attn_k": (1, 0), "attn_v": (2, 1), "attn_output": (3, 1),
    "ffn_gate": (0, 2), "ffn_up": (1, 3), "ffn_down": (2, 0),
}  # fmt: skip
# Types 0, which other tests have, too, are those of embeddings.
NINE = {
    "attn_q": (1,), "attn_k": (3,), "attn_v": (4,), "attn_output": (5,), "ffn_gate": (6,), "ffn_up": (7,),
    "ffn_down": (8,),
}  # fmt: skip


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


@pytest.mark.parametrize(("preset", "names"), sample(MIXTURES, SHORT), ids=["-".join([p, *n]) for p, n in MIXTURES])
def test_tensor_types_mix_freely(tmp_path, preset, names):
    """q, k and v, gate and up of different types, integer and float weights side by side."""
    places, (embedding, output) = (FOUR, (2, 3)) if len(names) == 4 else (NINE, (0, 2))
    keys: dict[str, object] = {"block_count": len(places["attn_q"])}
    model = synthetic(f"{preset}:{names[0]}", keys=keys)
    types = {f"blk.{i}.{matrix}.weight": names[at[i]] for matrix, at in places.items() for i in range(len(at))}
    ends = {"token_embd.weight": names[embedding], "output.weight": names[output]}
    types |= {name: form for name, form in ends.items() if name in model.tensors}
    for name, form in types.items():
        model.tensors[name] = synthetic(f"{preset}:{form}", keys=keys).tensors[name]
    assert {name for name, tensor in model.tensors.items() if len(tensor.shape) == 2} == set(types)
    with few_functions():
        compile_model(model, tmp_path / "mixed", CompileOptions(target="cpu", ctx=64))
    check_against_reference(model, Engine.load(tmp_path / "mixed"))


def test_every_kind_of_type_is_in_a_mixture():
    for mixtures in (SHORT, MIXTURES[:1] + MIXTURES[3:]):
        assert set().union(*(names for _, names in mixtures)) == set(NAMES)
    assert all(len(names) in (4, 9) for _, names in MIXTURES)
    assert {at for (at,) in NINE.values()} | {0, 2} == set(range(9))
