"""Token choice: the distribution after each step, its edges, its repeatability, and its speed on a large vocabulary."""

import time

import numpy as np
import pytest

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.logit_changes import CHANGES, changes_of
from mlc_amd.runtime.sampling.philox import philox, seed_of
from mlc_amd.runtime.sampling.sampler import Sampler
from mlc_amd.runtime.sampling.settings import Sampling

LOGITS = np.log(np.array([0.02, 0.4, 0.05, 0.25, 0.15, 0.08, 0.03, 0.02], dtype=np.float32))


def frequencies(logits: np.ndarray, draws: int = 5000, recent=(), **settings) -> np.ndarray:
    sampler = Sampler(Sampling(seed=7, **settings))
    counts = np.bincount([sampler.sample(logits, recent) for _ in range(draws)], minlength=len(logits))
    return counts / draws


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def assert_close(found: np.ndarray, expected: np.ndarray, draws: int = 5000) -> None:
    """Each frequency within five standard deviations of its binomial; impossible tokens never occur."""
    assert np.all(found[expected == 0] == 0)
    assert np.all(np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-12)


def only(*kept: int, temperature: float = 1.0) -> np.ndarray:
    masked = np.full_like(LOGITS, -np.inf)
    masked[list(kept)] = LOGITS[list(kept)]
    return softmax(masked / temperature)


def test_greedy_takes_the_first_of_equal_maxima():
    logits = np.array([0.0, 3.0, 1.0, 3.0], dtype=np.float32)
    assert Sampler(Sampling()).sample(logits) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_alone_is_the_softmax(temperature):
    assert_close(frequencies(LOGITS, temperature=temperature), softmax(LOGITS / temperature))


def test_draws_over_many_slices_follow_the_softmax():
    logits = np.linspace(-3, 3, 3000, dtype=np.float32)
    found = frequencies(logits, temperature=1.0).reshape(30, 100).sum(axis=1)
    assert_close(found, softmax(logits).reshape(30, 100).sum(axis=1))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 3}, (1, 3, 4)),
        ({"top_k": 1}, (1,)),
        ({"top_k": 8}, range(8)),
        ({"top_k": 100}, range(8)),
        ({"top_p": 0.6}, (1, 3)),
        ({"top_p": 0.7}, (1, 3, 4)),
        ({"top_p": 0.0}, (1,)),
        ({"top_p": 1e-9}, (1,)),
        ({"top_p": 1.0}, range(8)),
        ({"min_p": 0.3}, (1, 3, 4)),
        ({"min_p": 1.0}, (1,)),
        ({"top_k": 4, "top_p": 0.85, "min_p": 0.5}, (1, 3)),
    ],
)
def test_truncation_keeps_exactly_these_tokens(settings, kept):
    assert_close(frequencies(LOGITS, temperature=1.0, **settings), only(*kept))


def test_truncation_looks_at_probabilities_before_the_temperature():
    assert_close(frequencies(LOGITS, temperature=2.0, top_p=0.6), only(1, 3, temperature=2.0))


def test_top_k_among_equal_logits_keeps_k_of_them():
    found = frequencies(np.zeros(2000, dtype=np.float32), draws=2000, temperature=1.0, top_k=5)
    assert np.count_nonzero(found) == 5


@pytest.mark.parametrize("k", [1, 7, 40, 500, 4999, 5000])
def test_top_k_of_a_large_vocabulary_equals_sorting(k):
    logits = np.random.default_rng(k).standard_normal(5000).astype(np.float32)
    found = frequencies(logits, draws=1500, temperature=50.0, top_k=k)
    assert set(np.flatnonzero(found)) <= set(np.argsort(-logits)[:k])


def test_top_p_of_a_flat_large_vocabulary_keeps_its_share():
    logits = np.random.default_rng(1).normal(0, 0.01, 20000).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(softmax(logits)[order]), 0.9)) + 1]
    found = frequencies(logits, draws=300, temperature=1.0, top_p=0.9)
    assert set(np.flatnonzero(found)) <= set(kept)
    assert found[kept[-2000:]].sum() > 0.05


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once():
    logits = np.array([2.0, -1.0, 0.5, 1.0], dtype=np.float32)
    expected = softmax(np.array([1.0, -2.0, 0.5, 1.0]))
    assert_close(frequencies(logits, recent=[0, 1, 0, 0], temperature=1.0, repetition_penalty=2.0), expected)
    assert logits[0] == 2.0


