"""Texts that know which of their characters are own: as strings in all else, and never own by mistake. Here own
characters are upper case, so that each says itself what it is."""

import random

import pytest

from mlc_amd.runtime.text.traced_text import Traced, concatenate

# (operation, whether its result must know all own characters)
OPERATIONS = {
    "slice": (lambda t: t[2:7], True),
    "steps": (lambda t: t[::-2], True),
    "character": (lambda t: t[-1:] and t[-1], True),
    "strip": (lambda t: t.strip(), True),
    "strip characters": (lambda t: t.strip("aB "), True),
    "lstrip": (lambda t: t.lstrip("Aa"), True),
    "rstrip": (lambda t: t.rstrip(), True),
    "removeprefix": (lambda t: t.removeprefix("A"), True),
    "removesuffix": (lambda t: t.removesuffix("a"), True),
    "split": (lambda t: t.split(), True),
    "split once": (lambda t: t.split(None, 1), True),
    "split at": (lambda t: t.split("A"), True),
    "split at longer": (lambda t: t.split("Aa", 2), True),
    "rsplit": (lambda t: t.rsplit(None, 1), True),
    "rsplit at": (lambda t: t.rsplit("a", 2), True),
    "splitlines": (lambda t: t.splitlines(), True),
    "splitlines with ends": (lambda t: t.splitlines(True), True),
    "partition": (lambda t: t.partition("Ba"), True),
    "rpartition": (lambda t: t.rpartition("a"), True),
    "replace": (lambda t: t.replace("a", "xy"), True),
    "replace twice": (lambda t: t.replace("A", "", 2), True),
    "replace nothing": (lambda t: t.replace("", "-"), False),
    "repeat": (lambda t: 3 * t, True),
    "add": (lambda t: t + "xy" + t, True),
    "add to": (lambda t: "xy" + t, True),
    "join": (lambda t: t.join(["x", t, "y"]), True),
    "join nothing": (lambda t: t.join([]), True),
    "text": (str, True),
    "encoded": (lambda t: t.encode().decode(), False),
    "formatted": (lambda t: "{:>30}".format(t), False),  # noqa: UP032
    "percent": (lambda t: "%s-" % t, False),  # noqa: UP031
    "plain join": (lambda t: "".join([t, t]), False),
    "translated": (lambda t: t.translate({97: "b"}), False),
    "centered": (lambda t: t.center(30, "-"), False),
    "joined": (lambda t: concatenate([t, 1, "x", t]), True),
}


def traced(text: str) -> Traced:
    return Traced(text, bytes(c.isupper() for c in text))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    operation, complete = OPERATIONS[name]
    draw = random.Random(name)
    for _ in range(200):
        plain = "".join(draw.choices("ABab \n", k=draw.randrange(20)))
        made, expected = operation(traced(plain)), operation(plain)
        assert made == expected
        for text in made if isinstance(made, list | tuple) else [made]:
            if complete:
                own = bytes(text.is_own(i, i + 1) for i in range(len(text))) if isinstance(text, Traced) else b""
                assert own == bytes(c.isupper() for c in text)[: len(own)] and (own or not any(map(str.isupper, text)))
            elif isinstance(text, Traced):
                assert all(text[start:stop].isupper() for start, stop in text.spans())


@pytest.mark.parametrize("name", ["lower", "upper", "capitalize", "title", "swapcase", "casefold"])
def test_cases(name):
    text = traced("aB cD")
    assert getattr(text, name)() == getattr("aB cD", name)() and getattr(text, name)().spans() == text.spans()
    assert not isinstance(getattr(traced("ßA"), name)(), Traced) or getattr(traced("ßA"), name)().spans() == []
    assert getattr(Traced.all_own("ßx"), name)().is_own(0, 3)


def test_spans():
    text = traced("ABcdE")
    assert text.spans() == [(0, 2), (4, 5)] and Traced.of_spans("ABcdE", text.spans()).spans() == text.spans()
    assert Traced("AB").spans() == [] and text.is_own(2, 2) and not text.is_own(0, 3)


def test_a_beginning_has_the_same_own_characters():
    text = traced("ABcd")
    assert text.begins_with(traced("ABc")) and text.begins_with(text) and text.begins_with(Traced())
    assert not text.begins_with(Traced("ABc")) and not traced("AB").begins_with(text)
