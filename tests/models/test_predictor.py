"""Layers of multi-token prediction: guesses are those of the formula, and answers do not depend on them.

tests/fixtures/predictor.npz: of the models in further_architectures.PREDICTING, after the tokens `ids` and
"<name> next", the logits of four guesses, each made after the one before, computed in float64 with NumPy from the
GGUF files that `write_gguf` makes of the models, by a program that shares nothing with this repository.
"""

from pathlib import Path

import further_architectures
import numpy as np
import pytest
import vulkan_harness
from residues import Residues

from mlc_amd.compiler.gguf import GGUFModel
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.models.registry import read_config
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.sampled_rows import GREEDY
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions, RunOptions
from tests.runtime.engine.test_speculation import follow_prompt, guess_always

EXACT = np.load(Path(__file__).parents[1] / "fixtures" / "predictor.npz")
IDS = EXACT["ids"].tolist()
MAX_CHANGE = 2e-3  # of the logits' range
CASES = [("qwen35", "cpu"), *(pytest.param((name, "cpu"), marks=pytest.mark.full) for name in ("glm4moe", "deepseek2"))]
CASES.append(pytest.param(("glm4moe", "vulkan"), marks=pytest.mark.full))


def load(model, target, out, context=256):
    compile_model(
        model,
        out,
        CompileOptions(target=target, arch="native" if target == "cpu" else "generic", ctx=context, tuned="none"),
    )
    return Engine.load(out)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request, tmp_path_factory):
    """(name, engine)"""
    name, target = request.param
    if target == "vulkan":
        vulkan_harness.gpu()  # skips without a device
    with load(further_architectures.predicting(name), target, tmp_path_factory.mktemp("predictor") / "model") as engine:
        yield name, engine


def test_guesses_are_those_of_the_formula(case):
    """The prompt in a chunk, then a chunk and single rows, one of them a wrong guess."""
    name, engine = case
    engine.reset()
    runner, own, expected = engine._runner, engine._own, EXACT[name]

    def check(guess, depth):
        logits = engine.device.read("logits", 1)[0, : engine.vocab]
        assert np.abs(logits - expected[depth]).max() < MAX_CHANGE * np.ptp(expected[depth])
        assert guess == expected[depth].argmax()

    follow_prompt(engine, IDS, (40, 28))
    for token, following in ((IDS[68], [IDS[69], 3]), (IDS[69], [EXACT[f"{name} next"]])):
        assert own.reserve(1, len(following) - 1)
        engine.cache.assign_slots([own])
        runner.sample(own.rows([token, *following[:-1]]), None, [GREEDY] * len(following))
        guesses = runner.follow(following)
        own.advance(1, len(following) - 1)
    check(guesses[0], 0)
    for depth in (1, 2, 3):
        guesses = runner.chain([(guesses[0], own.computed - 1 + depth, own.table_row)], [0])
        check(guesses[0], depth)


def answers(engine, **options):
    engine.reset()
    found: dict[int, list[int]] = {}
    for piece in engine.generate([IDS[:40], IDS[:3], IDS[20:]], max_tokens=30, **options):
        found.setdefault(piece.index, []).append(piece.id)
    return found


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "top_k": 5}], ids=str)
def test_answers_do_not_depend_on_guesses(case, options, constrained):
    _, engine = case
    if constrained:
        options = options | {"constraint": lambda: Residues(engine.vocab, engine.tokenizer.end_ids)}
    engine.speculate(None)
    expected = answers(engine, **options)
    guess_always(engine)
    assert answers(engine, **options) == expected
    assert engine.guesses.drafted
    engine.speculate(None)


class Clock:
    """Stands in for the time that functions of a device take: seconds of a step, of following one, of each guess after
    the first."""

    def __init__(self, engine, monkeypatch, step=1.0, follow=0.25, chain=0.25):
        self.seconds, self.calls, run = 0.0, [], engine.device.run

        def timed(name, meanwhile=None):
            kind = next((kind for kind in ("follow", "chain") if name.startswith(kind)), "step")
            self.calls.append(kind)
            self.seconds += {"step": step, "follow": follow, "chain": chain}[kind]
            run(name, meanwhile)

        monkeypatch.setattr(engine.device, "run", timed)
        monkeypatch.setattr(engine._loop, "clock", lambda: self.seconds)


def test_a_layer_that_guesses_wrong_costs_little(tmp_path, monkeypatch):
    """It is not computed after each step, but is tried again, and the answer is the same."""
    took, found = [], []
    with load(successor(-1), "cpu", tmp_path / "model", 1024) as engine:
        for drafter in (None, engine.own_draft()):
            engine.speculate(drafter)
            with monkeypatch.context() as patch:
                clock = Clock(engine, patch, follow=0.15)
                found.append([piece.id for piece in engine.generate([IDS[:3]], max_tokens=700, temperature=0.0)])
            took.append(clock.seconds)
        counts = engine.guesses
    assert found[0] == found[1] and len(found[0]) > 500
    assert counts.drafted > 10 and not counts.accepted
    assert took[1] < 1.03 * took[0]
    follows = [i for i, kind in enumerate(clock.calls) if kind == "follow"]
    assert len(follows) < len(found[0]) / 8 and follows[-1] > len(clock.calls) / 2


def successor(passed: float = 1.0) -> GGUFModel:
    """Every token is followed by its successor, whatever stands before it: layers add nothing, the last matrix has the
    embedding of token t as row t + 1, and the predicting layer passes the embedding on, times `passed`."""
    model = further_architectures.predicting("qwen35")
    stored, hidden = dict(model.stored), model.config.hidden

    def put(name, matrix):
        rows = np.ascontiguousarray(matrix, np.float16).view(np.uint8)
        stored[name] = Tensor(name, "f16", matrix.shape, lambda start, stop: rows[start:stop])

    for name, tensor in model.stored.items():
        if name.endswith(("ffn_down.weight", "attn_output.weight", "ssm_out.weight")):
            put(name, np.zeros(tensor.shape))
    put("blk.2.nextn.eh_proj.weight", passed * np.eye(hidden, 2 * hidden))
    put("output.weight", np.roll(model.stored["token_embd.weight"].dequantize().reshape(-1, hidden), 1, 0))
    return GGUFModel("successor", model.metadata, stored, read_config(model.metadata, stored, "successor"))


@pytest.mark.full
def test_right_guesses_count(tmp_path):
    with load(successor(), "cpu", tmp_path / "model") as engine:
        guess_always(engine)
        found = answers(engine, temperature=0.0)
        assert [tokens[0] for tokens in found.values()] == [IDS[39] + 1, IDS[2] + 1, IDS[-1] + 1]
        guessed, accepted = engine.guesses
        assert accepted == guessed > 30  # few cells: about one guess a step, for all answers together


def test_models_without_such_a_layer(demo_artifact):
    with pytest.raises(UserError, match="has no layer that predicts further tokens"):
        Engine.load(demo_artifact, RunOptions(draft="mtp"))
