"""Speculative decoding: answers are the same with guesses and without, and guesses cost little where they are wrong."""

import contextlib
import math
import random

import pytest

from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.sampled_rows import GREEDY
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import RunOptions
from mlc_amd.runtime.speculation.draft_model import open_drafter
from mlc_amd.runtime.speculation.prompt_lookup import PromptLookup
from mlc_amd.runtime.speculation.speculation import MOST, Speculation, StepTimes, Wanted, best_counts

PROMPTS = ["def join(a, *p):\n    path = a\n    for b in p:\n        path", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2", "import os"]


class Eager(Speculation):
    """Verifies all guesses that it gets, whatever that costs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.resting = 0

    def nothing(self):
        """Steps wait for guesses."""

    def _counts(self, most):
        left, found = self._rows - len(most), {}
        for request, count in most.items():
            found[request] = min(count, left)
            left -= found[request]
        return found


def guess_always(engine):
    """With the engine's own draft, however much it gains."""
    engine.speculate(engine.own_draft())
    engine._loop.speculation = Eager(engine._loop.speculation.drafter, engine._loop.speculation._rows)


def follow_prompt(engine, ids, counts):
    """The engine's own sequence gets these tokens, and computes chunks of so many, which its draft follows."""
    runner, own = engine._runner, engine._own
    own.append(ids)
    for count in counts:
        assert own.reserve(count)
        engine.cache.assign_slots([own])
        runner.sample((), own.chunk(count), [GREEDY])
        runner.follow(own.tokens[own.computed + 1 : own.computed + count + 1])
        own.advance(count)


@pytest.fixture(scope="module")
def engine(demo_artifact):
    with Engine.load(demo_artifact, RunOptions(kv_tokens=4096)) as engine:
        yield engine


def answers(engine, drafter=None, **options):
    engine.speculate(drafter)
    if drafter:
        engine._loop.speculation = Eager(drafter, engine._loop.speculation._rows)
    found: dict[int, list] = {}
    generation = engine.generate(PROMPTS, max_tokens=60, **options)
    for piece in generation:
        found.setdefault(piece.index, []).append((piece.id, piece.text, piece.logprob))
    return found, generation.answers


OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "n": 3},
    {"temperature": 0.7, "seed": 1, "top_k": 40, "repetition_penalty": 1.2, "min_tokens": 30, "logprobs": 0},
    {"temperature": 0.0, "stop": "):"},
]


