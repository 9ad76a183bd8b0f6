"""Guesses the next tokens of answers with a smaller model, the draft model, which has the same vocabulary.

The draft model chooses tokens with the settings and the seed of the answer. So where both models have similar
probabilities, they often choose the same token, at any temperature.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from os import PathLike
from pathlib import Path

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.cache.sequence import Sequence
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.devices.steps import pages_of
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.runner import Runner
from mlc_amd.runtime.engine.sampled_rows import GREEDY, TokenChoice
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.speculation.prompt_lookup import PromptLookup
from mlc_amd.runtime.speculation.speculation import Drafter
from mlc_amd.runtime.text.tokenizer import Tokenizer

LOOKUP, OWN = "lookup", "mtp"  # names of the other drafters, for users
_FEW = 8  # largest number of pending tokens that become single rows of a step


class DraftModel:
    """A `Drafter`. artifact, device: of the draft model; `close` closes them. UserError if the vocabulary differs."""

    expected, free, at_once, follows = 0.7, False, False, False

    def __init__(self, artifact, device, tokenizer: Tokenizer) -> None:
        if not Tokenizer.load(artifact.path).same_vocabulary(tokenizer):
            raise UserError(
                f"{artifact.manifest['name']} has another vocabulary: give a draft model with the model's own one"
            )
        self._artifact, self._device = artifact, device
        manifest = artifact.manifest
        self._cache = KvCache(pages_of(device, manifest), manifest["context"], images=manifest.get("images"))
        self._runner = Runner(artifact, device, self._cache)
        self._sequences: OrderedDict[Request, Sequence] = OrderedDict()  # the least recently used first
        # by request: how many of its tokens were read, and how many tokens of the sequence, no guesses, these became
        self._known: dict[Request, tuple[int, int]] = {}

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        for request, (choice, _) in wanted.items():
            self._follow(request, choice.tokens)
        found: dict[Request, list[int]] = {request: [] for request in wanted}
        unfinished = dict(wanted)
        while step := self._fitting(unfinished, wanted):
            for request, token in zip(step, self._step(step, wanted), strict=True):
                if token < 0:  # a logit is not a finite number
                    return {}
                found[request].append(token)
                self._sequences[request].append((token,))
            unfinished = {request: wanted[request] for request in step if len(found[request]) < wanted[request][1]}
        return {request: guesses for request, guesses in found.items() if guesses}

    def _fitting(self, unfinished: Iterable[Request], wanted: Collection[Request]) -> list[Request]:
        """The requests whose rows fit a step."""
        rows, found = self._runner.functions.single_rows, []
        for request in unfinished:
            sequence = self._sequences[request]
            if sequence.pending <= rows and self._reserve(sequence, wanted):
                found.append(request)
                rows -= sequence.pending
        return found

    def _follow(self, request: Request, tokens: SequenceOf[int]) -> None:
        """Sets the tokens of the request's sequence; the common prefix stays computed. Rows of images are left out, as
        this model has no features for them."""
        sequence = self._sequences.setdefault(request, self._cache.sequence())
        self._sequences.move_to_end(request)
        (given, known), own, equal = self._known.get(request, (0, 0)), sequence.tokens, 0
        texts = [token for token in tokens[given:] if token >= 0]
        while equal < min(len(own) - known, len(texts)) and own[known + equal] == texts[equal]:
            equal += 1
        sequence.truncate(min(known + equal, len(own)))
        sequence.append(texts[equal:])
        sequence.match()
        self._known[request] = len(tokens), known + len(texts)
        while sequence.pending > _FEW:
            count = min(sequence.pending - 1, self._runner.functions.chunk_rows, sequence.room)
            if count < 1 or not sequence.reserve(count):
                return
            self._cache.assign_slots([sequence])
            self._runner.sample((), sequence.chunk(count), ())
            sequence.advance(count)

    def _reserve(self, sequence: Sequence, wanted: Collection[Request]) -> bool:
        """Reserves pages for the pending tokens of a sequence. If there are too few, removes sequences of requests that
        are not in `wanted`. Returns whether it succeeded."""
        if not 0 < sequence.pending <= _FEW or sequence.computed + sequence.pending > self._cache.context:
            return False
        for request in list(self._sequences):
            if sequence.room >= sequence.pending:
                break
            if request not in wanted:
                self.forget(request)
        return sequence.room >= sequence.pending and sequence.reserve(sequence.pending)

    def _step(self, requests: list[Request], wanted: Mapping[Request, tuple[TokenChoice, int]]) -> list[int]:
        """Computes the next token of each request's sequence."""
        sequences = [self._sequences[request] for request in requests]
        self._cache.assign_slots(sequences)
        rows, choices, last = [], [], []
        for request, sequence in zip(requests, sequences, strict=True):
            rows += sequence.rows(sequence.tokens[sequence.computed :])
            choices += [GREEDY] * (sequence.pending - 1)
            choices.append(wanted[request][0]._replace(tokens=sequence.tokens, allowed=None, logprobs=None))
            last.append(len(rows) - 1)
        chosen = self._runner.sample(rows, None, choices)
        for sequence in sequences:
            sequence.advance(sequence.pending)
        return [chosen[row].token for row in last]

    def forget(self, request: Request) -> None:
        if sequence := self._sequences.pop(request, None):
            sequence.free()
        self._known.pop(request, None)

    def close(self) -> None:
        self._device.close()
        self._artifact.close()


def open_drafter(
    draft: str | PathLike[str] | None, tokenizer: Tokenizer, device: str | None, threads: int | None, size: KvSize
) -> Drafter | None:
    """Opens a drafter. draft: LOOKUP, the folder of a draft model's artifact, or None. (For OWN see
    `Engine.own_draft`.) device, threads, size: see `open_device`. tokenizer: of the main model. Raises UserError if the
    draft model cannot be used."""
    if draft is None:
        return None
    if draft == LOOKUP:
        return PromptLookup()
    artifact = Artifact.open(Path(draft))
    return DraftModel(artifact, open_device(artifact, device, threads, 0, size), tokenizer)
