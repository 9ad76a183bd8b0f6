"""Runs steps on a device: chooses the function of the plan, writes the io buffers, reads the results.

In: single rows and a chunk. Out: the tokens that the device chooses, one for each single row, then one for the chunk's
last row (`sample`, or `start` and `finish`); or the logits of a chunk, float32 (`run`, `score`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mlc_amd.runtime.artifact.io_names import FEATURES, page_table
from mlc_amd.runtime.artifact.manifest import FOLLOW
from mlc_amd.runtime.cache.kv_cache import KvCache
from mlc_amd.runtime.cache.sequence import ChunkRows, SingleRow
from mlc_amd.runtime.devices.steps import write_step
from mlc_amd.runtime.engine.functions import Functions, StepFunction
from mlc_amd.runtime.engine.sampled_rows import GREEDY, ChosenToken, SampledRows, TokenChoice
from mlc_amd.runtime.images.features import Features

Choices = Sequence[TokenChoice]
_SCORED = 64  # rows whose logits are read at once; with a large vocabulary, the logits of a row take half a megabyte


class Runner:
    """Runs steps of an artifact on `device`. cache: allocates its pages. images: encoded images, for chunks."""

    def __init__(self, artifact, device, cache: KvCache, images: Features | None = None) -> None:
        self.device, self.cache = device, cache
        # With states, two functions cannot run beside each other: both would use the cells of the same step.
        beside = None if cache.cells else getattr(device, "can_run_beside", None)
        self.functions = Functions(artifact.manifest, beside)
        self.vocab = artifact.manifest["model"]["vocab"]
        self.images = images or Features()
        self._entries = artifact.manifest["functions"]
        self._last, self._answered = "", [0]  # the function of the last step, and its rows that got a token
        self._choices = SampledRows(device, artifact.manifest["io"], self.vocab)
        self._started: deque[Callable[[], Any]] = deque()  # for each started step a function that reads its results

    @property
    def stages(self) -> int:
        """The number of steps that the device computes at the same time: the number of GPUs that have layers each."""
        return max(getattr(self.device, "in_flight", 1) - 1, 1)

    @property
    def scored(self) -> int:
        """Upper limit of the rows of a call of `score`."""
        return min(self.functions.score.rows, _SCORED)

    def prepare(self, function: StepFunction, singles: Sequence[SingleRow], chunk: ChunkRows | None) -> int:
        """Writes the io buffers of a step of a function. Returns the number of its rows of logits."""
        changed = self.cache.changed()
        try:
            for span in changed:
                self.device.write(page_table(span), self.cache.page_tables[span])
        except BaseException:
            self.cache.mark_changed()
            raise
        if chunk and (images := chunk.images):
            first, live = len(singles), len(singles) + len(chunk[0])
            self.device.fill(FEATURES, live, partial(self.images.put, images, first))
        return write_step(self.device, self._entries[function.name], singles, chunk)

    def _function(self, singles: Sequence[SingleRow], chunk: ChunkRows | None) -> StepFunction:
        count, images = (len(chunk[0]), bool(chunk.images)) if chunk else (0, False)
        return self.functions.of(len(singles), count, images)

    def prepare_chunk(self, chunk: ChunkRows) -> str:
        """Writes the io buffers of a step that is one chunk. Returns the name of its function."""
        function = self._function((), chunk)
        self._prepare_rows(function, (), chunk)
        return function.name

    def _prepare_rows(self, function: StepFunction, singles: Sequence[SingleRow], chunk: ChunkRows | None) -> int:
        """`prepare`, but in a function whose rows are all single, the rows of the chunk become single rows."""
        if not (function.steps and chunk):
            return self.prepare(function, singles, chunk)
        ids, position, slot, places, *_ = chunk
        rows = [(int(token), position + i, slot) for i, token in enumerate(ids)]
        if places is not None:
            rows = [(*row, int(place)) for row, place in zip(rows, places[:, 0], strict=True)]
        return self.prepare(function, [*singles, *rows], None)

    def run(self, chunk: ChunkRows) -> np.ndarray:
        """Computes a chunk. Returns its last row's logits, float32 [vocab]; the next step may overwrite the memory."""
        self._choices.clear()
        rows = self._run((), self._second_half((), chunk))
        return self.device.read("logits", rows)[rows - 1, : self.vocab]

    def sample(
        self, singles: Sequence[SingleRow], chunk: ChunkRows | None, choices: Choices | Callable[[], Choices]
    ) -> list[ChosenToken]:
        """Computes a step. Returns a token for each choice: of the single rows, then of the chunk's last row. choices:
        may be a function that returns them; it is called while the device computes what does not depend on them."""
        chunk = self._second_half(singles, chunk)
        last = self._last_row(singles, chunk)
        known: Choices = ()

        def write() -> None:
            nonlocal known
            known = choices() if callable(choices) else choices
            self._write_choices(known, len(singles), last)

        if callable(choices):
            self._run(singles, chunk, write)
        else:
            write()
            self._run(singles, chunk)
        self._answered = [*range(len(singles)), last][: len(known)]
        return self._choices.read(self._answered, known)

    def _last_row(self, singles: Sequence[SingleRow], chunk: ChunkRows | None) -> int:
        """The row of logits of the chunk's last token."""
        single, count = len(singles), len(chunk[0]) if chunk else 0
        return single + count - 1 if chunk and self._function(singles, chunk).steps else single

    def _write_choices(self, choices: Choices, single: int, last: int) -> None:
        skipped = [GREEDY] * (last - single) if len(choices) > single else []
        self._choices.write([*choices[:single], *skipped, *choices[single:]])

    def can_start_ahead(self, rows: int, late: bool = False) -> bool:
        """Whether a step of so many single rows may start while a step of the same rows is in progress (`start_ahead`).
        late: before it is known how its tokens are chosen. Never with states: their cells depend on the step before."""
        return not self.cache.cells and self.device.can_start_ahead(self.functions.of(rows, 0).name, late)

    def start(
        self, singles: Sequence[SingleRow], chunk: ChunkRows | None, choices: Choices | Callable[[], Choices]
    ) -> None:
        """Starts a step with the arguments of `sample`; `finish` returns its tokens. On devices with one stage, the
        step must have no chunk, and all steps before must be finished."""
        function, last = self._function(singles, chunk), self._last_row(singles, chunk)
        self._prepare_rows(function, singles, chunk)
        self._last, self._answered = function.name, [*range(len(singles))]

        if callable(choices):
            self.device.start(function.name, lambda: self._choose(choices(), len(singles), last))
        else:
            self._choose(choices, len(singles), last)
            self.device.start(function.name)

    def start_scoring(self, chunk: ChunkRows) -> None:
        """Starts `score`; `finish` returns the logits. Only on devices with several `stages`."""
        function = self.functions.score
        rows = self.prepare(function, (), chunk)
        self._started.append(lambda: self.device.read("logits", rows)[:, : self.vocab])
        self.device.start(function.name)

    def feed(self, chunk: ChunkRows) -> None:
        """Computes a chunk whose logits are not needed. With several stages, returns once another can be started."""
        if self.stages == 1:
            self.run(chunk)
            return
        self._choices.clear()
        self.device.feed(self.prepare_chunk(chunk))

    def _second_half(self, singles: Sequence[SingleRow], chunk: ChunkRows | None) -> ChunkRows | None:
        """The part of a chunk that the next run must get. If the device can compute both halves at the same time, makes
        that run compute the first half, too (`run_beside`), and returns the second; otherwise returns the whole."""
        beside = self.functions.beside
        if not beside or not chunk:
            return chunk
        ids, position, slot, places, *_ = chunk
        half = (len(singles) + len(ids) + 1) // 2
        count = next((size for size in self.functions.chunk_sizes if size >= half), len(ids))
        if count >= len(ids) or not beside(self.functions.of(0, count).name):
            return chunk
        first, second = (None, None) if places is None else (places[:count], places[count:])
        self.device.run_beside(self.prepare_chunk(ChunkRows(ids[:count], position, slot, first)))
        return ChunkRows(ids[count:], position + count, slot, second)

    def start_ahead(self, singles: Sequence[SingleRow], choices: Choices | None) -> None:
        """Starts the next step of the same rows before the step in progress is finished. The tokens of `singles` are
        ignored: the device uses those that the step in progress chooses. choices: None if `supply_choices` will
        follow."""
        function = self.functions.of(len(singles), 0)
        self.prepare(function, singles, None)
        self._last, self._answered = function.name, [*range(len(singles))]
        if choices is not None:
            self._choose(choices, len(singles), len(singles))
        self.device.start_ahead(function.name, choices is None)

    def supply_choices(self, choices: Choices) -> None:
        """Sets how the step that was started last chooses its tokens."""
        self._choose(choices, len(choices), len(choices))
        self.device.complete_inputs(self._last)

    def _choose(self, choices: Choices, single: int, last: int) -> None:
        """Writes the choices of a step that is about to start. single: its single rows. last: from `_last_row`."""
        self._write_choices(choices, single, last)
        rows = [*range(single), last][: len(choices)]
        self._started.append(lambda: self._choices.read(rows, choices))

    def finish(self) -> Any:
        """Waits for the oldest step that was started. Returns its tokens, [ChosenToken]; or, after `start_scoring`, the
        logits, in memory that the next step may overwrite."""
        self.device.wait()
        return self._started.popleft()()

    def abandon(self) -> None:
        """Drops the results of all steps that were started."""
        self._started.clear()
        if self.stages > 1:
            self.device.discard()

    def _run(
        self, singles: Sequence[SingleRow], chunk: ChunkRows | None, meanwhile: Callable[[], None] | None = None
    ) -> int:
        """Computes a step. Returns its number of rows of logits. meanwhile: see `run` of devices."""
        function = self._function(singles, chunk)
        rows = self._prepare_rows(function, singles, chunk)
        self.device.run(function.name, meanwhile)
        self._last = function.name
        return rows

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Runs the draft that is compiled with the model, after a step (`sample`). tokens: the token after each row of
        the step. Returns the draft's most likely token after each of these, for the rows for which the step chose
        tokens; [] for a draft that guesses blocks."""
        name = FOLLOW + self._last
        self._choices.clear()
        self.device.write("tokens", np.asarray(tokens, np.int32))
        self.device.run(name)
        if not (self._answered and self._entries[name]["samples"]):
            return []
        sampled = self.device.read("sampled", max(self._answered) + 1).tolist()
        return [sampled[row] for row in self._answered]

    def chain(self, rows: Sequence[SingleRow], sources: Sequence[int]) -> list[int]:
        """Runs the draft again, after `follow` or `chain`. rows: guesses of the last call; sources: the rows of the
        last call that guessed them. Returns the most likely token after each row."""
        function = self.functions.chain(len(rows))
        self._choices.clear()
        self.prepare(function, rows, None)
        self.device.write("sources", np.asarray(sources, np.int32))
        self.device.run(function.name)
        return self.device.read("sampled", len(rows)).tolist()

    def block(self, rows: ChunkRows) -> list[int]:
        """Runs a draft that guesses blocks. Returns the most likely token of each row; -1 if a logit is not finite."""
        function = self.functions.block
        assert function, "a draft with blocks"
        self._choices.clear()
        self.prepare(function, (), rows)
        self.device.run(function.name)
        return self.device.read("sampled", len(rows[0])).tolist()

    def score(self, chunk: ChunkRows) -> np.ndarray:
        """Computes a chunk of at most `scored` rows. Returns the logits of all its rows, float32 [rows, vocab], in
        memory that the next step may overwrite."""
        rows = self.prepare(self.functions.score, (), chunk)
        self.device.run(self.functions.score.name)
        return self.device.read("logits", rows)[:, : self.vocab]
