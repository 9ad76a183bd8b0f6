"""Which replica of several computes an answer soonest: the one that has most of its prompt cached and has little else
to do.

In: a request's body, and the replicas' names with the number of requests that each answers now. Out: the replicas, the
best one first.

Nothing is tokenized: prompts are compared as text, in blocks. A replica is taken to have cached the prompts that it was
given; where its cache is full that may be wrong, and costs no more than a request without a preference.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

# Characters that are compared together: about half a page of the KV cache (runtime/cache/pages.py), the least that is
# shared.
_BLOCK = 128
# An image in base64: no text has so many such characters in a row. It counts as a digest that is as long as the text
# of as many tokens as an image has rows, some 600.
_IMAGE = re.compile(r"[A-Za-z0-9+/=_-]{1024,}")
_IMAGE_BLOCKS = 16
# Blocks of a prompt that count: half a million characters, more than most models' contexts hold.
_MOST_BLOCKS = 4096
# Blocks that are known, of all prompts: 8 million characters.
_MOST_KNOWN = 1 << 16
# What a running answer costs the next one, in blocks of prompt to compute: it makes steps about 7 % longer (README: 8
# rows take 1.5 times as long as one), 14 steps of 200, and a step takes as long as some 35 tokens of a prompt: 500.
_RUNNING = 16
# The fields of all APIs that begin a prompt, in the order of chat templates. A continued conversation has the same
# beginning: only its list of messages is longer.
_FIELDS = ("model", "tools", "system", "instructions", "messages", "input", "prompt")


def prompt_blocks(body: Any) -> tuple[int, ...]:
    """The prompt in the body of a request of any API: for each of its blocks a number, which stands for all text up to
    its end. Numbers of different processes do not compare."""
    if not isinstance(body, Mapping):
        return ()
    texts = (json.dumps(body[name], sort_keys=True, ensure_ascii=False) for name in _FIELDS if name in body)
    text, found, before = _IMAGE.sub(_digest, "".join(texts)), [], 0
    for end in range(_BLOCK, min(len(text), _BLOCK * _MOST_BLOCKS) + 1, _BLOCK):
        before = hash((before, text[end - _BLOCK : end]))
        found.append(before)
    return tuple(found)


def _digest(image: re.Match[str]) -> str:
    digest = blake2b(image[0].encode(), digest_size=_BLOCK // 2).hexdigest()
    return digest * _IMAGE_BLOCKS


class Affinity:
    """What the replicas were given. Not thread-safe."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most = most
        self._known: OrderedDict[int, set[str]] = OrderedDict()  # block -> replicas; the last used one last
        self._turns: dict[str, int] = {}  # replica -> when it was last the best one
        self._turn = 0

    def ranked(self, blocks: Sequence[int], running: Mapping[str, int]) -> list[str]:
        """All replicas, the one with the least to compute before this prompt's answer first; of equal ones, that whose
        last turn is longest ago. running: requests that each replica answers."""
        missing = {name: len(blocks) - cached for name, cached in self._cached(blocks, running).items()}
        cost = {name: (missing[name] + _RUNNING * running[name], self._turns.get(name, 0)) for name in running}
        found = sorted(running, key=cost.__getitem__)
        self._turn += 1
        self._turns = {name: turn for name, turn in self._turns.items() if name in running}
        self._turns |= {name: self._turn for name in found[:1]}
        return found

    def _cached(self, blocks: Sequence[int], names: Mapping[str, int]) -> dict[str, int]:
        """How many of the first blocks each replica was given."""
        found, left = dict.fromkeys(names, 0), set(names)
        for count, block in enumerate(blocks, 1):
            left &= self._known.get(block, set())
            if not left:
                break
            found |= dict.fromkeys(left, count)
        return found

    def given(self, name: str, blocks: Sequence[int]) -> None:
        """A replica computes this prompt."""
        for block in reversed(blocks):  # beginnings are forgotten last: without them the rest is not found
            self._known.setdefault(block, set()).add(name)
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def gone(self, name: str) -> None:
        """This replica, and its cache, are no more."""
        for names in self._known.values():
            names.discard(name)
