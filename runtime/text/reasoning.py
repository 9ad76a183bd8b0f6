"""Divides a model's output into parts: thinking, answer, calls. Each part is reported as early as it is certain.

A parser gets the prompt, because some chat templates begin the thinking themselves, and the text of an answer piece by
piece. This text must include the control tokens in `ReasoningFormat.marks`. `detect` finds the format of a model in
FORMATS by its vocabulary.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mlc_amd.runtime.text.marks import split_at
from mlc_amd.runtime.text.traced_text import Traced

Kind = Literal["thinking", "final", "tool"]


@dataclass(frozen=True)
class AnswerPart:
    """A piece of a part. Adjacent pieces with the same kind and recipient belong to the same part. recipient: for the
    kind "tool", as the model writes it ("functions.search")."""

    kind: Kind
    text: str
    recipient: str = ""


class Parser(ABC):
    """Divides one answer. Call `feed` with each piece, then `finish`."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that `text` completes or continues. None of them is empty."""
        return self._scan(self._held + text, last=False)

    def finish(self) -> list[AnswerPart]:
        """The remaining parts, at the end of the answer."""
        return self._scan(self._held, last=True)

    @abstractmethod
    def _scan(self, text: str, last: bool) -> list[AnswerPart]:
        """The parts of `text`. Sets `_held` to the rest that needs more text to be certain."""


@dataclass(frozen=True)
class ReasoningFormat(ABC):
    """marks: the texts that separate the parts of an answer. The parser needs them, even if they are control tokens."""

    marks: tuple[str, ...]

    @abstractmethod
    def begun(self, prompt: Traced, thought: str, text: str) -> Traced:
        """The prompt for an answer that begins with this thinking and this text, and continues after the text."""

    @abstractmethod
    def parser(self, prompt: str, continued: bool = False) -> Parser:
        """A parser for the answer to this rendered prompt. continued: whether `begun` made the prompt."""


# ---- thinking between two marks, then the answer


@dataclass(frozen=True)
class Tags(ReasoningFormat):
    """marks: before and after the thinking, which comes first. label: a text that follows the first mark."""

    label: str = ""

    def begun(self, prompt: Traced, thought: str, text: str) -> Traced:
        opening, closing = self.marks[0] + self.label, self.marks[1]
        end = prompt.rstrip()
        if not end.endswith(opening) and thought and not end.endswith(closing):
            prompt, end = prompt + Traced.all_own(f"{opening}\n"), opening
        if end.endswith(opening):
            prompt += thought.strip() + Traced.all_own(f"\n{closing}\n\n")
        return prompt + text

    def parser(self, prompt: str, continued: bool = False) -> Parser:
        opening, closing = self.marks[0] + self.label, self.marks[1]
        thinking = prompt.rstrip().endswith(opening)
        return _TagParser(opening, closing, "final" if continued else "thinking" if thinking else "start")


class _TagParser(Parser):
    def __init__(self, opening: str, closing: str, state: Literal["start", "thinking", "between", "final"]):
        super().__init__()
        self._opening, self._closing, self._state = opening, closing, state
        self._thought = False  # whether there was some thinking

    def _scan(self, text: str, last: bool) -> list[AnswerPart]:
        self._held, parts = "", []
        if self._state == "start":
            # later in the answer, the mark is text
            begun = text.lstrip()
            if begun.startswith(self._closing):  # the end of a thinking that did not begin (MiniMax M3)
                self._state, text = "between", begun.removeprefix(self._closing)
            elif begun.startswith(self._opening):
                self._state, text = "thinking", begun.removeprefix(self._opening)
            elif any(mark.startswith(begun) for mark in (self._opening, self._closing)) and not last:
                self._held = text
                return []
            else:
                self._state = "final"
        if self._state == "thinking":
            thought, mark, rest = split_at(text, (self._closing,), last)
            thought = thought if self._thought else thought.lstrip()
            trimmed = thought.rstrip()
            if trimmed:
                parts.append(AnswerPart("thinking", trimmed))
                self._thought = True
            if mark is None:
                self._held = thought[len(trimmed) :] + rest
                return parts
            self._state, text = "between", rest
        if self._state == "between":
            text = text.lstrip()
            self._state = "final" if text else "between"
        return [*parts, AnswerPart("final", text)] if text else parts


# ---- sections with names


@dataclass(frozen=True)
class Sections(ReasoningFormat):
    """marks: open, sep and close. `<open>NAME<sep>TEXT<close>NAME<sep>`, several in an answer (Kimi K3). The section
    `think` is the thinking, `response` the answer; other sections are text of the answer, unchanged. A prompt may end
    within a section."""

    def begun(self, prompt: Traced, thought: str, text: str) -> Traced:
        tag = {name: [Traced.all_own(f"{mark}{name}{self.marks[1]}") for mark in self.marks[::2]] for name in SECTIONS}
        if thought and not prompt.endswith(f"{self.marks[0]}think{self.marks[1]}"):
            prompt += tag["think"][0]
        if prompt.endswith(f"{self.marks[0]}think{self.marks[1]}"):
            prompt += thought + tag["think"][1]
        return prompt + tag["response"][0] + text

    def parser(self, prompt: str, continued: bool = False) -> Parser:
        opening = f"{self.marks[0]}think{self.marks[1]}"
        return _SectionParser(self.marks, "response" if continued else "think" if prompt.endswith(opening) else "")


