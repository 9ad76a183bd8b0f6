"""Sampling parameters that GGUF files recommend."""

import warnings

import pytest

from mlc_amd.compiler.sampling import defaults


def metadata(**values: object) -> dict[str, object]:
    return {f"general.sampling.{key}": value for key, value in values.items()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        (
            {"temp": 0.6000000238418579, "top_k": 20, "top_p": 0.949999988079071, "min_p": 0.0},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0},
        ),
        ({"penalty_repeat": 1.1, "penalty_last_n": 256}, {"repetition_penalty": 1.1, "repetition_window": 256}),
        ({"penalty_last_n": -1, "top_k": -1}, {"repetition_window": 4096, "top_k": 0}),
        ({"penalty_last_n": 2_000_000}, {"repetition_window": 2_000_000}),
        ({"sequence": "top_k;temperature", "mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0.0}, {}),
    ],
)
def test_recommendations(values, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert defaults(metadata(**values), 4096) == expected


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("top_p", 5.0, "top_p is 5.0: it must be at most 1"),
        ("temp", "hot", "'hot', not a number"),
        ("temp", True, "True, not a number"),
        ("temp", float("nan"), "temperature is nan"),
        ("top_k", float("inf"), "infinity"),
        ("penalty_repeat", 0.0, "greater than 0"),
        ("mirostat", 2, "no such method"),
        ("xtc_probability", 0.5, "no such method"),
    ],
)
def test_what_cannot_be_used_is_ignored_with_a_warning(key, value, message):
    with pytest.warns(UserWarning, match=f"general.sampling.{key} is ignored: .*{message}"):
        assert defaults(metadata(**{key: value}) | metadata(min_p=0.25), 4096) == {"min_p": 0.25}
