"""ollama's requests (https://github.com/ollama/ollama/blob/main/docs/api.md) -> `ChatRequest` and `TextRequest`.

Without effect here: `keep_alive` (see --idle-unload), `options` about memory and devices (num_ctx, num_gpu, ..).
Refused: images, `suffix`, `context`.
"""

from typing import Any, cast

from mlc_amd.runtime.engine.generation import MOST_LOGPROBS
from mlc_amd.tools.server.apis.openai_chat import check_tools
from mlc_amd.tools.server.apis.openai_fields import least_tokens, sampling, stops
from mlc_amd.tools.server.chat_request import ANY_OBJECT, AnswerRequest, ChatRequest, ResponseFormat, TextRequest
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.prompts import check_messages

_EFFORTS = {"low": ("low", "on"), "medium": ("medium", "on"), "high": ("high", "on")}


def chat_request(fields: Fields, client: str) -> ChatRequest | None:
    """None: there are no messages, the model shall only be loaded."""
    if not fields.raw("messages"):
        return None
    for message in fields.objects("messages"):
        _refuse_images(message)
    return ChatRequest(
        messages=_with_ids(check_messages(fields)), tools=check_tools(fields), thinking=_thinking(fields),
        **_common(fields, client),
    )  # fmt: skip


def generate_request(fields: Fields, client: str) -> AnswerRequest | None:
    """None: there is no prompt, the model shall only be loaded."""
    _refuse_images(fields)
    for name in ("suffix", "context"):
        if fields.raw(name):
            raise fields.wrong(name, "left out: this server has no such function")
    prompt, system = fields.text("prompt"), fields.text("system")
    if not prompt:
        return None
    if fields.flag("raw"):
        return TextRequest(prompts=[prompt], **_common(fields, client))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return ChatRequest(messages=messages, thinking=_thinking(fields), **_common(fields, client))


def _common(fields: Fields, client: str) -> dict[str, Any]:
    options = fields.object("options") or Fields({}, "options")
    limit = options.whole("num_predict")
    logprobs = fields.whole("top_logprobs", 0, MOST_LOGPROBS) or 0 if fields.flag("logprobs") else None
    return {
        "model": fields.text("model"),
        "sampling": sampling(options),
        "max_tokens": limit if limit is not None and limit > 0 else None,  # -1: no limit
        "min_tokens": least_tokens(options),
        "stop": stops(options),
        "logprobs": logprobs,
        "response_format": _format(fields),
        "client": client,
    }


def _format(fields: Fields) -> ResponseFormat | None:
    """ "json", or a schema."""
    given = fields.raw("format")
    if not given:
        return None
    if given == "json":
        return ANY_OBJECT
    if not isinstance(given, dict):
        raise fields.wrong("format", '"json" or a JSON schema')
    return ResponseFormat(schema=given)


def _thinking(fields: Fields) -> tuple[str, ...]:
    given = fields.raw("think")
    if given is None:
        return ()
    if isinstance(given, bool):
        return ("on", "medium") if given else ("off", "low")
    if given not in _EFFORTS:
        raise fields.wrong("think", "true, false, low, medium or high")
    return _EFFORTS[cast(str, given)]


def _refuse_images(fields: Fields) -> None:
    if fields.raw("images"):
        raise invalid(f"{fields.path('images')} is given: this server takes text only", fields.path("images"))


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of calls, which ollama's have not but chat templates want: results are in the order of the
    calls."""
    waiting: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"call{count:05d}"  # nine letters and digits, as Mistral's templates want them
            count += 1
            waiting.append(call["id"])
        if message["role"] == "tool" and "tool_call_id" not in message and waiting:
            message["tool_call_id"] = waiting.pop(0)
    return messages
