"""Guesses by what was trained for the model and compiled with it: a layer of its own (multi-token prediction; the
formula is in compiler/models/transformer.py), or a draft that reads its rows (compiler/models/drafts/graphs.py).

The layer has keys of its own in the pages of the model's, computed from the decoder's rows at a position and, unless
it guesses blocks, the token that follows. So it is computed after steps, for the same rows (`follow`), which guesses
one token after each answer's newest one; for more guesses again, on its own guesses. A draft with blocks guesses all
tokens at once, before the step that verifies them. While guesses are not worth their time it only follows steps with
tokens of prompts; keys in between are not computed later, and guesses after them are less often right.

Complete pages are shared by their tokens, and the key at a page's last position depends on the first token after it,
too, which may be that of another text. Answers do not depend on it.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import takewhile
from typing import NamedTuple

from mlc_amd.runtime.artifact.manifest_draft import ManifestDraft
from mlc_amd.runtime.cache.sequence import ChunkRows
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
    """A `Drafter`; `follow` or `skip` each step. runner: of the model `name`; draft: of its manifest. UserError if the
    model has neither such a layer nor a draft."""

    expected, free, follows = 0.7, False, True

    def __init__(self, runner: Runner, name: str, draft: ManifestDraft | None) -> None:
        if not runner.functions.drafts:
            raise UserError(f"{name} has no layer that predicts further tokens: use --draft lookup, or a draft model")
        self._runner, self._draft = runner, draft
        self.at_once = bool(draft and draft["block"])
        self._own_keys = not draft or draft["own_keys"]
        self._rows: dict[Request, _Rows] = {}

    def follow(self, step: PlannedStep, chosen: SequenceOf[ChosenToken]) -> None:
        """The step was computed, and its sequences are not advanced yet. chosen: the tokens after each of its single
        rows, then after its chunk's last one, if that has one."""
        if not self._own_keys and not chosen:
            self.skip()
            return
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
        found = self._runner.follow(tokens)
        guesses = iter(found or [0] * len(chosen))  # of a draft with blocks
        self._rows = {of: _Rows(row, at, [next(guesses) for _ in range(count)]) for of, row, at, count in places}

    def skip(self) -> None:
        """A step was computed without it."""
        self._rows = {}

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        known, self._rows = dict(self._known(wanted)), {}
        if self.at_once:
            return {request: guesses for request in known if (guesses := self._block(request))}
        found = {request: [guess] for request, (guess, _) in known.items()}
        sources = {request: row for request, (_, row) in known.items()}  # the row of the last guess
        unfinished = list(found)
        while unfinished := [request for request in unfinished if len(found[request]) < self._most(request, wanted)]:
            rows = []
            for request in unfinished:
                sequence = request.sequence
                assert sequence
                position = sequence.computed - 1 + len(found[request]) * self._own_keys
                rows.append(sequence.row(found[request][-1], position))
            guesses = self._runner.chain(rows, [sources[request] for request in unfinished])
            for row, (request, guess) in enumerate(zip(unfinished, guesses, strict=True)):
                sources[request] = row
                found[request] += [guess] if guess >= 0 else []
            unfinished = [request for request, guess in zip(unfinished, guesses, strict=True) if guess >= 0]
        return found

    def _known(self, wanted: Iterable[Request]) -> Iterator[tuple[Request, tuple[int, int]]]:
        """Of those whose last token's row was followed: the guess, and the row."""
        for request in wanted:
            sequence, rows = request.sequence, self._rows.get(request)
            last = sequence.computed - 1 - rows.position if sequence and rows else -1
            if rows and 0 <= last < len(rows.guesses) and rows.guesses[last] >= 0:
                yield request, (rows.guesses[last], rows.first + last)

    def _block(self, request: Request) -> list[int]:
        """As many guesses as the block has and its next step has pages for."""
        sequence, draft = request.sequence, self._draft
        assert sequence and draft
        first = sequence.computed
        count = min(draft["block"], sequence.capacity - first)
        if count < 2:
            return []
        tokens = [sequence.tokens[first], *[draft["mask"]] * (count - 1)]
        together = 0 if draft["causal"] else count
        found = self._runner.block(ChunkRows(tokens, first, sequence.table_row, together=together))
        return list(takewhile(lambda token: token >= 0, found[1:]))

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