@pytest.mark.parametrize("source", ["lookup", "model"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_do_not_depend_on_guesses(engine, demo_artifact, source, options):
    expected, _ = answers(engine, **options)
    named = "lookup" if source == "lookup" else demo_artifact
    drafter = open_drafter(named, engine.tokenizer, None, None, KvSize.of(None, None))
    found, stats = answers(engine, drafter, **options)
    engine.speculate(None)
    assert found == expected
    guessed, accepted = (sum(getattr(of, name) for of in stats) for name in ("guessed", "accepted"))
    assert guessed
    if source == "model":
        assert accepted > 0.9 * guessed
    elif not options["temperature"]:  # whether drawn tokens repeat what was there depends on the CPU's roundings
        assert accepted
    assert engine.cache.usage.used == 0


def test_a_draft_model_makes_room_in_its_cache(engine, demo_artifact):
    """Its cache holds one sequence of full length, of which several answers want parts again and again."""
    expected, _ = answers(engine, temperature=0.0, n=12)
    drafter = open_drafter(demo_artifact, engine.tokenizer, None, None, KvSize.of(192, None))
    found, stats = answers(engine, drafter, temperature=0.0, n=12)
    engine.speculate(None)
    assert found == expected and sum(of.guessed for of in stats)


def test_a_draft_model_sees_no_images(engine, demo_artifact):
    drafter = open_drafter(demo_artifact, engine.tokenizer, None, None, KvSize.of(None, None))
    assert drafter is not None
    ids, rows = engine.tokenizer.encode("Images have rows, and rows have"), [-7, -(1 << 31)]
    texts, mixed, later = Request([0]), Request([1]), Request([2])
    with contextlib.closing(drafter):
        expected = drafter.draft({texts: (GREEDY._replace(tokens=ids), 4)})[texts]
        assert drafter.draft({mixed: (GREEDY._replace(tokens=[*rows, *ids]), 4)})[mixed] == expected
        drafter.draft({later: (GREEDY._replace(tokens=[*ids[:3], *rows]), 4)})
        assert drafter.draft({later: (GREEDY._replace(tokens=[*ids[:3], *rows, *ids[3:]]), 4)})[later] == expected


def test_what_cannot_be_a_draft(engine, compiled):
    with pytest.raises(UserError, match="another vocabulary"):
        open_drafter(compiled("tiny:q4_0", 64), engine.tokenizer, None, None, KvSize.of(None, None))


# ---- prompt lookup


def test_lookup_takes_what_followed_last():
    lookup, request = PromptLookup(), Request([0])

    def guess(tokens, count=3):
        return lookup.draft({request: (GREEDY._replace(tokens=tokens), count)}).get(request)

    assert guess([1, 2, 3]) is None
    assert guess([1, 2, 3, 9, 1, 2]) == [3, 9, 1]
    assert guess([1, 2, 3, 9, 1, 2, 4, 8, 1, 2]) == [4, 8, 1]
    assert guess([1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 9]) == [1, 2, 4]  # what agrees in four tokens comes first
    lookup.forget(request)
    assert guess([7, 8, 7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]  # goes on repeating


# ---- how many guesses


def test_best_counts():
    times = [1.0, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9]
    assert best_counts([1.0], [MOST], times)[0] == [MOST]
    assert best_counts([1.0], [2], times)[0] == [2]
    assert best_counts([0.2], [MOST], times)[1] < 1  # not worth it
    counts, rate = best_counts([0.9, 0.3], [MOST, MOST], times)
    assert counts[0] > counts[1] and sum(counts) <= len(times) - 1 and rate > 2
    assert best_counts([0.5], [0], [1.0]) == ([0], 0.0)


def test_step_times_are_between_those_that_were_measured():
    times = StepTimes()
    assert times.of(3) == 0
    for seconds in (1.0, 1.0, 9.0):
        times.add(1, seconds)
    times.add(5, 2.0)
    assert times.of(1) == 1 and times.between(1, 5) == pytest.approx([1, 1.25, 1.5, 1.75, 2])
    assert times.of(8) > 2


class Coin:
    expected, free, at_once, follows = 0.7, True, False, False

    def draft(self, wanted):
        return {request: [0] * count for request, (_, count) in wanted.items()}


def decode(tokens, right, seconds):
    """Seconds that so many tokens take, and the guesses. right: the probability that a guess is right."""
    draw, speculation, request, total = random.Random(5), Speculation(Coin(), 64), Request([0]), 0.0
    while tokens > 0:
        guesses = speculation.drafts({request: Wanted(GREEDY, MOST)}).get(request, [])
        hits = next((i for i in range(len(guesses)) if draw.random() >= right), len(guesses))
        step = seconds(1 + len(guesses))
        speculation.completed({request: guesses} if guesses else {}, {request: 1 + hits}, 0.0, step)
        total, tokens = total + step, tokens - 1 - hits
    return total, speculation.counts


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("first", [0.0, 0.6])
def test_wrong_guesses_cost_little(slope, first):
    """first: what the second row costs more, as where another kernel takes several rows."""

    def seconds(rows):
        return 1 + (rows > 1) * first + slope * (rows - 1)

    for tokens in (128, 5000):
        total, counts = decode(tokens, 0.0, seconds)
        assert total <= 1.03 * tokens + slope and counts.drafted and not counts.accepted


@pytest.mark.parametrize("right_from", [math.inf, 2000])
def test_steps_start_ahead_where_guesses_are_wrong(right_from):
    """A step that waits for the tokens of the one before takes 12 % longer."""
    speculation, request, total, tokens, rested = Speculation(Coin(), 64), Request([0]), 0.0, 0, 0
    while tokens < 4000:
        if speculation.resting:
            speculation.rested(1, 1.0)
            speculation.watched({request: 0 if tokens >= right_from else 1}, {request: Wanted(GREEDY, MOST)})
            total, tokens, rested = total + 1.0, tokens + 1, rested + 1
            continue
        guesses = speculation.drafts({request: Wanted(GREEDY, MOST)}).get(request, [])
        hits = len(guesses) if tokens >= right_from else 0
        step = 1.12 + 0.1 * len(guesses)
        speculation.completed({request: guesses} if guesses else {}, {request: 1 + hits}, 0.0, step)
        total, tokens = total + step, tokens + 1 + hits
    if right_from == math.inf:
        assert total <= 1.01 * 4000 and rested > 3900
    else:
        assert total < 1.03 * 2000 + 2000 / 2.5


def test_right_guesses_pay():
    total, counts = decode(1000, 1.0, lambda rows: 1 + 0.25 * (rows > 1) + 0.01 * rows)
    assert total < 1000 / 4 and counts.accepted == counts.drafted
    total, _ = decode(1000, 0.6, lambda rows: 1 + 0.25 * (rows > 1) + 0.01 * rows)
    assert total < 1000 / 1.5


class Follower(Coin):
    follows = True


class Blocks(Follower):
    free, at_once = False, True


def decode_followed(tokens, right, follow_s, slope=0.05, drafter=Follower, guess_s=0.0):
    """As `decode`, with a drafter that takes follow_s seconds after each step that it follows, guess_s for all guesses
    of a step, and guesses after those alone. right(tokens left). Returns also which steps were followed."""
    draw, speculation, request, total = random.Random(5), Speculation(drafter(), 64), Request([0]), 0.0
    known, followed = True, []
    while tokens > 0:
        offered = speculation.drafts({request: Wanted(GREEDY, MOST)}).get(request, [])
        guesses = offered if known else []
        hits = next((i for i in range(len(guesses)) if draw.random() >= right(tokens)), len(guesses))
        step, guessed = 1 + slope * len(guesses), guess_s * bool(guesses)
        speculation.completed({request: guesses} if guesses else {}, {request: 1 + hits}, guessed, step)
        total, tokens = total + step + guessed, tokens - 1 - hits
        known = speculation.following
        followed.append(known)
        if known:
            speculation.followed(1 + len(guesses), follow_s)
            total += follow_s
    return total, speculation.counts, followed


@pytest.mark.parametrize("follow_s", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("tokens", [128, 5000])
def test_following_steps_for_wrong_guesses_costs_little(follow_s, tokens):
    total, counts, followed = decode_followed(tokens, lambda _: 0.0, follow_s)
    assert total <= 1.03 * tokens + 2 * follow_s and counts.drafted and not counts.accepted
    assert not all(followed) and (tokens == 128 or any(followed[-2500:]))  # it is tried again


def test_a_follower_whose_guesses_become_right_pays():
    total, _, followed = decode_followed(6000, lambda left: float(left < 3000), 0.1)
    assert total < 1.03 * 3000 + 3000 / 2 and all(followed[-100:-1])
    total, _, _ = decode_followed(1000, lambda _: 0.8, 0.1)
    assert total < 1000 / 1.7


def test_the_time_of_a_block_counts_once():
    """Each guess of a block would seem to take long, where few were worth their rows before."""
    total, _, _ = decode_followed(4000, lambda left: 0.7 if left > 2000 else 1.0, 0.02, drafter=Blocks, guess_s=0.8)
    assert total < 2300
    total, counts, _ = decode_followed(4000, lambda _: 0.0, 0.1, drafter=Blocks, guess_s=0.8)
    assert total <= 1.03 * 4000 + 2 and counts.drafted
