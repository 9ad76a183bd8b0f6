"""Turns conversations in the form of the APIs into the text and the token ids of a prompt.

In: messages in OpenAI's form (https://platform.openai.com/docs/api-reference/chat/create), tools, and how much the
model should think. Out: `check_messages`: the checked messages in the form for chat templates, with `messages.IMAGE` in
the place of each image, and "images", their sources. It raises ApiError 400, with the field's path, for invalid
messages and for contents that are neither text nor image (audio). `Prompter.prompt`: text and ids.

Texts of the client never become control tokens: the rendered text records what the template wrote itself.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlc_amd.runtime.calls.call_messages import with_tools
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.images.prompts import ImagePrompts
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.text.chat_template import ChatTemplate
from mlc_amd.runtime.text.messages import IMAGE, images_of
from mlc_amd.runtime.text.reasoning import ReasoningFormat
from mlc_amd.runtime.text.tokenizer import Tokenizer
from mlc_amd.runtime.text.traced_text import Traced
from mlc_amd.tools.server.chat_request import ChatRequest, SeenText, parsed_arguments, tool_call
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.images import IMAGE_PARTS, ImageSource, image_of, images_in

# OpenAI's roles, including those that have other names in chat templates.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RENAMED = {"developer": "system", "function": "tool"}
# Names that clients use for the thinking of an assistant message.
_THINKING = ("reasoning_content", "reasoning", "thinking")
# An assistant message must have at least one of these fields; the value may be null or empty.
_ANSWERS = ("content", "tool_calls", "function_call", "refusal", *_THINKING)
# Parts of a content that have text, in a field with the type's name or "text".
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def check_messages(fields: Fields, name: str = "messages") -> list[dict[str, Any]]:
    """The messages in this field of a request, in the form for templates."""
    fields.required(name)
    found = [_message(message) for message in fields.objects(name)]
    if not found:
        raise fields.wrong(name, "a list of at least one message")
    return _with_ids(found)


def _message(message: Fields) -> dict[str, Any]:
    message.required("role")
    role = message.choice("role", _ROLES, "user")
    role = _RENAMED.get(role, role)
    required = role not in ("assistant", "tool")
    made: dict[str, Any] = {"role": role, **content_of(message, "content", required)}
    made |= {key: message.text(key) for key in ("name", "tool_call_id") if message.has(key)}
    if role != "assistant":
        return with_images(made, images_in(message))
    made["content"] = made["content"] or message.text("refusal")
    calls = [_call(call) for call in message.objects("tool_calls")]
    if function := message.object("function_call"):  # OpenAI's old form
        calls.append(_called(function, ""))
    if calls:
        made["tool_calls"] = calls
    if thought := next((message.text(key) for key in _THINKING if message.has(key)), ""):
        made["reasoning_content"] = thought
    if not any(map(message.given, _ANSWERS)):
        raise invalid(f"{message.path('content')} is missing", message.path("content"))
    return made


def content_of(fields: Fields, name: str, required: bool = True) -> dict[str, Any]:
    """The fields of a message for a content, which is a text or a list of parts: "content", and "images" if any."""
    value = fields.required(name) if required else fields.raw(name)
    if value is None or isinstance(value, str):
        return {"content": value or ""}
    if not isinstance(value, list):
        raise fields.wrong(name, "a string or a list of parts")
    return joined(map(part_of, fields.objects(name)))


def with_images(message: dict[str, Any], images: Sequence[ImageSource]) -> dict[str, Any]:
    """The message with images before its content. In ollama's API they are a separate field."""
    if not images:
        return message
    content, others = message["content"], message.get("images", ())
    return {**message, "content": IMAGE * len(images) + content, "images": [*images, *others]}


def content_text(fields: Fields, name: str) -> str:
    """The text of a content that must have no images; "" if it is absent."""
    found = content_of(fields, name, required=False)
    if "images" in found:
        raise fields.wrong(name, "text: there can be no images here")
    return found["content"]


def joined(parts: Iterable[str | ImageSource]) -> dict[str, Any]:
    """`content_of` for these parts."""
    parts = list(parts)
    images = [part for part in parts if isinstance(part, ImageSource)]
    content = "".join(part if isinstance(part, str) else IMAGE for part in parts)
    return {"content": content, "images": images} if images else {"content": content}


