"""Logits of all tokens, computed between the steps of answers."""

import random
import threading
from itertools import pairwise

import numpy as np
import pytest

from mlc_amd.runtime.engine.admission import SchedulerLimits
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import RunOptions
from tests.runtime.engine.test_scheduler import Driver


class Scored(Driver):
    """Also drives requests for logits; `rows`: the positions whose logits each has got."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rows = {}
        self.own = self.cache.sequence()

    def sequences(self):
        return {self.own, *super().sequences()}

    def score(self, tokens):
        """Appends tokens to a permanent sequence, and requests their logits."""
        sequence = self.own
        first = len(sequence.tokens)
        sequence.append(tokens)
        request = Request(sequence.tokens, client=object(), scored=first, sequence=sequence)
        self.scheduler.add(request)
        self.rows[request] = []
        return request

    def complete(self, step, found):
        chunk = step.chunk
        super().complete(step, found)
        if chunk and chunk.request in self.rows:
            assert not chunk.answers
            if chunk.scored:
                assert not step.singles and chunk.count <= self.scheduler.limits.scored
                self.rows[chunk.request] += range(chunk.start, chunk.start + chunk.count)
            if not chunk.sequence.pending:
                self.scheduler.finish(chunk.request, "scored")


@pytest.mark.parametrize("groups", [{0: 60}, {0: 14}, {0: 12, 100: 7}], ids=str)
def test_scores_and_answers_share_a_pool(groups):
    draw, driver = random.Random(3), Scored(groups, ahead=random.Random(4))
    own, done, scoring = driver.own, 0, None
    for i in range(60):
        driver.add([draw.randrange(3)] * draw.choice([1, 70, 200]), draw.choice([3, 60]), client=i % 3)
        for _ in range(draw.choice([0, 1, 20])):
            if scoring is None or scoring.state == "done":
                if draw.random() < 0.3 and own.tokens:
                    own.truncate(draw.randrange(len(own.tokens)))
                done, scoring = len(own.tokens), driver.score([5] * draw.choice([1, 64, 150]))
                if len(own.tokens) > 350:
                    driver.scheduler.cancel(scoring)
                    driver.step()
                    own.truncate(0)
                    scoring = None
            driver.step()
            if scoring is not None and scoring.state == "done":
                assert driver.rows[scoring] == list(range(done, len(own.tokens)))
                assert own.computed == len(own.tokens)
    while driver.step():
        pass
    assert sum(map(len, driver.rows.values())) > 1000 and driver.scheduler.unfinished == 0
    own.free()
    driver.finish()


def test_answers_wait_for_one_chunk_at_most():
    driver = Scored({0: 100}, SchedulerLimits(singles=4, chunk=96, rows=98, scored=32))
    request = driver.add([1, 2, 3], 60, sampling=1)
    while not request.generated:
        driver.step()
    scoring = driver.score([7] * 200)
    other = driver.add([4] * 30, 5, client="other")
    kinds = []
    while scoring.state != "done":
        step = driver.step()
        kinds.append("scored" if step.chunk and step.chunk.scored else "answers")
    assert kinds.count("scored") == 7 and ("scored", "scored") not in list(pairwise(kinds))
    assert len(request.generated) > 5 and other.generated
    driver.own.free()
    driver.finish()


def test_logits_are_computed_once_although_the_pages_were_given_up():
    driver = Scored({0: 40}, SchedulerLimits(scored=32))
    scoring = driver.score([7] * 200)
    for _ in range(3):
        driver.step()
        driver.scheduler.admission.preempt(scoring)
        assert scoring.sequence.computed == 0
    while driver.step():
        pass
    assert driver.rows[scoring] == list(range(200)) and driver.computed <= 200 + 64
    driver.own.free()
    driver.finish()


# ---- the engine

IDS = np.random.default_rng(5).integers(1000, 8000, 300).tolist()


def test_an_engine_scores_beside_its_answers(engine):
    alone = [piece.id for piece in engine.generate(IDS[:20], max_tokens=12)]
    expected = engine.score(IDS)
    engine.reset()
    running, made = engine.generate(IDS[:20], max_tokens=12), []
    made.append(next(running).id)
    engine.prefill(IDS[:50])  # the sequence's beginning, whose logits are not wanted
    found = []
    thread = threading.Thread(target=lambda: found.append(engine.score(IDS[50:])))
    thread.start()
    made += [piece.id for piece in running]
    thread.join()
    assert made == alone and engine.tokens == IDS
    scale = expected.max() - expected.min()
    assert np.abs(found[0] - expected[50:]).max() < 2e-3 * scale
    assert np.abs(engine.decode(7) - Engine.prefill(engine, [8])).max() > 0 and engine.position == 302


def test_scores_that_cannot_be(demo_artifact):
    with Engine.load(demo_artifact, RunOptions(kv_tokens=128)) as engine:
        engine.score(IDS[:100])
        with pytest.raises(UserError, match="holds 128 tokens of one sequence"):
            engine.score(IDS[100:200])
        assert engine.tokens == IDS[:100] and engine.queue == (0, 0)
        assert engine.score(IDS[100:128]).shape == (28, engine.vocab)
    with pytest.raises(UserError, match="closed"):
        engine.score(IDS[:5])
