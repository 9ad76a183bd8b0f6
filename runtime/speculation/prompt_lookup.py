"""Guesses the next tokens of an answer from its own text: the tokens after the last occurrence of its newest tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.sampled_rows import TokenChoice

LENGTHS = (4, 3, 2)  # lengths of the searched runs of tokens, the longest first


@dataclass
class _Index:
    """ends: where the last occurrence of each run of tokens ends. read: the number of indexed tokens."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes all runs that end before the last token, so that a token follows each of them."""
        for end in range(max(self.read, 1), len(tokens)):
            for length in LENGTHS:
                if length <= end:
                    self.ends[tuple(tokens[end - length : end])] = end
        self.read = len(tokens)

    def following(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that followed the longest run with which `tokens` end; stops before rows of images."""
        for length in LENGTHS:
            if length < len(tokens) and (end := self.ends.get(tuple(tokens[-length:]))):
                period = len(tokens) - end  # the text is assumed to repeat with this period
                return list(takewhile(lambda token: token >= 0, (tokens[end + i % period] for i in range(count))))
        return []


class PromptLookup:
    """A `Drafter`; see the module's docstring."""

    expected, free, at_once, follows = 0.5, True, False, False

    def __init__(self) -> None:
        self._indices: dict[Request, _Index] = {}

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        found = {}
        for request, (choice, count) in wanted.items():
            tokens, index = choice.tokens, self._indices.setdefault(request, _Index())
            index.extend(tokens)
            if guess := index.following(tokens, count):
                found[request] = guess
        return found

    def forget(self, request: Request) -> None:
        self._indices.pop(request, None)

    def close(self) -> None:
        self._indices.clear()
