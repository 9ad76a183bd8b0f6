"""The fields that OpenAI's chat and text APIs share, and extensions of other servers.

Sampling parameters that a request leaves out are the model's own. Extensions, by their names in llama.cpp and vLLM:
top_k, min_p, repetition_penalty (repeat_penalty), repetition_window (repeat_last_n), min_tokens, ignore_eos, n_predict
(max_tokens), stop_token_ids, include_stop_str_in_output, skip_special_tokens. Fields about how a server works, such as
cache_prompt, have no effect. id_slot: see llama_slots.py.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import mlc_amd
from mlc_amd.runtime.engine.generation import ENDLESS, PromptProgress, check_stop
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling.philox import SEED_BITS
from mlc_amd.runtime.sampling.settings import LARGEST_BIAS, Sampling, SamplingChanges
from mlc_amd.tools.server.answering import Answering
from mlc_amd.tools.server.chat_request import MOST_SLOTS, Event, Finish, Progress, TokenLogprob
from mlc_amd.tools.server.errors import ApiError, invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.formats import answer_format
from mlc_amd.tools.server.streaming import Encoder, dumps

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_PENALTY, _WINDOW = ("repetition_penalty", "repeat_penalty"), ("repetition_window", "repeat_last_n")
# A window of so many tokens stands for the whole context.
_WHOLE_CONTEXT = 1 << 20
# Largest number of answers to one prompt, as in OpenAI's API.
_MOST_ANSWERS = 128
_MOST_STOPS, _MOST_STOP_CHARACTERS = 1024, 16384
_MOST_STOP_IDS = 128
# The names of the limit of tokens.
LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_NEVER = -LARGEST_BIAS
_DONE = b"data: [DONE]\n\n"


def common(fields: Fields, client: str, least: int = 1) -> dict[str, Any]:
    """The fields that requests of these APIs share, as arguments of an `AnswerRequest`. least: of max_tokens."""
    return {
        "model": fields.text("model"),
        "sampling": sampling(fields),
        "max_tokens": most_tokens(fields, least),
        **endings(fields),
        "response_format": answer_format(fields),
        # whether chunks report the progress of the prompt, as in llama-server
        "progress": fields.flag("return_progress") and fields.flag("stream"),
        "client": client,
        "slot": max(fields.whole("id_slot", -1, MOST_SLOTS - 1) or 0, 0),
    }


def sampling(fields: Fields) -> SamplingChanges:
    """The sampling parameters that a request changes."""
    found: dict[str, Any] = {name: fields.number(name) for name in _NUMBERS}
    found[_PENALTY[0]] = next((fields.number(name) for name in _PENALTY if fields.has(name)), None)
    window = next((fields.whole(name) for name in _WINDOW if fields.has(name)), None)
    found[_WINDOW[0]] = _WHOLE_CONTEXT if window == -1 else window
    if (top_k := fields.whole("top_k")) is not None:
        found["top_k"] = max(top_k, 0)  # -1 also means all tokens
    seed = fields.whole("seed")
    if seed is not None and seed >= 0:  # -1 means a new seed
        found["seed"] = seed & ((1 << SEED_BITS) - 1)
    if bias := logit_bias(fields):
        found["logit_bias"] = bias
    return checked({name: value for name, value in found.items() if value is not None})


def checked(changes: Mapping[str, Any]) -> SamplingChanges:
    """The changes. Raises ApiError 400, with the parameter's name, if one is out of range."""
    for name, value in changes.items():
        try:
            Sampling(**{name: value})
        except UserError as error:
            raise invalid(str(error), name) from error
    return cast(SamplingChanges, dict(changes))


def logit_bias(fields: Fields) -> dict[int, Any]:
    """The field logit_bias: {id: number}, or llama-server's [[id, number], ..]. false in place of a number: the token
    is never chosen."""
    given = [] if fields.raw("logit_bias") is None else fields.raw("logit_bias")
    try:
        pairs = given.items() if isinstance(given, Mapping) else [(token, value) for token, value in given]
        return {_id(token): _NEVER if value is False else value for token, value in pairs}
    except (TypeError, ValueError):
        raise fields.wrong("logit_bias", "an object of token ids and numbers, or a list of such pairs") from None


def _id(token: Any) -> int:
    """A token id from a number or its text. Raises TypeError or ValueError."""
    if not isinstance(token, str) and type(token) is not int:
        raise TypeError
    return int(token)


def most_tokens(fields: Fields, least: int = 1) -> int | None:
    """The limit of an answer's tokens, from the first of its names that is given. None (also for -1): the context's."""
    name = next((name for name in LIMITS if fields.has(name)), LIMITS[0])
    return None if fields.raw(name) == -1 else fields.whole(name, least)


