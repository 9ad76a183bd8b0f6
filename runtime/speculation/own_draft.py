"""Guesses by a draft that was trained for the model and compiled with it: either a layer of the model itself
(multi-token prediction; the formula is in compiler/models/transformer.py), or a draft that reads the model's hidden
rows (compiler/models/drafts/graphs.py).

The draft has its own keys, in pages of the same numbers as the model's. It computes them from the decoder's row at a
position and, unless it guesses blocks, from the token that follows. So it is computed after each step, for the same
rows (`follow`); this also guesses the token after each answer's newest token. It computes further guesses from its own
guesses. A draft with blocks guesses all tokens at once, before the step that verifies them. While guesses are not worth
their time, the draft only follows steps with tokens of prompts. The keys of the positions in between are never
computed, so later guesses are less often right.

Complete pages are shared by their tokens. The key at the last position of a page also depends on the first token after
the page, which may be a token of another text. Answers are not affected.
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
    """The rows of a request in the last step. first: index of its first row. position: of this row. guesses: one for
    each row."""

    first: int
    position: int
    guesses: list[int]


class OwnDraft:
    """A `Drafter`. Call `follow` or `skip` for each step. runner: of the model `name`. draft: the manifest's entry, or
    None. Raises UserError if the model has neither such a layer nor a draft."""

    expected, free, follows = 0.7, False, True

    def __init__(self, runner: Runner, name: str, draft: ManifestDraft | None) -> None:
        if not runner.functions.drafts:
            raise UserError(f"{name} has no layer that predicts further tokens: use --draft lookup, or a draft model")
        self._runner, self._draft = runner, draft
        self.at_once = bool(draft and draft["block"])
        self._own_keys = not draft or draft["own_keys"]
        self._rows: dict[Request, _Rows] = {}

    def follow(self, step: PlannedStep, chosen: SequenceOf[ChosenToken]) -> None:
        """Called after a step was computed, and before its sequences are advanced. chosen: the tokens after each of the
        step's single rows, then the token after the chunk's last row if it has one."""
        if not self._own_keys and not chosen:
            self.skip()
            return
        # for each request: its first row with a token, the position of this row, and the number of tokens
        places, row = [], 0
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
        guesses = iter(found or [0] * len(chosen))  # a draft with blocks returns none here
        self._rows = {of: _Rows(row, at, [next(guesses) for _ in range(count)]) for of, row, at, count in places}

    def skip(self) -> None:
        """Called after a step that it did not follow."""
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
        """For requests whose last token's row was followed: the request, the guess and the row."""
        for request in wanted:
            sequence, rows = request.sequence, self._rows.get(request)
            last = sequence.computed - 1 - rows.position if sequence and rows else -1
            if rows and 0 <= last < len(rows.guesses) and rows.guesses[last] >= 0:
                yield request, (rows.guesses[last], rows.first + last)

    def _block(self, request: Request) -> list[int]:
        """The guesses of a block: as many as the block has and the next step has pages for."""
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
        """The largest number of guesses: the keys of all but the last two must fit the pages of the next step."""
        sequence = request.sequence
        assert sequence
        return min(wanted[request][1], sequence.capacity - sequence.computed + 1)

    def forget(self, request: Request) -> None:
        self._rows.pop(request, None)

    def close(self) -> None:
        """Does nothing: it has no resources of its own."""