def test_repetition_penalty_forgets_beyond_its_window_and_steers_greedy():
    logits = np.array([2.0, 1.9], dtype=np.float32)
    sampler = Sampler(Sampling(repetition_penalty=1.5, repetition_window=2))
    assert sampler.sample(logits, [0, 1, 1]) == 0
    assert sampler.sample(logits, [1, 0, 0]) == 1
    assert Sampler(Sampling(repetition_penalty=1.5, repetition_window=0)).sample(logits, [0]) == 0


def test_a_seed_repeats_and_other_seeds_differ():
    def run(seed):
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        return [sampler.sample(LOGITS) for _ in range(50)]

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert run(None) != run(None)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_tiny_temperatures_are_greedy(temperature):
    logits = np.array([-1e4, 1.0, 2.0, 1e4], dtype=np.float32)
    assert Sampler(Sampling(temperature=temperature, seed=0)).sample(logits) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(bad, temperature):
    logits = LOGITS.copy()
    logits[2] = bad
    with pytest.raises(UserError, match="not a finite number"):
        Sampler(Sampling(temperature=temperature)).sample(logits)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 1.1},
        {"min_p": -0.5},
        {"repetition_penalty": 0.0},
        {"repetition_window": -1},
        {"seed": -5},
        {"seed": 1 << 64},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": "much"},
        {"logit_bias": {3: float("inf")}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": 7},
        {"logit_bias": dict.fromkeys(range(300), 1.0)},
    ],
)
def test_settings_out_of_range_name_themselves(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        Sampling(**settings)


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}, {"top_p": 0.95}]
)
def test_a_large_vocabulary_takes_less_time_than_sorting_it(settings):
    logits = (np.random.default_rng(0).standard_normal(151936) * 5).astype(np.float32)
    sampler = Sampler(Sampling(temperature=0.8, seed=0, **settings))
    times: dict[str, list[float]] = {"sample": [], "sort": []}
    for _ in range(20):
        for name, run in (("sample", lambda: sampler.sample(logits, [1, 2, 3])), ("sort", lambda: logits.argsort())):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    assert min(times["sample"]) < min(times["sort"])


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_random_numbers_are_those_of_philox(key, counter, words):
    """The answers of Random123's kat_vectors."""
    assert philox(key, counter) == words


def test_seeds_of_answers_are_others_for_each_seed_and_index():
    seeds = [0, 1, 5, 6, 1 << 32, (1 << 64) - 1]
    found = {seed_of(seed, index) for seed in seeds for index in range(100)}
    assert len(found) == 600 and max(found) < 1 << 64 and [seed_of(seed, 0) for seed in seeds] == seeds


def test_presence_and_frequency_are_subtracted_from_recent_tokens():
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_window=4, logit_bias={9: 1.0, 3: 2.0})
    found = changes_of(sampling, [5, 3, 7, 3, 3])
    assert dict(zip(found.ids.tolist(), found.added.tolist(), strict=True)) == {9: 1.0, 3: 0.75, 7: -0.75}
    assert found.recent.tolist() == [False, True, True]


def test_the_latest_tokens_are_changed_where_there_are_many():
    found = changes_of(Sampling(repetition_penalty=2.0, repetition_window=1000), range(700))
    assert found.ids.tolist() == list(range(699, 699 - CHANGES, -1))


def test_bias_and_mask_steer_the_choice():
    assert Sampler(Sampling(logit_bias={6: 20.0})).sample(LOGITS) == 6
    allowed = np.zeros(len(LOGITS), bool)
    allowed[[0, 2]] = True
    assert Sampler(Sampling()).sample(LOGITS, allowed=allowed) == 2
    found = {Sampler(Sampling(temperature=9.0, seed=i)).sample(LOGITS, allowed=allowed) for i in range(50)}
    assert found == {0, 2}
    with pytest.raises(UserError, match="outside the vocabulary"):
        Sampler(Sampling(logit_bias={len(LOGITS): 1.0})).sample(LOGITS)


def test_a_position_has_its_random_number_whatever_came_before():
    one, other = (Sampler(Sampling(temperature=1.0, seed=11)) for _ in range(2))
    expected = [one.sample(LOGITS, position=i) for i in range(20)]
    assert [other.sample(LOGITS, position=i) for i in reversed(range(20))] == expected[::-1]
    assert len(set(expected)) > 1
