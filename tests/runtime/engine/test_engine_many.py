"""A hundred requests at once: every answer is the one that its prompt gets alone, whatever shares the steps and the
pages with it."""

import random

import pytest
from ahead_harness import assert_nothing_is_held, computes_ahead

from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import RunOptions

REQUESTS = 100


@pytest.fixture(scope="module")
def prompts():
    """Prompts of 1 to 300 tokens; half of them begin with one of three texts that others begin with, too."""
    rng = random.Random(7)
    shared = [[rng.randrange(1000, 8000) for _ in range(n)] for n in (64, 130, 200)]
    found = []
    for i in range(REQUESTS):
        own = [rng.randrange(1000, 8000) for _ in range(rng.choice((1, 3, 20, 63, 64, 100)))]
        found.append((rng.choice(shared) if i % 2 else []) + own)
    return found


@pytest.fixture(scope="module")
def alone(demo_artifact, prompts):
    """The greedy continuation of each prompt, by an engine that computes nothing else at the time."""
    found = []
    with Engine.load(demo_artifact) as engine:
        for i, prompt in enumerate(prompts):
            engine.reset()
            found.append([piece.id for piece in engine.generate(prompt, max_tokens=length(i))])
    return found


def length(i: int) -> int:
    return 1 + i * 7 % 13


@pytest.mark.parametrize("kv_tokens", [8192, 1024])  # the second holds a few of them at a time
def test_every_answer_is_the_one_alone(demo_artifact, prompts, alone, kv_tokens):
    rng = random.Random(11)
    with Engine.load(demo_artifact, RunOptions(kv_tokens=kv_tokens)) as engine:
        waiting, running, made = list(range(REQUESTS)), {}, {}
        cancelled = set(rng.sample(range(REQUESTS), 10))
        while waiting or running:
            if waiting and (not running or rng.random() < 0.7):  # arrives between steps
                i = waiting.pop(0)
                options = {"max_tokens": length(i), "client": i % 5, "n": 1 + (i % 10 == 0)}
                running[i], made[i] = engine.generate(prompts[i], **options), {}
            i = rng.choice(list(running))
            piece = next(running[i], None)
            if piece is None or (i in cancelled and piece and sum(map(len, made[i].values())) >= 2):
                running.pop(i).close()
            if piece:
                made[i].setdefault(piece.index, []).append(piece.id)
        for i, answers in made.items():
            for ids in answers.values():
                assert ids == alone[i][: len(ids)] if i in cancelled else ids == alone[i], i
            assert i in cancelled or len(answers) == 1 + (i % 10 == 0) or not alone[i]
        assert_nothing_is_held(engine)


def test_answers_of_steps_that_begin_ahead(demo_artifact, prompts, alone, monkeypatch):
    """Requests come, end and are cancelled while a step that started ahead is in progress; some wait for pages."""
    with Engine.load(demo_artifact, RunOptions(kv_tokens=2048)) as engine:
        started_ahead = computes_ahead(engine, monkeypatch)
        rng = random.Random(5)
        waiting, running, made = list(range(len(prompts))), {}, {}
        cancelled = set(rng.sample(waiting, 10))
        while waiting or running:
            if waiting and (not running or rng.random() < 0.15):
                i = waiting.pop(0)
                running[i], made[i] = engine.generate(prompts[i], max_tokens=length(i), client=i % 5), []
            i = rng.choice(list(running))
            piece = next(running[i], None)
            if piece:
                made[i].append(piece.id)
            if piece is None or (i in cancelled and len(made[i]) == 2):
                running.pop(i).close()
        assert all(ids == alone[i][: len(ids) if i in cancelled else None] for i, ids in made.items())
        assert len(started_ahead) > 50
        assert_nothing_is_held(engine)


def test_many_steps_have_many_rows(demo_artifact, prompts, alone):
    """All at once: the scheduler fills steps, and preempts where the pool is too small."""
    with Engine.load(demo_artifact, RunOptions(kv_tokens=2048)) as engine:
        steps, run = [], engine.device.run
        engine.device.run = lambda function, *rest: (steps.append(function), run(function, *rest))[1]
        made: dict[int, list[int]] = {i: [] for i in range(REQUESTS)}
        for piece in engine.generate(prompts, max_tokens=13):
            made[piece.index].append(piece.id)
        assert all(made[i][: length(i)] == alone[i] for i in made)
        assert len(steps) < sum(map(len, made.values())) / 3
        assert_nothing_is_held(engine)


def test_a_shared_prompt_is_computed_once(demo_artifact, prompts):
    system = (prompts[1] * 40)[:2000]
    with Engine.load(demo_artifact, RunOptions(kv_tokens=8192)) as engine:
        list(engine.generate([*system, 5, 6, 7], max_tokens=2))
        again = engine.generate([*system, 8, 9], max_tokens=2)
        list(again)
        assert again.stats.prompt_tokens - again.stats.cached_tokens <= len(system) % 64 + 2
        both = engine.generate([*system, 10, 11], max_tokens=2, n=2)
        list(both)
        assert all(stats.cached_tokens >= len(system) // 64 * 64 for stats in both.answers)


def test_the_queue_is_bounded(demo_artifact):
    from mlc_amd.runtime.artifact.artifact import Artifact
    from mlc_amd.runtime.devices.opening import open_device
    from mlc_amd.runtime.engine.scheduler import QueueFull

    artifact = Artifact.open(demo_artifact)
    with Engine(artifact, open_device(artifact), SchedulerLimits(queue=3)) as engine:
        with pytest.raises(QueueFull, match="try again later"):
            next(engine.generate([[1, 2]] * 4, max_tokens=1))
        assert not engine._loop.busy and len(list(engine.generate([1, 2], max_tokens=1))) <= 1
