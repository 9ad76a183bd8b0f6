"""Which cases of a matrix every run of the tests has: those that take different paths through the code. The others are
marked full."""

from collections.abc import Collection, Iterable

import pytest


def sample(cases: Iterable, kept: Collection) -> list:
    """Arguments of `pytest.mark.parametrize`: all of `cases`, where those that are not in `kept` are marked full."""
    cases = list(cases)
    assert all(case in cases for case in kept), "a case that is kept is none"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.full)
        for case in cases
    ]
