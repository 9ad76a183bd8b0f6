"""Chooses the replica that will answer a request soonest: it has most of the prompt cached, and is not busy with other
requests.

In: a request's body, and the replicas' names with the number of requests that each one is answering. Out: the replicas,
the best one first.

Nothing is tokenized: prompts are compared as text, in blocks. A replica is assumed to have cached the prompts that it
was given. If its cache is full, this may be wrong; then the request takes as long as it would on another replica.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

# Characters of a block: about half a page of the KV cache (runtime/cache/pages.py), which is the smallest unit that
# sequences share.
_BLOCK = 128
# An image in base64: no text has so many of these characters in a row. It is replaced by a digest with about as many
# characters as text has for the tokens of an image, some 600.
_IMAGE = re.compile(r"[A-Za-z0-9+/=_-]{1024,}")
_IMAGE_BLOCKS = 16
# Blocks of a prompt that are compared: half a million characters, more than most models' contexts hold.
_MOST_BLOCKS = 4096
# Blocks that are remembered, of all prompts: 8 million characters.
_MOST_KNOWN = 1 << 16
# The cost of a running answer for the next one, in blocks of prompt that could be computed instead. A running answer
# makes steps about 7 % longer (README: 8 rows take 1.5 times as long as one). For 200 steps this is the time of 14
# steps; a step takes as long as about 35 tokens of a prompt, so the cost is 500 tokens.
_RUNNING = 16
# The fields, of any API, with which a prompt begins, in the order of chat templates. A continued conversation has the
# same beginning: only its list of messages is longer.
_FIELDS = ("model", "tools", "system", "instructions", "messages", "input", "prompt")


def prompt_blocks(body: Any) -> tuple[int, ...]:
    """The blocks of the prompt in a request's body, for any API. The number of a block stands for all text up to its
    end. Numbers from different processes cannot be compared."""
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
    """Remembers which prompts the replicas were given. Not thread-safe."""

    def __init__(self, most: int = _MOST_KNOWN) -> None:
        self._most = most
        # block -> replicas; the most recently used block is last
        self._known: OrderedDict[int, set[str]] = OrderedDict()
        self._turns: dict[str, int] = {}  # replica -> when it was last ranked first
        self._turn = 0

    def ranked(self, blocks: Sequence[int], running: Mapping[str, int]) -> list[str]:
        """All replicas, sorted by how much they must compute before they can begin the answer, the least first. Of
        equal ones, the replica that was ranked first longest ago comes first. running: the requests that each replica
        is answering."""
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
        """Records that a replica computes this prompt."""
        for block in reversed(blocks):  # beginnings are forgotten last: without them, later blocks cannot be found
            self._known.setdefault(block, set()).add(name)
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def gone(self, name: str) -> None:
        """Forgets a replica, which has ended."""
        for names in self._known.values():
            names.discard(name)