def endings(fields: Fields) -> dict[str, Any]:
    """What ends answers, and whether it is part of them, as arguments of an `AnswerRequest`."""
    return {
        "min_tokens": ENDLESS if fields.flag("ignore_eos") else fields.whole("min_tokens", 0, ENDLESS) or 0,
        "stop": _stops(fields),
        "stop_ids": _stop_ids(fields),
        "include_stop": fields.flag("include_stop_str_in_output"),
        "control_tokens": not fields.flag("skip_special_tokens", True),
    }


def _stops(fields: Fields) -> tuple[str, ...]:
    texts = fields.texts("stop")
    if len(texts) > _MOST_STOPS or sum(map(len, texts)) > _MOST_STOP_CHARACTERS:
        raise fields.wrong("stop", f"at most {_MOST_STOPS} strings of {_MOST_STOP_CHARACTERS} characters in all")
    try:
        return check_stop(texts)
    except UserError as error:
        raise invalid(str(error), "stop") from error


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    given = fields.raw("stop_token_ids") or []
    valid = isinstance(given, list) and all(type(one) is int and one >= 0 for one in given)
    if not valid or len(given) > _MOST_STOP_IDS:
        raise fields.wrong("stop_token_ids", f"a list of at most {_MOST_STOP_IDS} token ids")
    return tuple(given)


def answers(fields: Fields) -> int:
    return fields.whole("n", 1, _MOST_ANSWERS) or 1


def streamed(fields: Fields) -> tuple[bool, bool]:
    """(whether to stream, whether the stream has the usage)."""
    options = fields.object("stream_options")
    return fields.flag("stream"), bool(options and options.flag("include_usage"))


# ---- answers


def _head(name: str, kind: str, model: str) -> dict[str, Any]:
    """The first fields of a body. name: prefix of its id."""
    return {
        "id": f"{name}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"mlc-amd-{mlc_amd.__version__}",
    }


def whole(
    name: str, kind: str, choice: Callable[[Sequence[Event], Finish], object], answering: Answering,
    events: Sequence[Event],
) -> dict[str, Any]:  # fmt: skip
    """The body of whole answers. choice: makes the part for one answer, from its events and its end."""
    finishes = finishes_of(events)
    return {
        **_head(name, kind, answering.model.name),
        "choices": [choice([event for event in events if event.index == end.index], end) for end in finishes],
        "usage": usage_body(finishes, answering.request.n),
        "timings": timings_body(finishes[0]),
    }


class Chunks(Encoder):
    """The common parts of the encoders of the chat and the text API. usage: whether a last chunk reports the number of
    tokens."""

    def __init__(self, name: str, kind: str, answering: Answering, usage: bool) -> None:
        self._answering, self._usage, self._n = answering, usage, answering.request.n
        # Most chunks only differ in their text, so the rest of them is encoded once.
        self._open = b"data: " + dumps(_head(name, kind, answering.model.name))[:-1] + b',"choices":['
        self._close = (b'],"usage":null}' if usage else b"]}") + b"\n\n"
        self._finishes: list[Finish] = []

    def _chunk(self, choice: bytes, about: Mapping[str, Any] | None = None) -> bytes:
        """A chunk with one choice. about: further fields."""
        close = self._close if about is None else b"]," + dumps(about)[1:-1] + self._close[1:]
        return self._open + choice + close

    def _about_all(self) -> dict[str, Any]:
        """The fields of the last chunk."""
        return {"usage": usage_body(self._finishes, self._n)}

    def end(self) -> bytes:
        usage = self._open + b"]," + dumps(self._about_all())[1:] + b"\n\n" if self._usage else b""
        return usage + _DONE

    def error(self, error: ApiError) -> bytes:
        return super().error(error) + _DONE


def usage_body(finishes: Sequence[Finish], n: int) -> dict[str, Any]:
    """The usage of all answers. The prompt of n answers counts once."""
    prompts = [finish.usage for finish in finishes if finish.index % n == 0]
    prompt, cached = sum(usage.prompt for usage in prompts), sum(usage.cached for usage in prompts)
    completion = sum(finish.usage.completion for finish in finishes)
    reasoning = sum(finish.usage.reasoning for finish in finishes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def progress_body(progress: PromptProgress) -> dict[str, Any]:
    """The progress of a prompt in llama-server's form."""
    body = {"total": progress.total, "cache": progress.cached, "processed": progress.processed}
    return {"prompt_progress": body | {"time_ms": round(progress.seconds * 1000)}}


def timings_body(stats: Finish | Progress) -> dict[str, Any]:
    """Timings in llama-server's form: milliseconds, and tokens per second."""
    prompt, made = stats.usage.prompt - stats.usage.cached, stats.usage.completion
    prompt_ms, predicted_ms = stats.timings.ttft * 1000, stats.timings.decode * 1000
    later = max(made - 1, 0)  # tokens after the first; the time of the first is part of the prompt's
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


def logprob_body(token: TokenLogprob) -> dict[str, Any]:
    """A token's log probabilities in the form of OpenAI's chat and Responses APIs."""
    return {**_token(token), "top_logprobs": [_token(other) for other in token.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
