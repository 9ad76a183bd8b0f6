"""Checks the messages of a conversation.

In: a caller's list of {"role": .., "content": ..}, as in OpenAI's chat API. The content is a text, or a list of parts
{"type": "text", "text": ..} (https://platform.openai.com/docs/api-reference/chat/create) and {"type": "image", "image":
a path, bytes, a data URL or a PIL image}; OpenAI's image_url with a data URL is also accepted. Out: `Message`s, whose
content is a text with `IMAGE` in the place of each image. Raises UserError, with the number of the message, for invalid
messages and for unsupported ones: tools, other roles.
"""

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NotRequired, TypedDict

from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.images.pictures import MOST_PICTURES, picture_bytes

ROLES = ("system", "user", "assistant")
IMAGE = "\ufdd1"  # a code point that Unicode reserves for internal use in programs


class Message(TypedDict):
    """One message. images: the bytes of the image files, one for each `IMAGE` in the content."""

    role: Literal["system", "user", "assistant"]
    content: str
    images: NotRequired[list[bytes]]


Content = str | list[dict[str, Any]]


def check_messages(messages: object) -> list[Message]:
    """The messages of a conversation, perhaps none. Roles must be in ROLES. Keys with the value None are ignored."""
    if not isinstance(messages, list | tuple):
        raise UserError(
            f"a conversation is {shorten(messages)}: it must be a text, or a list of messages such as "
            '{"role": "user", "content": "Hello"}'
        )
    checked = [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]
    images_of(checked)
    return checked


def check_question(messages: object) -> list[Message]:
    """`check_messages`, for a conversation that a model is to answer: the last message must be the user's."""
    checked = check_messages(messages)
    if not checked:
        raise UserError("there are no messages: the last one must be the user's")
    if checked[-1]["role"] != "user":
        raise UserError(f"the last message has the role {checked[-1]['role']}: it must be the user's, to be answered")
    return checked


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The images of a conversation, in order. Raises UserError if there are too many."""
    found = [image for message in messages for image in message.get("images", ())]
    if len(found) > MOST_PICTURES:
        raise UserError(
            f"the conversation has {len(found)} images, of which there may be {MOST_PICTURES}: begin a new one"
        )
    return found


def check_content(role: Literal["system", "user", "assistant"], content: object, where: str = "the message") -> Message:
    """A message from a content: a text, or a list of parts, which are joined. where: its name in errors."""
    if isinstance(content, str):
        return Message(role=role, content=content)
    if not isinstance(content, list | tuple):
        raise UserError(f"the content of {where} is {shorten(content)}: it must be a text or a list of parts")
    parts = [_part(part, f"part {place} of {where}") for place, part in enumerate(content)]
    message = Message(role=role, content="".join(IMAGE if isinstance(part, bytes) else part for part in parts))
    if images := [part for part in parts if isinstance(part, bytes)]:
        message["images"] = images
    return message


def content_of(message: Message, encoded: bool = False) -> Content:
    """The inverse of `check_content`. encoded: images become data URLs, so that the result is a JSON value."""
    if "images" not in message:
        return message["content"]
    first, *texts = message["content"].split(IMAGE)
    parts: list[dict[str, Any]] = [_text_part(first)]
    for image, text in zip(message["images"], texts, strict=True):
        given = f"data:image;base64,{base64.b64encode(image).decode()}" if encoded else image
        parts += {"type": "image", "image": given}, _text_part(text)
    return [part for part in parts if part.get("text") != ""]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


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
    return check_content(fields["role"], fields["content"], where)


def _part(part: object, where: str) -> str | bytes:
    if not isinstance(part, Mapping) or "type" not in part:
        raise UserError(f'{where} is {shorten(part)}: it must be like {{"type": "text", "text": "Hello"}}')
    kind = part["type"]
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise UserError(f"{where} has no text")
        return part["text"].replace(IMAGE, "")
    if kind == "image" and "image" in part:
        return picture_bytes(part["image"], where)
    if kind == "image_url" and isinstance(url := part.get("image_url"), Mapping) and "url" in url:
        return picture_bytes(_data_url(url["url"], where), where)
    raise UserError(
        f'{where} is {shorten(dict(part))}: it must be like {{"type": "text", "text": "Hello"}} or '
        '{"type": "image", "image": "a.png"}'
    )


def _data_url(url: object, where: str) -> object:
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise UserError(f"{where} has the URL {shorten(url)}: only data URLs can be used, download it")
    return url