def part_of(part: Fields) -> str | ImageSource:
    kind = part.text("type")
    if kind in IMAGE_PARTS:
        return image_of(part)
    if kind not in _TEXT_PARTS:
        raise invalid(f"{part.path('type')} is {shorten(kind)}: this server takes text and images", part.path("type"))
    return part.text(kind if part.has(kind) else "text")


def _call(call: Fields) -> dict[str, Any]:
    call.required("function")
    function = call.object("function")
    assert function is not None, "required() has found it"
    return _called(function, call.text("id"))


def _called(function: Fields, id: str) -> dict[str, Any]:
    function.required("name")
    return tool_call(id, function.text("name"), arguments_of(function, "arguments"))


def arguments_of(fields: Fields, name: str) -> dict[str, Any]:
    """The arguments of a call as an object, from an object or its JSON text; see chat_request.parsed_arguments."""
    given = fields.raw(name)
    if not isinstance(given, str | Mapping | list | None):
        raise fields.wrong(name, "an object or its JSON text")
    return parsed_arguments(given)


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds ids to calls. ollama's API and OpenAI's old form have none, but chat templates need them. Results are
    assumed to have the order of the calls."""
    waiting: list[str] = []
    count = 0
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = call["id"] or f"call{count:05d}"  # nine letters and digits, as Mistral's templates require
            count += 1
            waiting.append(call["id"])
        if message["role"] == "tool" and "tool_call_id" not in message and waiting:
            message["tool_call_id"] = waiting.pop(0)
    return messages


class Prompter:
    """Makes the prompts of one model. Thread-safe. tool_template: the template for requests with tools. instructed:
    whether the template does not support tools, so that an instruction explains them (runtime/calls/call_messages.py).
    thinking: the format of thinking, for answers that continue. images: the engine's. urls: whether images may be
    downloaded from the web."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        tool_template: ChatTemplate,
        instructed: bool,
        thinking: ReasoningFormat,
        images: ImagePrompts,
        urls: bool = False,
    ) -> None:
        self._images, self._urls = images, urls
        self._tokenizer, self._template, self._tool_template = tokenizer, template, tool_template
        self._instructed, self._thinking = instructed, thinking

    def prompt(self, request: ChatRequest) -> tuple[str, list[int]]:
        """The rendered text and its ids. Raises UserError if the template rejects the conversation, if images cannot be
        used, or if the model does not accept images."""
        images = [self._loaded(source) for source in images_of(request.messages)]
        variables = dict(request.template_variables) | self._switch(request.thinking)
        messages: list[dict[str, Any]] = [dict(message) for message in request.messages]
        tools = list(request.callable_tools)
        template = self._tool_template if tools else self._template
        if not self._instructed:
            variables |= {"tools": tools} if tools else {}
        elif tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            messages = with_tools(messages, tools)
        for message in messages:
            # gpt-oss's template has its own name for the thinking, and rejects it together with a text and calls.
            if thought := "" if message["content"] else message.get("reasoning_content"):
                message["thinking"] = thought
        begun = messages.pop() if request.is_begun else None
        text = _rendered(template, messages, variables)
        if begun and begun["content"]:
            thought = begun.get("reasoning_content", "") if self._tokenizer.has_token(self._thinking.marks[0]) else ""
            text = self._thinking.begun(text, thought, begun["content"])
        return text, Prompt.of(self._images.encode(text, images))

    def seen_text(self, text: SeenText) -> list[int]:
        """The ids of a text that is continued without a template. Raises UserError as `prompt` does."""
        images = [self._loaded(source) for source in images_of([{"images": text.images}])]
        return Prompt.of(self._images.encode(text.text, images))

    def _loaded(self, source: ImageSource) -> bytes:
        try:
            self._images.check()
            return source.load(self._urls)
        except UserError as error:
            raise invalid(str(error), source.path) from error

    def _switch(self, thinking: Sequence[str]) -> dict[str, Any]:
        """The variables for the first of these values for which the template has a switch."""
        for value in thinking:
            try:
                return self._template.switch(value)
            except UserError:
                continue  # another value may fit; if none does, the template decides
        return {}


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> Traced:
    """Renders the messages. Most templates expect a call's arguments as an object, some as JSON text."""
    try:
        return template.render(messages, **variables)
    except UserError:
        if not any("tool_calls" in message for message in messages):
            raise
        return template.render([_with_texts(message) for message in messages], **variables)


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON texts."""
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
