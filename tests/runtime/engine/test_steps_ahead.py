"""Steps that begin before the one in progress is done: answers are those without them, and nothing is lost or held."""

import asyncio
import time

import numpy as np
import pytest
from ahead_harness import assert_nothing_is_held, computes_ahead
from residues import Residues
from samples import sample
from vulkan_harness import gpu

from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.batch import compute
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.sampled_rows import GREEDY
from mlc_amd.runtime.engine.scheduler import Scheduler
from mlc_amd.runtime.options import RunOptions
from mlc_amd.runtime.speculation.speculation import Speculation

PROMPTS = [[1, 2, 3], list(range(56)), [7] * 9]  # the second one's answers cross the end of a page


def answers(engine: Engine, prompts=PROMPTS, **options) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in prompts]
    for piece in engine.generate(prompts, **options):
        made[piece.index].append(piece.id)
    return made


OPTIONS = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "seed": 4, "min_tokens": 5},
    {"logit_bias": {7: 3.0}},
    {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.3},
    {"logprobs": 2},  # reads logits, which the next step overwrites
]

LIMIT = 10


@pytest.fixture(scope="module")
def vulkan(lavapipe_model):
    gpu()
    with Engine.load(lavapipe_model, RunOptions(kv_tokens=512)) as engine:
        list(engine.generate(PROMPTS[0], max_tokens=2))  # Mesa compiles in the first run
        engine.device.pacer.limit = 1e4
        yield engine


