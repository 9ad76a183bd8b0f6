"""Checks messages of a conversation.

In:  a caller's list of {"role": .., "content": ..}, as in OpenAI's chat API: the content is a text, or a list of parts
     {"type": "text", "text": ..} (https://platform.openai.com/docs/api-reference/chat/create).
Out: `Message`s, whose content is a text. UserError, with the message's place in the list, for invalid messages and for
     those that a conversation cannot use: images, tools, other roles.
"""

from collections.abc import Mapping
from typing import Literal, TypedDict, cast

from mlc_amd.runtime.errors import UserError, shorten

ROLES = ("system", "user", "assistant")


class Message(TypedDict):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str


def check_messages(messages: object) -> list[Message]:
    """A conversation's messages, perhaps none, each of a role of ROLES. Keys with the value None are ignored."""
    if not isinstance(messages, list | tuple):
        raise UserError(
            f"a conversation is {shorten(messages)}: it must be a text, or a list of messages such as "
            '{"role": "user", "content": "Hello"}'
        )
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def check_question(messages: object) -> list[Message]:
    """`check_messages` of a conversation for a model to answer: the last message must be the user's."""
    checked = check_messages(messages)
    if not checked:
        raise UserError("there are no messages: the last one must be the user's")
    if checked[-1]["role"] != "user":
        raise UserError(f"the last message has the role {checked[-1]['role']}: it must be the user's, to be answered")
    return checked


def check_content(content: object, where: str = "the message") -> str:
    """The text of a message's content: itself, or the joined text parts of a list. where: its name in errors."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UserError(f"the content of {where} is {shorten(content)}: it must be a text or a list of text parts")
    return "".join(_part(part, f"part {place} of {where}") for place, part in enumerate(content))


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(f'{where} is {shorten(message)}: it must be like {{"role": "user", "content": "Hello"}}')
    fields = {key: value for key, value in message.items() if value is not None}
    if missing := [key for key in ("role", "content") if key not in fields]:
        raise UserError(f'{where} has no {missing[0]}: it must be like {{"role": "user", "content": "Hello"}}')
    if fields["role"] not in ROLES:
        raise UserError(f"{where} has the role {shorten(fields['role'])}: it must be one of {', '.join(ROLES)}")
    if others := [key for key in fields if key not in ("role", "content")]:
        raise UserError(f"{where} has {shorten(others[0])}, which conversations cannot use: remove it")
    return cast(Message, {"role": fields["role"], "content": check_content(fields["content"], where)})


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or "type" not in part:
        raise UserError(f'{where} is {shorten(part)}: it must be like {{"type": "text", "text": "Hello"}}')
    if part["type"] != "text":
        raise UserError(f"{where} has the type {shorten(part['type'])}: only text can be used")
    if not isinstance(part.get("text"), str):
        raise UserError(f"{where} has no text")
    return part["text"]
