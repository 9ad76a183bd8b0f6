"""Models whose layers keep a state for each sequence: any way through the cache has the same logits, and sequences in
one step do not disturb one another."""

import architectures
import numpy as np
import pytest
import vulkan_harness
from samples import sample

from mlc_amd.compiler.gguf.reader import check_tensors
from mlc_amd.compiler.gguf.tensor import Tensor
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.sampled_rows import GREEDY
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from tests.runtime.engine.test_speculation import Eager

CONTEXT, MAX_CHANGE = 512, 2e-3  # tokens; share of the logits' range
IDS = np.random.default_rng(3).integers(0, 1024, 400)
PROMPTS = [IDS[7 * i : 12 * i + 5].tolist() for i in range(9)]
QUICK = [("qwen35", "cpu"), ("mamba2", "cpu")]
CASES = [*QUICK, *((name, "cpu") for name in ("lfm2", "falcon-h1", "nemotron_h", "kimi-linear", "mamba", "minimax-01"))]
CASES += [(name, "vulkan") for name in ("qwen35", "falcon-h1", "kimi-linear", "mamba", "minimax-01")]


@pytest.fixture(scope="module", params=sample([(case,) for case in CASES], [(case,) for case in QUICK]), ids="-".join)
def engine(request, tmp_path_factory):
    """On a CPU with integer weights, whose products do not depend on how many rows a step has."""
    (name, target), out = request.param, tmp_path_factory.mktemp("states") / "model"
    if target == "vulkan":
        vulkan_harness.gpu()  # skips without a device
    arch, form = ("native", "q8_0") if target == "cpu" else ("generic", "f16")
    compile_model(
        architectures.tiny(name, form), out, CompileOptions(target=target, arch=arch, ctx=CONTEXT, tuned="none")
    )
    with Engine.load(out) as loaded:
        yield loaded


def answer(engine, prompt, **options):
    """The tokens of each answer."""
    found: dict[int, list[int]] = {}
    for piece in engine.generate(prompt, max_tokens=12, temperature=0.0, **options):
        found.setdefault(piece.index, []).append(piece.id)
    return found


def test_chunks_steps_and_going_back_give_the_same_logits(engine):
    engine.reset()
    exact = engine.score(IDS)
    limit = MAX_CHANGE * (exact.max() - exact.min())

    def check(logits, row):
        assert np.abs(logits - exact[row]).max() < limit

    for kept, computed in ((390, 384), (300, 0), (10, 0)):  # edges of pages with a snapshot
        engine.truncate(kept)
        assert engine._own.computed == computed
        check(engine.prefill(IDS[kept : kept + 9]), kept + 8)
        for i in range(kept + 9, min(kept + 12, len(IDS))):
            check(engine.decode(int(IDS[i])), i)


def test_answers_together_are_those_alone(engine):
    alone = []
    for prompt in PROMPTS:
        engine.reset()
        alone.append(answer(engine, prompt)[0])
    engine.reset()
    together = answer(engine, PROMPTS)
    assert [together[i] for i in range(len(PROMPTS))] == alone
    several = answer(engine, IDS[:150].tolist(), n=3)  # of one prompt, which is computed once
    engine.reset()
    assert list(several.values()) == [answer(engine, IDS[:150].tolist())[0]] * 3


def test_a_chat_computes_new_tokens_only(engine):
    engine.reset()
    first = answer(engine, IDS[:150].tolist())[0]
    turn = [*IDS[:150].tolist(), *first, 5, 6, 7]
    second = answer(engine, turn)[0]
    assert engine.last.cached_tokens == len(turn) - 4  # the last token of an answer is not computed
    edited = [*IDS[:140].tolist(), 1, 2, 3]
    third = answer(engine, edited)[0]
    assert engine.last.cached_tokens == 128
    for prompt, found in ((turn, second), (edited, third)):
        engine.reset()
        assert answer(engine, prompt)[0] == found


def verify(engine, guesses, right):
    """A step of the own sequence with guesses after its newest token, of which the first `right` count."""
    own, tokens = engine._own, [int(id) for id in guesses]
    own.append(tokens[: 1 + right])
    assert own.reserve(1, len(tokens) - 1)
    engine.cache.assign_slots([own])
    engine._runner.sample(own.rows(tokens), None, [GREEDY] * len(tokens))
    own.advance(1 + right, len(tokens) - 1 - right)


@pytest.mark.parametrize("right", [0, 2, 3])
def test_wrong_guesses_leave_no_trace(engine, right):
    engine.reset()
    exact = engine.score(IDS[:110])
    engine.reset()
    for first in (0, 100):
        if first:
            engine.prefill(IDS[engine.position : first])
        verify(engine, [*IDS[first : first + right + 1], *[7] * (3 - right)], right)
        for i in range(first + right + 1, first + right + 3):
            assert np.abs(engine.decode(int(IDS[i])) - exact[i]).max() < MAX_CHANGE * (exact.max() - exact.min())


class Oracle:
    """Guesses of answers that are known, every third of them wrong."""

    expected, free, follows, at_once = 0.7, True, False, False

    def __init__(self, known):
        self.known = known

    def draft(self, wanted):
        found = {}
        for request, (choice, count) in wanted.items():
            right = self.known[tuple(request.prompt)][len(request.generated) :][:count]
            found[request] = [token + (len(choice.tokens) + i) % 3 // 2 for i, token in enumerate(right)]
        return found

    def forget(self, request):
        pass

    def close(self):
        pass


def test_answers_do_not_depend_on_guesses(engine):
    engine.reset()
    expected = answer(engine, PROMPTS[:3])
    engine.reset()
    engine.speculate(Oracle({tuple(PROMPTS[i]): tokens for i, tokens in expected.items()}))
    engine._loop.speculation = Eager(engine._loop.speculation.drafter, engine._loop.speculation._rows)
    assert answer(engine, PROMPTS[:3]) == expected
    guessed, accepted = engine.guesses
    engine.speculate(None)
    assert 0 < accepted < guessed


def test_a_failed_step_leaves_no_trace(engine, monkeypatch):
    engine.reset()
    engine.prefill(IDS[:100])
    expected = engine.decode(7)
    engine.reset()
    engine.prefill(IDS[:100])
    run = engine.device.run

    def fails(*arguments):
        run(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.device, "run", fails)
    with pytest.raises(KeyboardInterrupt):
        engine.decode(9)
    monkeypatch.undo()
    assert engine.position == 100
    assert np.abs(engine.decode(7) - expected).max() < MAX_CHANGE * (expected.max() - expected.min())


def test_convolutions_are_floats():
    model, name = architectures.tiny("lfm2"), "blk.0.shortconv.conv.weight"
    quantized = Tensor(name, "q8_0", model.tensors[name].shape, lambda start, stop: np.empty((0, 0)))
    with pytest.raises(UserError, match="convolutions must be floats"):
        check_tensors(model.config, model.tensors | {name: quantized}, "file")
