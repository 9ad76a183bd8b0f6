"""Guesses of a step: those of its answers before it is computed, and what became of them after it."""

from collections.abc import Iterable, Mapping, Sequence

from mlc_amd.runtime.engine.answers import Answer
from mlc_amd.runtime.engine.requests import PlannedStep, Request
from mlc_amd.runtime.engine.sampled_rows import GREEDY, ChosenToken
from mlc_amd.runtime.engine.scheduler import Scheduler
from mlc_amd.runtime.speculation.speculation import MOST, Speculation, Wanted

_NONE = Wanted(GREEDY, 0)


def guess(
    step: PlannedStep, answers: Mapping[Request, Answer], scheduler: Scheduler, speculation: Speculation
) -> PlannedStep:
    """The step, which has no chunk, with guesses of its answers' next tokens."""
    singles = [answers[request] for request, _ in step.singles]
    if not (speculation.offers or any(of.limit_guesses and of.limit_guesses((), 1) for of in singles)):
        speculation.nothing()
        return step
    most = scheduler.guesses(step)
    return scheduler.draft(step, speculation.drafts(_wanted(singles, most, speculation)))


def _wanted(answers: Iterable[Answer], most: Mapping[Request, int], speculation: Speculation) -> dict[Request, Wanted]:
    """Of answers that may have guesses. most: of each."""
    return {
        of.request: Wanted(of.choice, most[of.request], of.limit_guesses)
        if of.constraint or speculation.offers
        else _NONE
        for of in answers
        if of.guessable
    }


def watch(
    step: PlannedStep, found: Sequence[ChosenToken], answers: Mapping[Request, Answer], speculation: Speculation
) -> None:
    """The step was computed without guesses, and its tokens distributed. found: the token of each of its answers."""
    tokens = {of: chosen.token for of, chosen in zip(step.answers, found, strict=True) if of in answers}
    singles = [answers[request] for request in tokens]
    speculation.watched(tokens, _wanted(singles, dict.fromkeys(tokens, MOST), speculation))


def learn(
    step: PlannedStep,
    found: Sequence[Sequence[ChosenToken]],
    answers: Mapping[Request, Answer],
    speculation: Speculation,
    guess_s: float,
    step_s: float,
) -> None:
    """The step was computed in step_s seconds, its guesses in guess_s. found: the chosen tokens of each answer."""
    drafts = {request: drafts for (request, _), drafts in zip(step.singles, step.drafts, strict=True) if drafts}
    counts = {request: len(tokens) for (request, _), tokens in zip(step.singles, found, strict=True)}
    speculation.completed(drafts, counts, guess_s, step_s)
    for request, guesses in drafts.items():
        answers[request].verified(len(guesses), counts[request] - 1)
