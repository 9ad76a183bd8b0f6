"""Renders a conversation to the text of a prompt, with the model's Jinja template.

Messages are {"role": str, "content": str, ...}, as in transformers (assistant messages may have "tool_calls", for
example). The rendered text is `Traced`: it records which characters the template wrote itself. `Tokenizer.encode` finds
control tokens only there, so that no message can inject a control token and fake a turn of another role. A template is
untrusted code: a child process renders it (`template_program.py`), with limits of time and memory.

`messages.IMAGE` stands for an image, in contents and in the text. A template that expects lists of parts gets {"type":
"image"} instead, and what it writes for this part is replaced by `IMAGE`.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mlc_amd.runtime.errors import QUOTED, UserError, one_line
from mlc_amd.runtime.limited_process import LimitedProcess, LimitExceeded
from mlc_amd.runtime.text.messages import IMAGE
from mlc_amd.runtime.text.tokenizer_files import read_config
from mlc_amd.runtime.text.traced_text import Traced

# For models without a template (base models): a plain-text dialogue.
FALLBACK = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOPS = ("\nUser:", "\nSystem:", "\nAssistant:")

# How much a model thinks before it answers: the template's default, on or off, or an effort.
THINKING = ("auto", "on", "off", "low", "medium", "high")
# The templates' variables for thinking. Of _SWITCHES, the first one that a template has is set.
_SWITCHES, _EFFORT = ("enable_thinking", "thinking"), "reasoning_effort"
# Messages for test renderings.
_SYSTEM, _USER = "a system message", "a user message"
_IMAGE_PART = {"type": "image"}

# Limits of processor time (seconds) and memory (bytes) for compiling and for a rendering, which take milliseconds.
_SECONDS, _MEMORY = 2.0, 256 << 20
_OVER_LIMIT = f"it takes more than {_SECONDS:.0f} s or {_MEMORY >> 20} MiB"


def _merge_system(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Moves the system message, which is the first, to the beginning of the first user message, if there is one."""
    system, *others = messages
    at = next((i for i, message in enumerate(others) if message["role"] == "user"), None)
    if at is None:
        return list(messages)
    merged = {**others[at], "content": f"{system['content']}\n\n{others[at]['content']}"}
    return [*others[:at], merged, *others[at + 1 :]]


