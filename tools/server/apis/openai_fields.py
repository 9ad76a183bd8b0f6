"""The fields that OpenAI's chat and text APIs have in common, and their extensions by other servers.

Sampling parameters that a request leaves out are the model's own. Extensions, by their names in llama.cpp and vLLM:
top_k, min_p, repetition_penalty (repeat_penalty), repetition_window (repeat_last_n), min_tokens, ignore_eos, n_predict
(max_tokens). Fields that choose how a server works, such as cache_prompt or id_slot, have no effect.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import mlc_amd
from mlc_amd.runtime.engine.generation import PromptProgress, check_stop
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.philox import SEED_BITS
from mlc_amd.runtime.sampling.settings import LARGEST_BIAS, Sampling, SamplingChanges
from mlc_amd.tools.server.chat_request import ENDLESS, Event, Finish, Progress, Usage
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_PENALTY, _WINDOW = ("repetition_penalty", "repeat_penalty"), ("repetition_window", "repeat_last_n")
# Tokens of a window that is meant to be the whole context.
_WHOLE_CONTEXT = 1 << 20
# Answers to one prompt, as OpenAI's API limits them.
_MOST_ANSWERS = 128
_MOST_STOPS = 16
# Names of the limit of tokens.
LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_NEVER = -LARGEST_BIAS


def sampling(fields: Fields) -> SamplingChanges:
    """The sampling parameters that a request changes."""
    found: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    found[_PENALTY[0]] = next((fields.number(name) for name in _PENALTY if fields.has(name)), None)
    window = next((fields.whole(name) for name in _WINDOW if fields.has(name)), None)
    found[_WINDOW[0]] = _WHOLE_CONTEXT if window == -1 else window
    if (top_k := fields.whole("top_k")) is not None:
        found["top_k"] = max(top_k, 0)  # -1 means all, too
    seed = fields.whole("seed")
    if seed is not None and seed >= 0:  # -1: a new one
        found["seed"] = seed & ((1 << SEED_BITS) - 1)
    if bias := logit_bias(fields):
        found["logit_bias"] = bias
    return checked({name: value for name, value in found.items() if value is not None})


def checked(changes: Mapping[str, Any]) -> SamplingChanges:
    """The changes, if they are in range: ApiError 400 with the parameter's name."""
    for name, value in changes.items():
        try:
            Sampling(**{name: value})
        except UserError as error:
            raise invalid(str(error), name) from error
    return cast(SamplingChanges, dict(changes))


def logit_bias(fields: Fields) -> dict[int, Any]:
    """{id: number}, or as llama-server has it: [[id, number], ..]. false instead of a number: never this token."""
    given = fields.raw("logit_bias")
    try:
        pairs = given.items() if isinstance(given, Mapping) else [(token, value) for token, value in given or ()]
        return {int(token): _NEVER if value is False else value for token, value in pairs}
    except (TypeError, ValueError):
        raise fields.wrong("logit_bias", "an object of token ids and numbers, or a list of such pairs") from None


def most_tokens(fields: Fields) -> int | None:
    """The limit of an answer's tokens, by the first of its names that is given. None: the context, also for -1."""
    name = next((name for name in LIMITS if fields.has(name)), LIMITS[0])
    return None if fields.raw(name) == -1 else fields.whole(name, 1)


def least_tokens(fields: Fields) -> int:
    return ENDLESS if fields.flag("ignore_eos") else fields.whole("min_tokens", 0, ENDLESS) or 0


def stops(fields: Fields) -> tuple[str, ...]:
    texts = fields.texts("stop")
    if len(texts) > _MOST_STOPS:
        raise fields.wrong("stop", f"at most {_MOST_STOPS} strings")
    try:
        return check_stop(texts)
    except UserError as error:
        raise invalid(str(error), "stop") from error


def answers(fields: Fields) -> int:
    return fields.whole("n", 1, _MOST_ANSWERS) or 1


def timed(fields: Fields) -> bool:
    """Whether each chunk of text has `timings`, as llama-server's."""
    return fields.flag("timings_per_token")


def progress_wanted(fields: Fields) -> bool:
    """Whether chunks say how far the prompt is, as llama-server's."""
    return fields.flag("return_progress") and fields.flag("stream")


def streamed(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether with the usage."""
    options = fields.object("stream_options")
    return fields.flag("stream"), bool(options and options.flag("include_usage"))


# ---- of answers

# Of OpenAI's bodies: which program answered.
FINGERPRINT = {"system_fingerprint": f"mlc-amd-{mlc_amd.__version__}"}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def total_usage(finishes: list[Finish], n: int) -> Usage:
    """Of all answers. The prompt of n answers counts once."""
    found = Usage()
    for finish in finishes:
        usage = finish.usage
        found += usage if finish.index % n == 0 else Usage(0, usage.completion, 0, usage.reasoning)
    return found


def progress_body(progress: PromptProgress) -> dict[str, Any]:
    """As llama-server has it."""
    body = {"total": progress.total, "cache": progress.cached, "processed": progress.processed}
    return {"prompt_progress": body | {"time_ms": round(progress.seconds * 1000)}}


def timings_body(stats: Finish | Progress) -> dict[str, Any]:
    """As llama-server has them: milliseconds, and tokens per second."""
    prompt, made = stats.usage.prompt - stats.usage.cached, stats.usage.completion
    prompt_ms, predicted_ms = stats.timings.ttft * 1000, stats.timings.decode * 1000
    later = max(made - 1, 0)  # tokens after the first, which the prompt's time includes
    return {
        "cache_n": stats.usage.cached,
        "prompt_n": prompt,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": round(prompt_ms / prompt, 3) if prompt else 0.0,
        "prompt_per_second": round(1000 * prompt / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": made,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": round(predicted_ms / later, 3) if later else 0.0,
        "predicted_per_second": round(1000 * later / predicted_ms, 3) if predicted_ms else 0.0,
    }


def finishes_of(events: Iterable[Event]) -> list[Finish]:
    """The ends of all answers, by index."""
    return sorted((event for event in events if isinstance(event, Finish)), key=lambda finish: finish.index)
