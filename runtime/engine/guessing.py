"""Speculation in a step. In: a planned step and its answers. Out: the step with guesses of their next tokens; after the
step, statistics of which guesses were right."""

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
    """The step with guesses of its answers' next tokens. It must have no chunk."""
    singles = [answers[request] for request, _ in step.singles]
    if not (speculation.offers or any(of.limit_guesses and of.limit_guesses((), 1) for of in singles)):
        speculation.nothing()
        return step
    most = scheduler.guesses(step)
    return scheduler.draft(step, speculation.drafts(_wanted(singles, most, speculation)))


def _wanted(answers: Iterable[Answer], most: Mapping[Request, int], speculation: Speculation) -> dict[Request, Wanted]:
    """What to guess for each answer that may have guesses. most: {request: upper limit of its guesses}."""
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
    """Called after a step without guesses whose tokens are distributed. found: the token of each of its answers."""
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
    """To be called after a step for which `guess` was called, with guesses or without. found: the chosen tokens of each
    answer. guess_s, step_s: seconds that the guesses and the step took."""
    drafts = {request: drafts for (request, _), drafts in zip(step.singles, step.drafts, strict=True) if drafts}
    counts = {request: len(tokens) for (request, _), tokens in zip(step.singles, found, strict=True)}
    speculation.completed(drafts, counts, guess_s, step_s)
    for request, guesses in drafts.items():
        answers[request].verified(len(guesses), counts[request] - 1)
