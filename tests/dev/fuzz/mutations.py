"""Changes of files for fuzzing: of bytes, as disks and transfers damage them, and of JSON values, as if another program
had written them.

In: data and a random generator. Out: changed data, and in words what was changed.
"""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

# What numbers become, near the limits of types and of what makes sense.
NUMBERS = (
    0, 1, -1, 2, 63, 64, 65, 127, 128, 255, 256, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    (1 << 40), (1 << 62), (1 << 63) - 1, 1 << 63, 1 << 64, 10**30, -(1 << 31), -(1 << 63), 0.0, 0.5, -0.5, 1e300,
)  # fmt: skip
TEXTS = (
    "", "x", "0", "../x", "../../etc/passwd", "/etc/passwd", ".", "..", "a/b", "\0", "\n", "a\nb", "\x1b[31m", "\u202e",
    "é", "𝄞" * 3, "x" * 5000, "float32", "int8", "cpu", "None", "%s", "{}", "$", " ", "\\",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": None}, 3, "x", 1.5, [0] * 9, [-1], {"a": {"b": []}})


def bytes_changed(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Flipped bits, zeros, a block from elsewhere, a cut end, or a lost or repeated part."""
    kind = draw.choice(("flip", "flip", "zeros", "copy", "cut", "lose", "repeat", "random"))
    at = draw.randrange(len(data)) if data else 0
    count = min(draw.choice((1, 2, 8, 64, 512, 4096)), len(data) - at)
    part = data[at : at + count]
    if kind == "flip":
        part = bytes([data[at] ^ (1 << draw.randrange(8))]) + part[1:] if part else b"x"
    elif kind == "zeros":
        part = bytes(count)
    elif kind == "random":
        part = draw.randbytes(count)
    elif kind == "copy":
        start = draw.randrange(len(data)) if data else 0
        part = data[start : start + count]
    elif kind == "cut":
        return data[:at], f"cut at byte {at}"
    elif kind == "lose":
        part = b""
    else:
        part = part * 2
    return data[:at] + part + data[at + count :], f"{kind} {count} bytes at {at}"


def places(value: Any, place: tuple = ()) -> list[tuple]:
    """The place of every value within a JSON value, as keys and indexes."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, one in inside for found in places(one, (*place, key)))]


def json_changed(value: Any, draw: random.Random, most: int = 3) -> tuple[Any, str]:
    """A changed copy of a JSON object; one to `most` changes."""
    changed, words = copy.deepcopy(value), []
    for _ in range(draw.choice((1, 1, 1, *range(1, most + 1)))):
        words.append(_change(changed, draw))
    return changed, "; ".join(words)


def _change(root: Any, draw: random.Random) -> str:
    place = _any_place(root, draw)
    if not place:
        return "nothing"
    parent = _at(root, place[:-1])
    name, old = place[-1], _at(root, place)
    change = draw.choice(_CHANGES)
    what = change(root, parent, name, old, draw)
    return f"{_text(place)} {what}"


def _any_place(root: Any, draw: random.Random) -> tuple:
    """Of all depths alike: most values of a file lie in its longest lists."""
    place: tuple = ()
    here = root
    while isinstance(here, dict | list) and here and (not place or draw.random() < 0.8):
        key = draw.choice(list(here)) if isinstance(here, dict) else draw.randrange(len(here))
        place, here = (*place, key), here[key]
    return place


def _at(root: Any, place: tuple) -> Any:
    for key in place:
        root = root[key]
    return root


def _text(place: tuple) -> str:
    return "".join(f"[{key!r}]" for key in place)[:200]


# ---- changes of one value: (root, parent, key, old value, generator) -> what was done


def _number(root, parent, name, old, draw) -> str:
    near = [old - 1, old + 1, old * 2, old // 2, -old, old + 64] if type(old) is int else []
    parent[name] = draw.choice([*near, *near, *NUMBERS])
    return f"= {str(parent[name])[:40]}"


def _value(root, parent, name, old, draw) -> str:
    parent[name] = draw.choice(TEXTS if isinstance(old, str) and draw.random() < 0.7 else OTHERS)
    return f"= {parent[name]!r:.40}"


def _remove(root, parent, name, old, draw) -> str:
    del parent[name]
    return "removed"


def _rename(root, parent, name, old, draw) -> str:
    if isinstance(parent, list):
        parent.insert(name, copy.deepcopy(old))
        return "twice"
    new = draw.choice((*TEXTS, *parent, f"{name}x"))
    parent[new] = parent.pop(name)
    return f"renamed to {new!r:.40}"


def _swap(root, parent, name, old, draw) -> str:
    other = draw.choice(list(parent)) if isinstance(parent, dict) else draw.randrange(len(parent))
    parent[name], parent[other] = parent[other], parent[name]
    return f"swapped with {other!r:.40}"


def _transplant(root, parent, name, old, draw) -> str:
    place = _any_place(root, draw)
    parent[name] = copy.deepcopy(_at(root, place))
    return f"= that of {_text(place)}"


def _deep(root, parent, name, old, draw) -> str:
    depth = draw.choice((50, 900))
    parent[name] = json.loads("[" * depth + "]" * depth)
    return f"nested {depth} deep"


_CHANGES: tuple[Callable[..., str], ...] = (
    _number, _number, _number, _value, _value, _remove, _rename, _swap, _swap, _transplant, _deep,
)  # fmt: skip
