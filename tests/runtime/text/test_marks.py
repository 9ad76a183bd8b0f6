"""Texts found in a text that arrives in pieces: stop strings, and the marks between the parts of an answer."""

import pytest

from mlc_amd.runtime.text.marks import split_at


@pytest.mark.parametrize(
    ("text", "marks", "expected"),
    [
        ("hello", (), ("hello", None, "")),
        ("hello", ("lo",), ("hel", "lo", "")),
        ("hello", ("l",), ("he", "l", "lo")),
        ("hel", ("lo",), ("he", None, "l")),
        ("a<|im", ("<|im_end|>",), ("a", None, "<|im")),
        ("xyx", ("yx", "x"), ("", "x", "yx")),
        ("ab", ("a", "ab"), ("", "ab", "")),
        ("a", ("",), ("a", None, "")),
    ],
)
def test_split_at(text, marks, expected):
    assert split_at(text, marks) == expected


def test_nothing_is_held_back_of_the_last_piece():
    assert split_at("a<|im", ("<|im_end|>",), last=True) == ("a<|im", None, "")