SECTIONS: dict[str, Kind] = {"think": "thinking", "response": "final"}


class _SectionParser(Parser):
    def __init__(self, marks: tuple[str, ...], section: str):
        """section: the section in which the answer begins; "": none."""
        super().__init__()
        self._open, self._sep, self._close = marks
        self._section = section

    def _scan(self, text: str, last: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            if self._section:
                before, mark, text = split_at(text, (f"{self._close}{self._section}{self._sep}",), last)
                if before:
                    parts.append(AnswerPart(SECTIONS[self._section], before))
                if mark is None:
                    break
                self._section = ""
            else:
                tags = {f"{self._open}{name}{self._sep}": name for name in SECTIONS}
                ends = f"{self._close}message{self._sep}"
                before, mark, text = split_at(text, (*tags, ends), last)
                if before:
                    parts.append(AnswerPart("final", before))
                if mark is None:
                    break
                self._section = tags.get(mark, "")
        self._held = text
        return parts


# ---- OpenAI's Harmony: messages with channels


@dataclass(frozen=True)
class Harmony(ReasoningFormat):
    """`<|start|>assistant to=RECIPIENT<|channel|>CHANNEL <|constrain|>TYPE<|message|>TEXT<|end|>`, several in an answer
    (https://cookbook.openai.com/articles/openai-harmony). The prompt ends within the header of the first message."""

    def begun(self, prompt: Traced, thought: str, text: str) -> Traced:
        start, channel, _, message, end = map(Traced.all_own, self.marks)
        if thought:
            prompt += channel + Traced.all_own("analysis") + message + thought + end
            prompt += start + Traced.all_own("assistant")
        return prompt + channel + Traced.all_own("final") + message + text

    def parser(self, prompt: str, continued: bool = False) -> Parser:
        return _HarmonyParser(self.marks, None if continued else "")


class _HarmonyParser(Parser):
    def __init__(self, marks: tuple[str, ...], header: str | None):
        """header: its beginning, if the answer begins within one; None: it begins within the text of a message."""
        super().__init__()
        self._start, self._channel, _, self._message, self._end = marks
        self._header = header
        self._kind: Kind = "final"
        self._recipient = ""
        self._messages = 0

    def _scan(self, text: str, last: bool) -> list[AnswerPart]:
        parts = []
        while True:
            if self._header is None:
                # a message has no end if the next message interrupts it
                before, mark, text = split_at(text, (self._end, self._start, self._channel), last)
                if before:
                    parts.append(AnswerPart(self._kind, before, self._recipient))
                if mark is None:
                    break
                self._header = mark if mark == self._channel else ""
            else:
                before, mark, text = split_at(text, (self._message,), last)
                self._header += before
                if mark is None:
                    break
                self._begin_message(self._header)
                self._header = None
        self._held = text
        if last and self._header and not self._messages and self._channel not in self._header:
            parts.append(AnswerPart("final", self._header))  # the model does not follow the format
        return parts

    def _begin_message(self, header: str) -> None:
        self._messages += 1
        channels = re.findall(re.escape(self._channel) + r"\s*(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        self._recipient = recipient[1] if recipient and recipient[1] != "assistant" else ""
        if self._recipient:
            self._kind = "tool"
        else:
            self._kind = "thinking" if channels and channels[-1] != "final" else "final"


# A model has the first format whose marks are all in its vocabulary. Sources: the models' chat templates.
FORMATS: tuple[ReasoningFormat, ...] = (
    Harmony(("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")),  # gpt-oss
    Tags(("<|channel>", "<channel|>"), label="thought"),  # Gemma 4
    Tags(("<|START_THINKING|>", "<|END_THINKING|>")),  # Command R7B, Command A
    Tags(("<seed:think>", "</seed:think>")),  # Seed-OSS
    Tags(("<mm:think>", "</mm:think>")),  # MiniMax M3
    Tags(("[THINK]", "[/THINK]")),  # Magistral, Ministral 3
    Tags(("<think:opensource>", "</think:opensource>")),  # Hunyuan 3
    Sections(("<|open|>", "<|sep|>", "<|close|>")),  # Kimi K3
)
# Qwen3, DeepSeek R1, GLM 4.5, SmolLM3 and many others. In some of their vocabularies the marks are ordinary text.
DEFAULT = Tags(("<think>", "</think>"))


def detect(has_token: Callable[[str], bool]) -> ReasoningFormat:
    """The format of a model. has_token: whether a text is a token of its vocabulary."""
    return next((found for found in FORMATS if all(map(has_token, found.marks))), DEFAULT)
