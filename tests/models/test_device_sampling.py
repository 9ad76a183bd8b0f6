"""A model's functions choose tokens on the device as the host's sampler does from the logits that they give."""

from types import SimpleNamespace

import numpy as np
import pytest
import sampling_cases as cases
from residues import Residues
from samples import sample
from vulkan_harness import gpu

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.cache.sequence import ChunkRows
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.devices.steps import write_private_pages, write_step
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.sampled_rows import SampledRows, TokenChoice
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import RunOptions
from mlc_amd.runtime.sampling.device_rows import mask_words
from mlc_amd.runtime.sampling.settings import Sampling
from mlc_amd.runtime.speculation.prompt_lookup import PromptLookup
from tests.runtime.engine.test_speculation import Eager

# of the rows of a step; the last of them of a step with fewer
SAMPLINGS = 3 * (
    Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=4),
    Sampling(temperature=1.0, min_p=0.01, repetition_penalty=1.2, seed=5), Sampling(logit_bias={7: 50.0}),
)  # fmt: skip


@pytest.fixture(scope="module", params=["cpu", "vulkan"])
def model(request):
    if request.param == "cpu":
        return request.getfixturevalue("compiled")("tiny:q4_0", 64)
    gpu()
    return request.getfixturevalue("lavapipe_model")


@pytest.fixture(scope="module")
def device(model):
    artifact = Artifact.open(model)
    opened = open_device(artifact, kv=KvSize(tokens=512))  # pages for all rows of a step
    yield opened, artifact.manifest
    opened.close()
    artifact.close()


@pytest.mark.parametrize(
    ("kind", "singles", "chunk"),
    sample(
        [("decode", 1, 0), ("prefill_", 0, 20), ("mixed_", 3, 9), ("mixed_", 4, 0)],
        [("decode", 1, 0), ("mixed_", 3, 9)],
    ),
)
def test_rows_of_a_step(device, kind, singles, chunk):
    device, manifest = device
    name = next(name for name in manifest["functions"] if name.startswith(kind))
    function, vocab, rng = manifest["functions"][name], manifest["model"]["vocab"], np.random.default_rng(1)
    assert function["samples"]
    write_private_pages(device, manifest, singles)
    ids = rng.integers(0, vocab, singles + chunk)
    rows = [(int(token), 0, slot) for slot, token in enumerate(ids[:singles])]
    n = write_step(device, function, rows, ChunkRows(ids[singles:], 0, singles) if chunk else None)
    recent = tuple(int(t) for t in ids)
    zeros = [cases.SamplingRow(np.zeros(vocab, np.float32), s, recent) for s in SAMPLINGS[-n:]]
    arrays = cases.inputs(zeros, manifest["io"]["logits"]["shape"][1])
    for which in ("sampling", "changes", "allowed"):
        device.write(which, arrays[which])
    device.run(name)
    logits = device.read("logits", n)[:, :vocab].copy()
    requests = [cases.SamplingRow(row, s, recent) for row, s in zip(logits, SAMPLINGS[-n:], strict=True)]
    cases.check(requests, device.read("sampled", n), device.read("logprobs", n))


@pytest.mark.parametrize("kind", ["decode", "mixed_"])
def test_masked_rows_draw_as_the_host_does(device, kind):
    """Masks of few and of many tokens, beside filters and without: `SampledRows` changes none of it."""
    device, manifest = device
    name = next(name for name in manifest["functions"] if name.startswith(kind))
    function, vocab = manifest["functions"][name], manifest["model"]["vocab"]
    n, rows = min(function["single"], 4), SampledRows(device, manifest["io"], vocab)
    write_private_pages(device, manifest, n)
    filters = {}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}
    samplings = [Sampling(temperature=1.5, seed=seed, **options) for seed, options in enumerate(filters)]
    for count in (1, 3, 20, 21, 900, vocab - 5):
        for first in range(0, len(samplings), n):
            chosen = samplings[first : first + n]
            masks = [cases.some_allowed(vocab, count, seed) for seed in range(len(chosen))]
            singles = [(7 + i, 0, i) for i in range(len(chosen))]
            write_step(device, function, singles)
            rows.write([TokenChoice(s, 0, [1] * 5, mask_words(m)) for s, m in zip(chosen, masks, strict=True)])
            device.run(name)
            logits = device.read("logits", len(chosen))[:, :vocab].copy()
            requests = [
                cases.SamplingRow(row, s, allowed=mask, logprob=False)
                for row, s, mask in zip(logits, chosen, masks, strict=True)
            ]
            cases.check(requests, device.read("sampled", len(chosen)), device.read("logprobs", len(chosen)))


class Walk:
    """Tokens that depend on those before; raises `error` instead of the mask after so many of them."""

    complete = False

    def __init__(self, engine, error=None, after=2):
        self.engine, self.error, self.after, self.accepted = engine, error, after, [3]
        self.beside = []  # whether the device computed meanwhile

    def allowed(self):
        if self.error and len(self.accepted) > self.after:
            raise self.error
        context = getattr(self.engine.device, "context", None)
        self.beside.append(context is not None and context.busy)
        mask = np.arange(self.engine.vocab) % 7 == sum(self.accepted) % 7
        mask[list(self.engine.tokenizer.end_ids)] = False
        return mask_words(mask)

    def accept(self, token):
        assert token % 7 == sum(self.accepted) % 7
        self.accepted.append(token)


