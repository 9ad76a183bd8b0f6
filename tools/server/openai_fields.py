"""The fields that OpenAI's chat and text APIs have in common, and their extensions by other servers.

Sampling parameters that a request leaves out are the model's own. Extensions, by their names in llama.cpp and vLLM:
top_k, min_p, repetition_penalty (repeat_penalty), repetition_window (repeat_last_n).
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.generation import check_stop
from mlc_amd.runtime.philox import SEED_BITS
from mlc_amd.runtime.sampling import Sampling, SamplingChanges
from mlc_amd.tools.server.chat_request import ANY_OBJECT, Event, Finish, ResponseFormat, Usage
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_PENALTY, _WINDOW = ("repetition_penalty", "repeat_penalty"), ("repetition_window", "repeat_last_n")
# Tokens of a window that is meant to be the whole context.
_WHOLE_CONTEXT = 1 << 20
# Answers to one prompt, as OpenAI's API limits them.
_MOST_ANSWERS = 128
_MOST_STOPS = 16


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
    if bias := fields.values("logit_bias"):
        found["logit_bias"] = {_token(key, fields): value for key, value in bias.items()}
    return checked({name: value for name, value in found.items() if value is not None})


def checked(changes: Mapping[str, Any]) -> SamplingChanges:
    """The changes, if they are in range: ApiError 400 with the parameter's name."""
    for name, value in changes.items():
        try:
            Sampling(**{name: value})
        except UserError as error:
            raise invalid(str(error), name) from error
    return cast(SamplingChanges, dict(changes))


def _token(key: str, fields: Fields) -> int:
    try:
        return int(key)
    except ValueError:
        raise fields.wrong("logit_bias", "an object of token ids and numbers") from None


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


def response_format(fields: Fields) -> ResponseFormat | None:
    """{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ..}}."""
    given = fields.object("response_format")
    if given is None:
        return None
    kind = given.choice("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    if kind == "json_object" and not given.has("schema"):
        return ANY_OBJECT
    holder = given.object("json_schema") or given  # llama.cpp has the schema beside the type
    holder.required("schema")
    return ResponseFormat(schema=holder.values("schema"), strict=holder.flag("strict"))


def streamed(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether with the usage."""
    options = fields.object("stream_options")
    return fields.flag("stream"), bool(options and options.flag("include_usage"))


# ---- of answers


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


def timings_body(finish: Finish) -> dict[str, Any]:
    """As llama-server has them: milliseconds, and tokens per second."""
    prompt, made = finish.usage.prompt - finish.usage.cached, finish.usage.completion
    prompt_ms, predicted_ms = finish.timings.ttft * 1000, finish.timings.decode * 1000
    later = max(made - 1, 0)  # tokens after the first, which the prompt's time includes
    return {
        "cache_n": finish.usage.cached,
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
