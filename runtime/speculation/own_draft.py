"""Guesses by a layer of the model itself that was trained for them (multi-token prediction; the formula is in
compiler/models/transformer.py).

The layer has keys of its own in the pages of the model's, computed from the decoder's last row at a position and the
token that follows. So it is computed after steps, for the same rows (`follow`), which guesses one token after each
answer's newest one; for more guesses again, on its own guesses. While its guesses are not worth their time it only
follows steps with tokens of prompts; keys in between are not computed later, and guesses after them are less often
right.

Complete pages are shared by their tokens, and the key at a page's last position depends on the first token after it,
too, which may be that of another text. Answers do not depend on it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from mlc_amd.runtime.engine.requests import PlannedStep, Request
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.sampled_rows import ChosenToken, TokenChoice
from mlc_amd.runtime.errors import UserError


class _Rows(NamedTuple):
    """A request's rows in the last step, with a guess each: index of the first among all, its position, the guesses."""

    first: int
    position: int
    guesses: list[int]


class OwnDraft:
    """A `Drafter`; `follow` or `skip` each step. runner: of the model `name`; UserError if it has no such layer."""

    expected, free, follows = 0.7, False, True

    def __init__(self, runner: Runner, name: str) -> None:
        if not runner.functions.drafts:
            raise UserError(f"{name} has no layer that predicts further tokens: use --draft lookup, or a draft model")
        self._runner = runner
        self._rows: dict[Request, _Rows] = {}

    def follow(self, step: PlannedStep, chosen: SequenceOf[ChosenToken]) -> None:
        """The step was computed, and its sequences are not advanced yet. chosen: the tokens after each of its single
        rows, then after its chunk's last one, if that has one."""
        places, row = [], 0  # of each request: its first row with a token, the position of that, and its tokens
        for (request, sequence), drafts in zip(step.singles, step.drafts, strict=True):
            places.append((request, row, sequence.computed, 1 + len(drafts)))
            row += 1 + len(drafts)
        tokens = [max(found.token, 0) for found in chosen]
        if chunk := step.chunk:
            end = chunk.start + chunk.count
            tokens[row:row] = chunk.sequence.tokens[chunk.start + 1 : end + 1]
            if chunk.answers:
                places.append((chunk.request, row + chunk.count - 1, end - 1, 1))
        guesses = iter(self._runner.follow(tokens))
        self._rows = {of: _Rows(row, at, [next(guesses) for _ in range(count)]) for of, row, at, count in places}

    def skip(self) -> None:
        """A step was computed without it."""
        self._rows = {}

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        found: dict[Request, list[int]] = {}
        sources: dict[Request, int] = {}  # the row of the last guess
        for request in wanted:
            sequence, rows = request.sequence, self._rows.get(request)
            last = sequence.computed - 1 - rows.position if sequence and rows else -1
            if rows and 0 <= last < len(rows.guesses) and rows.guesses[last] >= 0:
                found[request], sources[request] = [rows.guesses[last]], rows.first + last
        self._rows = {}
        unfinished = list(found)
        while unfinished := [request for request in unfinished if len(found[request]) < self._most(request, wanted)]:
            rows = []
            for request in unfinished:
                sequence = request.sequence
                assert sequence
                position = sequence.computed - 1 + len(found[request])
                rows.append(sequence.row(found[request][-1], position))
            guesses = self._runner.chain(rows, [sources[request] for request in unfinished])
            for row, (request, guess) in enumerate(zip(unfinished, guesses, strict=True)):
                sources[request] = row
                found[request] += [guess] if guess >= 0 else []
            unfinished = [request for request, guess in zip(unfinished, guesses, strict=True) if guess >= 0]
        return found

    @staticmethod
    def _most(request: Request, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> int:
        """Number of guesses: the keys of all but the last two are written to pages that its next step has."""
        sequence = request.sequence
        assert sequence
        return min(wanted[request][1], sequence.capacity - sequence.computed + 1)

    def forget(self, request: Request) -> None:
        self._rows.pop(request, None)

    def close(self) -> None:
        """Has no resources of its own."""
