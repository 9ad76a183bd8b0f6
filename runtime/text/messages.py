"""Messages of a conversation, as callers give them -> as conversations keep them.

In:  a list of {"role": .., "content": ..}, as OpenAI's chat API has it: the content is a text, or a list of parts
     {"type": "text", "text": ..} (https://platform.openai.com/docs/api-reference/chat/create).
Out: `Message`s, whose content is a text. UserError, with the message's place in the list, for what is no message and
     for what a conversation cannot use: images, tools, other roles.
"""

from collections.abc import Mapping
from typing import Literal, TypedDict, cast

from mlc_amd.runtime.errors import UserError, shorten

ROLES = ("system", "user", "assistant")


class Message(TypedDict):
    """One message: who says it, and what."""

    role: Literal["system", "user", "assistant"]
    content: str


def check_messages(messages: object) -> list[Message]:
    """The messages of a conversation, in order, each of a role of ROLES; they may be none. Keys whose value is None
    count as absent."""
    if not isinstance(messages, list | tuple):
        raise UserError(
            f"a conversation is {shorten(messages)}: it must be a text, or a list of messages such as "
            '{"role": "user", "content": "Hello"}'
        )
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def check_question(messages: object) -> list[Message]:
    """`check_messages` of a conversation that a model shall answer: the last message must be the user's."""
    checked = check_messages(messages)
    if not checked:
        raise UserError("there are no messages: the last one must be the user's")
    if checked[-1]["role"] != "user":
        raise UserError(f"the last message has the role {checked[-1]['role']}: it must be the user's, to be answered")
    return checked


def check_content(content: object, where: str = "the message") -> str:
    """The text of a message's content: itself, or the text parts of a list, joined. where: what errors call it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UserError(f"the content of {where} is {shorten(content)}: it must be a text or a list of text parts")
    return "".join(_part(part, f"part {place} of {where}") for place, part in enumerate(content))


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(f'{where} is {shorten(message)}: it must be like {{"role": "user", "content": "Hello"}}')
    given = {key: value for key, value in message.items() if value is not None}
    if missing := [key for key in ("role", "content") if key not in given]:
        raise UserError(f'{where} has no {missing[0]}: it must be like {{"role": "user", "content": "Hello"}}')
    if given["role"] not in ROLES:
        raise UserError(f"{where} has the role {shorten(given['role'])}: it must be one of {', '.join(ROLES)}")
    if others := [key for key in given if key not in ("role", "content")]:
        raise UserError(f"{where} has {shorten(others[0])}, which conversations cannot use: remove it")
    return cast(Message, {"role": given["role"], "content": check_content(given["content"], where)})


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or "type" not in part:
        raise UserError(f'{where} is {shorten(part)}: it must be like {{"type": "text", "text": "Hello"}}')
    if part["type"] != "text":
        raise UserError(f"{where} has the type {shorten(part['type'])}: only text can be used")
    if not isinstance(part.get("text"), str):
        raise UserError(f"{where} has no text")
    return part["text"]
