"""Runs the tests of `mlc-amd bench`: prefill and decode, of one or several sequences, and with guesses.

In: an engine, a `Test`. Out: seconds of each repetition, and the power during it. Prompts are random, and so is the
first decoded token; the next tokens are the most likely ones. Only steps are timed. The test determines how many
guesses count as right (`Test.right`), whatever the model would choose.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlc_amd.runtime.engine.batch import Batch
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.sampled_rows import GREEDY, TokenChoice
from mlc_amd.runtime.speculation.speculation import Speculation, Wanted
from mlc_amd.tools.measure import power

_WARM_SECONDS = 0.25


class Repetition(NamedTuple):
    """Seconds of one run of a test, and how many of these the host did not wait for the device."""

    seconds: float
    host: float


class Power(NamedTuple):
    """Watts, and joules per token, of a test; None without a sensor."""

    watts: float | None
    per_token: float | None


@dataclass(frozen=True)
class Test:
    """One line of the result: n_prompt tokens are prefilled or n_gen decoded (the other is 0), after n_depth tokens, by
    each of n_seqs sequences. right: share of guesses that are right, from a source that takes no time; None: no
    guesses."""

    n_prompt: int
    n_gen: int
    n_depth: int
    n_seqs: int = 1
    right: float | None = None

    @property
    def name(self) -> str:
        work = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        work += f" x {self.n_seqs}" if self.n_seqs > 1 else ""
        work += f" guess {self.right:.0%}" if self.right is not None else ""
        return work + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences together."""
        return (self.n_prompt + self.n_gen) * self.n_seqs

    @property
    def context(self) -> int:
        """Length of a sequence at the end."""
        return self.n_depth + self.n_prompt + self.n_gen


def measure(
    engine, test: Test, repetitions: int, sensors: Sequence[power.Sensor] = ()
) -> tuple[list[Repetition], Power]:
    """The counted repetitions, which follow an uncounted one, and the power that sensors reported during them."""
    with (_prefill if test.n_prompt else _decode)(engine, test) as run:
        run()
        with power.Meter(sensors) as meter:
            found, runs = [run() for _ in range(repetitions)], repetitions
            while not meter.satisfied:
                run()
                runs += 1
    return found, Power(meter.watts, meter.joules and meter.joules / (runs * test.tokens))


@contextmanager
def _prefill(engine, test: Test) -> Iterator[Callable[[], Repetition]]:
    random = np.random.default_rng(0)

    def run() -> Repetition:
        engine.truncate(test.n_depth)
        ids = random.integers(0, engine.vocab, test.n_prompt)
        return _timed(engine.device, lambda: engine.advance(ids))

    fill(engine, test.n_depth)
    warm(engine)
    yield run


@contextmanager
def _decode(engine, test: Test) -> Iterator[Callable[[], Repetition]]:
    """Each sequence follows n_depth tokens of its own."""
    random = np.random.default_rng(0)
    engine.reset()
    warm(engine)
    engine.reset()
    known = _Known()
    with engine.batch(test.n_seqs) as batch:
        speculation = Speculation(known, batch.rows)
        batch.prefill(random.integers(0, engine.vocab, (test.n_seqs, test.n_depth)))

        def guess(ids: list[list[int]], right: float) -> None:
            known.texts = {Request(list(text)): list(text) for text in zip(*ids, strict=True)}
            _guess(batch, speculation, known.texts, right)

        def run() -> Repetition:
            batch.truncate(test.n_depth)
            ids, right = random.integers(0, engine.vocab, (test.n_gen, test.n_seqs)).tolist(), test.right
            work = (lambda: batch.decode(ids[0], test.n_gen)) if right is None else (lambda: guess(ids, right))
            return _timed(engine.device, work)

        yield run


def _timed(device, work: Callable[[], object]) -> Repetition:
    waited, start = device.waited, time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return Repetition(seconds, seconds - (device.waited - waited))


class _Known:
    """A source of guesses that knows the texts. Verification decides which guesses are right."""

    expected, free, at_once, follows = 0.7, False, False, False

    def __init__(self) -> None:
        self.texts: dict[Request, list[int]] = {}

    def draft(self, wanted: Mapping[Request, tuple[TokenChoice, int]]) -> Mapping[Request, list[int]]:
        return {
            request: self.texts[request][choice.position : choice.position + count]
            for request, (choice, count) in wanted.items()
        }

    def forget(self, request: Request) -> None:
        """Does nothing: it keeps nothing about requests."""

    def close(self) -> None:
        """Does nothing: it has no resources."""


def _guess(batch: Batch, speculation: Speculation, texts: dict[Request, list[int]], right: float) -> None:
    """Decodes the texts with guesses, like an engine that gets its answers token by token. All have one length."""
    random = np.random.default_rng(1)
    done = dict.fromkeys(texts, 0)
    length = len(next(iter(texts.values())))
    while min(done.values()) < length:
        begin = time.perf_counter()
        if (count := min(speculation.resting, length - max(done.values()))) > 0:
            batch.decode([text[done[request]] for request, text in texts.items()], count)
            spent = time.perf_counter() - begin
            for _ in range(count):
                speculation.rested(len(texts), spent / count)
            done = {request: of + count for request, of in done.items()}
            continue
        choices = {request: GREEDY._replace(tokens=text[: done[request] + 1]) for request, text in texts.items()}
        drafts = speculation.drafts({request: Wanted(choice, batch.guess_room) for request, choice in choices.items()})
        drafted = time.perf_counter()
        rows, kept = [], {}
        for request, text in texts.items():
            guesses = drafts.get(request, [])
            rows.append([text[min(done[request], length - 1)], *guesses])
            hits = random.random(len(guesses)) < right
            kept[request] = 1 + (len(guesses) if hits.all() else int(hits.argmin()))
            done[request] += kept[request]
        batch.verify(rows, list(kept.values()))
        speculation.completed(drafts, kept, drafted - begin, time.perf_counter() - drafted)


def fill(engine, tokens: int) -> None:
    """Replaces the content of the engine's own sequence by random tokens."""
    engine.reset()
    if tokens:
        engine.advance(np.random.default_rng(1).integers(0, engine.vocab, tokens))


def warm(engine) -> None:
    """Keeps a GPU busy until its clocks are up. The engine's position does not change; it must not be the end of the
    context."""
    if engine.device.kind == "cpu":
        return
    position, end = engine.position, time.perf_counter() + _WARM_SECONDS
    while time.perf_counter() < end:
        engine.advance([0])
        engine.truncate(position)