@pytest.mark.parametrize("options", sample(OPTIONS, OPTIONS[4:]))
def test_a_gpus_answers_are_those_of_steps_one_by_one(vulkan, monkeypatch, options):
    begun, start_ahead = [], vulkan.device.start_ahead
    monkeypatch.setattr(
        vulkan.device, "start_ahead", lambda name, late=False: (begun.append(late), start_ahead(name, late))
    )
    vulkan.reset()
    found = answers(vulkan, max_tokens=LIMIT, **options)
    assert (len(begun) > LIMIT // 2) == ("logprobs" not in options)
    monkeypatch.setattr(vulkan.device, "can_start_ahead", lambda name, late=False: False)
    vulkan.reset()
    assert answers(vulkan, max_tokens=LIMIT, **options) == found
    assert_nothing_is_held(vulkan)


def test_a_run_has_its_own_inputs_and_results(vulkan):
    """The host may write what comes next, and read late: what is in progress does not change."""
    runner, device = vulkan._runner, vulkan.device
    vulkan.reset()
    with vulkan.batch(len(PROMPTS)) as batch:
        for sequence, prompt in zip(batch._sequences, PROMPTS, strict=True):
            sequence.append(prompt[:-1])
            compute(vulkan.cache, runner, sequence)
        tokens, expected = [prompt[-1] for prompt in PROMPTS], []
        for _ in range(6):
            expected.append(batch.step(expected[-1] if expected else tokens))
        logits = device.read("logits", 3).copy()
        for sequence, prompt in zip(batch._sequences, PROMPTS, strict=True):
            sequence.truncate(len(prompt) - 1)
            sequence.append(prompt[-1:])
            assert sequence.pending == 1 and sequence.reserve(1, 5)
        places = [[sequence.newest_row(ahead) for sequence in batch._sequences] for ahead in range(6)]
        runner.start(places[0], None, [GREEDY] * 3)
        for i in range(1, 6):
            runner.start_ahead(places[i], [GREEDY] * 3)
            device.context.calls.vkDeviceWaitIdle(device.context.device)  # both are done before one is read
            assert [of.token for of in runner.finish()] == expected[i - 1]
            device.write("tokens", np.zeros(3, np.int32))
            device.write("rows", np.zeros((3, 2), np.int32))
        assert [of.token for of in runner.finish()] == expected[5]
        assert np.array_equal(device.read("logits", 3), logits)  # they are copied when they are read


def test_batches_go_on_with_their_own_tokens(vulkan):
    def texts(ahead):
        vulkan.reset()
        with vulkan.batch(2) as batch:
            assert batch.can_start_ahead
            batch.prefill(np.arange(120).reshape(2, 60))
            return batch.decode([7, 8], 6, ahead)

    found = texts(True)
    assert [len(text) for text in found] == [6, 6] and texts(False) == found


def test_what_is_not_waited_for_does_no_harm(vulkan):
    """A run that started ahead is in progress when something else is computed."""
    vulkan.reset()
    expected = vulkan.prefill(PROMPTS[1])
    vulkan.reset()
    with vulkan.batch(2) as batch:
        batch.prefill(np.array([[1, 2, 3], [4, 5, 6]]))
        for sequence in batch._sequences:
            sequence.append([7])
            assert sequence.reserve(1, 1)
        vulkan._runner.start([sequence.newest_row() for sequence in batch._sequences], None, [GREEDY] * 2)
        vulkan._runner.start_ahead([sequence.newest_row(1) for sequence in batch._sequences], [GREEDY] * 2)
    assert np.array_equal(vulkan.prefill(PROMPTS[1]), expected)


# ---- answers of many kinds, on the CPU


@pytest.fixture
def engine(demo_artifact, monkeypatch):
    with Engine.load(demo_artifact, RunOptions(kv_tokens=2048)) as engine:
        engine.started_ahead = computes_ahead(engine, monkeypatch)
        yield engine


def test_an_answer_may_end_or_begin_at_any_token(engine):
    """While the step ahead is in progress: at stop texts, by `close`, at the limit; then others begin."""
    engine.reset()
    prompt = engine.tokenizer.encode_prompt("def main(")
    whole = [piece.id for piece in engine.generate(prompt, max_tokens=40)]
    for n in range(1, 12):
        first, second = engine.generate(prompt, max_tokens=40), engine.generate(prompt, max_tokens=n)
        taken = [next(first).id for _ in range(n)]
        assert [piece.id for piece in second] == taken == whole[:n]
        first.close()
        text = engine.tokenizer.decode(whole)
        if stop := text[n : n + 3].strip():
            stopped = "".join(piece.text for piece in engine.generate(prompt, max_tokens=40, stop=stop))
            assert text.startswith(stopped) and stop not in stopped
        assert_nothing_is_held(engine)
    assert engine.queue == (0, 0) and len(engine.started_ahead) > 60


def test_forced_text_is_guessed_between_steps_ahead(engine, monkeypatch):
    times = [1.0] * 64  # of steps with any number of guesses
    monkeypatch.setattr(Speculation, "_fastest", lambda self, most, *_: ([*most.values()], 3.0 * len(most), times))
    monkeypatch.setattr(engine._loop, "clock", lambda: 0.0)
    options = {"max_tokens": 40, "constraint": lambda: Residues(engine.vocab, engine.tokenizer.end_ids, 3)}
    found = answers(engine, **options)
    assert len(engine.started_ahead) > 5 and engine.guesses.drafted > 5
    engine._loop.speculation = None
    engine.reset()
    assert answers(engine, **options) == found
    assert_nothing_is_held(engine)


def test_other_work_comes_between_steps(engine):
    """Other users of the engine get it without a step in progress."""
    ids = engine.tokenizer.encode_prompt("import os")
    expected, logits = [piece.id for piece in engine.generate(ids, max_tokens=30)], engine.score(ids).copy()
    engine.reset()
    found = []
    for piece in engine.generate(ids, max_tokens=30):
        found.append(piece.id)
        assert np.allclose(engine.score(ids), logits, atol=1e-4) or len(found) % 3
        engine.reset()
        assert not engine._loop._started
    assert found == expected and len(engine.started_ahead) > 20
    assert_nothing_is_held(engine)


def test_an_error_of_a_step_ends_those_who_are_in_it(engine, monkeypatch):
    prompt = engine.tokenizer.encode_prompt("def main(")
    expected = [piece.id for piece in engine.generate(prompt, max_tokens=20)]
    wait, calls = engine.device.wait, []

    def fails():
        wait()
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError

    monkeypatch.setattr(engine.device, "wait", fails)
    answer = engine.generate(prompt, max_tokens=20)
    with pytest.raises(ZeroDivisionError):
        list(answer)
    assert not engine._loop._started
    answer.close()
    monkeypatch.setattr(engine.device, "wait", wait)
    assert [piece.id for piece in engine.generate(prompt, max_tokens=20)] == expected
    assert_nothing_is_held(engine)


def test_answers_in_an_event_loop_leave_nothing_in_progress(engine):
    """Also where the consumer of the last one leaves."""
    prompt = engine.tokenizer.encode_prompt("def main(")
    expected = [piece.id for piece in engine.generate(prompt, max_tokens=20)]

    async def take(n):
        found = []
        async for piece in engine.agenerate(prompt, max_tokens=20):
            found.append(piece.id)
            if len(found) == n:
                break
        return found

    async def some():
        return await asyncio.gather(*map(take, (20, 3, 20, 7)))

    assert asyncio.run(some()) == [expected, expected[:3], expected, expected[:7]]
    assert asyncio.run(take(5)) == expected[:5]
    deadline = time.monotonic() + 60  # the engine's thread ends answers without a consumer
    while engine._loop.busy or engine._loop._started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert_nothing_is_held(engine)


# ---- which steps


def test_only_steps_of_the_same_rows_begin_ahead():
    scheduler = Scheduler(KvCache({0: 40}, context=640), SchedulerLimits(singles=2, chunk=96, rows=98))

    def run(tokens):
        scheduler.complete(step := scheduler.plan(), tokens)
        return step

    first, second = Request([1] * 70, 4), Request([2] * 5, 9)
    scheduler.add(first)
    assert scheduler.plan_ahead(scheduler.plan()) is None  # a chunk
    scheduler.abandon()
    run([[7]])
    step = scheduler.plan()
    following = scheduler.plan_ahead(step)
    assert following and following.answers == [first] and scheduler.plan_ahead(following) is None  # one at a time
    scheduler.add(second)
    scheduler.complete(step, [[7]])
    assert scheduler.plan_ahead(following) is None  # another one waits
    scheduler.complete(following, [[7]])
    assert first.generated == [7] * 3
    assert run([[7], [8]]).answers == [first, second]  # the last token of the first one
    step = scheduler.plan()
    assert step.answers == [second] and scheduler.plan_ahead(step) is None  # the driver has not finished it