def _text(message: Mapping[str, object]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _with_marks(text: Traced, image: str) -> Traced:
    """The text with `IMAGE` in place of each `image` that the template wrote itself."""
    done, place = Traced(), 0
    while (place := text.find(image, place)) >= 0:
        if text.is_own(place, place + len(image)):
            done, text, place = done + text[:place] + Traced.all_own(IMAGE), text[place + len(image) :], 0
        else:
            place += 1
    return done + text


class ChatTemplate:
    """The chat template of a model; the plain dialogue `FALLBACK` if it has none (`is_fallback`). Thread-safe.

    source: the template's text    tokens: {"bos_token": text, ...}, "" where the model has no such token
    The template is compiled at its first use. If that fails, all methods that use it raise UserError.
    """

    def __init__(self, source: str | None, tokens: dict[str, str]):
        self.is_fallback: bool = source is None
        self.source: str = FALLBACK if source is None else source
        opening = {"source": self.source, "tokens": tokens}
        self._process = LimitedProcess("mlc_amd.runtime.text.template_program", opening, _SECONDS, _MEMORY)

    @classmethod
    def load(cls, directory: str | Path, name: str | None = None) -> "ChatTemplate":
        """Loads a template of the model in `directory`: the default one, or the one called `name` ("tool_use", "rag").
        Raises UserError for a missing or corrupt file, or an unknown name."""
        config = read_config(Path(directory))
        named = config["chat_templates"]
        if name is not None and name not in named:
            raise UserError(
                f"the model has no chat template '{name}': it has {', '.join(sorted(named)) or 'no named ones'}"
            )
        tokens = {f"{key}_token": special["text"] if special else "" for key, special in config["special"].items()}
        return cls(config["chat_template"] if name is None else named[name], tokens)

    def start(self) -> None:
        """Starts the child process, without waiting for it."""
        self._process.start()

    def close(self) -> None:
        """Ends the child process. The next use starts another one."""
        self._process.close()

    def check(self) -> None:
        """Raises UserError if it is not a valid Jinja template."""
        _ = self.variables

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template uses."""
        try:
            opened = self._process.open()
        except LimitExceeded:
            opened = {"malformed": _OVER_LIMIT}
        if "malformed" in opened:
            raise UserError(
                f"the model's chat template is malformed ({one_line(opened['malformed'], QUOTED)}): correct it in the "
                "GGUF, and compile that again"
            )
        return frozenset(opened["variables"])

    def render(
        self, messages: Sequence[Mapping[str, object]], /, add_generation_prompt: bool = True, **variables: object
    ) -> Traced:
        """The text of the prompt.

        add_generation_prompt: whether the text ends with the beginning of the assistant's turn.
        variables:             further variables of the template (tools, documents, enable_thinking, ...); they
                               override the standard ones.

        All arguments are JSON values. If the template rejects or ignores system messages, the system message is put at
        the beginning of the first user message. Raises UserError with the template's message if the template rejects
        the conversation or fails.
        """
        if messages and messages[0]["role"] == "system" and not self._takes_system:
            messages = _merge_system(messages)
        return self._render(messages, add_generation_prompt, variables)

    def _render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> Traced:
        image = self._image if any(IMAGE in _text(message) for message in messages) else ""
        made = [self._with_parts(message, image) for message in messages]
        text = self._request(made, add_generation_prompt, variables)
        return _with_marks(text, image) if image else text

    def _request(
        self, messages: list[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> Traced:
        standard = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        standard |= {"tools": None, "documents": None}
        self.check()
        try:
            rendered: dict[str, Any] = self._process.request({**standard, **variables})
        except LimitExceeded:
            rendered = {"failed": _OVER_LIMIT}
        except (RecursionError, TypeError, ValueError) as error:
            raise UserError(f"the messages are no JSON values ({one_line(str(error), QUOTED)}): change them") from error
        if "failed" in rendered:
            why = one_line(rendered["failed"], QUOTED)
            raise UserError(f"the model's chat template failed ({why}): change the messages or the template")
        return Traced.of_spans(rendered["text"], rendered["own"])

    def _with_parts(self, message: Mapping[str, object], image: str) -> Mapping[str, object]:
        """The message in the form that the template expects. image: what the template writes for an image."""
        plain = {key: value for key, value in message.items() if key != "images"}
        text = _text(message)
        if not self._wants_parts and not (image and IMAGE in text):
            return plain
        first, *others = text.split(IMAGE) if image else [text]
        parts = [_part(first), *(part for other in others for part in (_IMAGE_PART, _part(other)))]
        return {**plain, "content": [part for part in parts if part.get("text") != ""]}

    def _trial(self, content: object) -> Traced:
        """The prompt of a single user message; "" if the template rejects it."""
        try:
            return self._request([{"role": "user", "content": content}], True, {})
        except UserError:
            return Traced()

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template only uses contents that are lists of parts, and ignores texts."""
        return _USER not in self._trial(_USER) and _USER in self._trial([_part(_USER)])

    @cached_property
    def _image(self) -> str:
        """What the template writes for {"type": "image"}; "" if it does not know such parts."""
        text = self._trial([_part(_USER), _IMAGE_PART, _part(_USER)])
        first, _, rest = text.partition(_USER)
        between, found, _ = rest.partition(_USER)
        between = between.strip()
        return between if first and found and isinstance(between, Traced) and between.is_own(0, len(between)) else ""

    @cached_property
    def _takes_system(self) -> bool:
        """False if the template renders user messages but rejects or ignores system messages."""
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
        try:
            text = self._render(messages, True, {})
        except UserError:
            return False
        return _SYSTEM in text or _USER not in text

    def switch(self, thinking: str) -> dict[str, Any]:
        """The variables of `render` for a value of THINKING. Raises UserError if the template has no such switch."""
        if thinking == "auto":
            return {}
        switches = [name for name in _SWITCHES if name in self.variables][:1]
        known: dict[str, dict[str, Any]] = {"auto": {}}
        known |= {value: {name: value == "on"} for name in switches for value in ("on", "off")}
        if _EFFORT in self.variables:
            known |= {value: {_EFFORT: value} for value in ("low", "medium", "high")}
        if thinking not in known:
            raise UserError(f"thinking cannot be {thinking}: with this model's chat template it is {', '.join(known)}")
        return known[thinking]

    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end an assistant turn besides the tokenizer's `end_ids`. Only the plain dialogue has any."""
        return FALLBACK_STOPS if self.is_fallback else ()