PROMPTS = [[1, 2, 3], list(range(30)), [7] * 9]


def test_masks_are_made_while_the_device_computes(model, monkeypatch):
    """Answers are those with masks that are there before, short steps and steps in pieces."""
    with Engine.load(model, RunOptions(kv_tokens=512)) as engine:
        gpu = engine.device.kind == "vulkan"

        def answers(beside):
            engine.reset()  # else other steps compute the prompts' last tokens, with another rounding
            walks = [Walk(engine) for _ in PROMPTS]
            pieces = engine.generate(PROMPTS, max_tokens=4, temperature=1.0, seed=3, constraint=iter(walks).__next__)
            made = [(piece.index, piece.id) for piece in pieces]
            assert len(made) == 12 and {beside} == {one for walk in walks for one in walk.beside}
            return sorted(made, key=lambda piece: piece[0])

        if gpu:
            monkeypatch.setattr(engine.device.pacer, "limit", 1e4)  # Mesa's driver compiles in the first run
        made, run = answers(gpu), engine.device.run
        monkeypatch.setattr(engine.device, "can_start_ahead", lambda name, late=False: False)
        assert answers(gpu) == made
        if gpu:
            monkeypatch.setattr(engine.device.pacer, "limit", 1e-9)
            assert answers(False) == made
            monkeypatch.setattr(engine.device.pacer, "limit", 1e4)
        monkeypatch.setattr(engine.device, "run", lambda name, meanwhile=None: run(name, meanwhile and meanwhile()))
        assert answers(False) == made


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 20, "seed": 3}], ids=str)
def test_rows_of_guesses_have_masks_of_their_places(model, options):
    with Engine.load(model, RunOptions(kv_tokens=512)) as engine:
        made = []
        for drafter in (None, PromptLookup()):
            engine.speculate(drafter)
            if drafter:
                engine._loop.speculation = Eager(drafter, engine._runner.functions.single_rows)
            engine.reset()
            pieces = engine.generate(
                PROMPTS, max_tokens=10, constraint=lambda: Residues(engine.vocab, engine.tokenizer.end_ids), **options
            )
            made.append(sorted(((piece.index, piece.id) for piece in pieces), key=lambda piece: piece[0]))
        assert made[0] == made[1] and engine.guesses.accepted


def test_errors_of_masks_leave_engine_and_device_clean(model):
    with Engine.load(model, RunOptions(kv_tokens=512)) as engine:
        expected = [piece.id for piece in engine.generate(PROMPTS[1], max_tokens=6)]
        for error in (KeyboardInterrupt(), ZeroDivisionError()):
            with pytest.raises(type(error)):
                list(engine.generate(PROMPTS[0], max_tokens=6, constraint=lambda error=error: Walk(engine, error)))
            assert engine.queue == (0, 0) and engine.kv_usage.used == 0
            assert [piece.id for piece in engine.generate(PROMPTS[1], max_tokens=6)] == expected
        walk = Walk(engine)
        walk.allowed = lambda: np.zeros(-(-engine.vocab // 32), np.int32)
        for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}):
            with pytest.raises(UserError, match="its grammar allows no token"):
                list(engine.generate(PROMPTS[0], max_tokens=6, constraint=lambda: walk, **options))
            assert engine.queue == (0, 0) and engine.kv_usage.used == 0


def test_functions_that_score_choose_nothing(device):
    _, manifest = device
    (score,) = (of for name, of in manifest["functions"].items() if name.startswith("score_"))
    assert not score["samples"] and not any(["io", "sampled"] in launch["args"] for launch in score["launches"])


def test_answers_of_an_engine(model):
    """Masks and log-probabilities of some rows of a step."""
    prompts = [[1, 2, 3], list(range(30)), [7] * 9]
    with Engine.load(model, RunOptions(kv_tokens=512)) as engine:
        mask = mask_words(np.isin(np.arange(engine.vocab), (5, 6, 7)))
        constraint = SimpleNamespace(allowed=lambda: mask, accept=lambda token: None, complete=False)
        plain = engine.generate(prompts[0], max_tokens=6)
        masked = engine.generate(prompts[1], max_tokens=6, constraint=lambda: constraint, temperature=1.0)
        ranked = engine.generate(prompts[2], max_tokens=6, logprobs=5)
        made = [list(pieces) for pieces in zip(plain, masked, ranked, strict=True)]
        assert all(row[1].id in (5, 6, 7) and row[0].logprob is None for row in made)
        for _, _, piece in made:
            assert piece.top[0] == (piece.id, pytest.approx(piece.logprob, abs=1e-4)) and len(piece.top) == 5
        engine.reset()
        logits = engine.prefill(prompts[2]).astype(np.float64)
        exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        # GPU kernels of chunks and of single rows add in another order, and activations are rounded to int8
        tokens, values = zip(*made[0][2].top, strict=True)
        assert np.allclose(values, exact[list(tokens)], atol=0.05)
        assert len(set(tokens)) == 5 and min(values) > np.sort(exact)[-5] - 0.05
