"""A conversation with a model. In: the user's messages. Out: streamed answers.

Each turn renders the whole conversation by the model's chat template; the engine computes only tokens that are not in
the KV cache. The messages always match what was shown to the user: of an interrupted answer, the part that was shown is
kept; a turn that failed before its first word is not kept. The model's thinking is not part of the messages, as in chat
templates.
"""

import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal, Unpack

from mlc_amd.runtime.engine.generation import ContextFull, Piece, ProgressCallback, Stats, check_max_tokens, check_stop
from mlc_amd.runtime.engine.generations import Generation
from mlc_amd.runtime.engine.text_engine import TextEngine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.constraints import Constraint
from mlc_amd.runtime.images.prepared import PreparedImage
from mlc_amd.runtime.images.prompts import PromptPiece
from mlc_amd.runtime.images.rows import Prompt
from mlc_amd.runtime.sampling.settings import Sampling, SamplingChanges
from mlc_amd.runtime.text import reasoning
from mlc_amd.runtime.text.messages import IMAGE, Content, Message, check_content, check_messages, content_of, images_of
from mlc_amd.runtime.text.traced_text import Traced

ON_FULL = ("error", "drop")
_FORMAT = 1  # of saved conversations
# With on_full="drop", room for an answer without max_tokens: 1/_RESERVE_FRACTION of the context, at most _RESERVE_MAX.
_RESERVE_FRACTION, _RESERVE_MAX = 4, 512


class TurnOptions(SamplingChanges, total=False):
    """Options of a turn: see `Conversation.stream`."""

    sampling: Sampling | None
    max_tokens: int | None
    stop: str | Sequence[str]
    thinking: str | None
    progress: ProgressCallback | None


class Conversation:
    """Messages of the roles system, user and assistant, in order, and an engine that generates the answers.

    system: the system message or None. sampling: sampling parameters, None for the model's defaults; may be replaced
    between turns. on_full: what to do when the conversation exceeds the context: "error" raises ContextFull, "drop"
    removes the oldest turns, but never the system message. thinking: a value of `chat_template.THINKING`; UserError if
    the model's template does not support it.

    format: the format of thinking and answer in the model's output. dropped: number of messages removed so far.
    constrain: None, or a function that makes an answer's `constraint` (`Engine.generate`) from the rendered prompt.
    """

    constrain: Callable[[str], Callable[[], Constraint]] | None = None

    def __init__(
        self,
        engine: TextEngine,
        system: str | None = None,
        sampling: Sampling | None = None,
        on_full: Literal["error", "drop"] = "error",
        thinking: str = "auto",
    ) -> None:
        self.engine, self.sampling = engine, sampling or engine.sampling
        engine.chat_template.start()
        self.on_full, self.thinking = on_full, thinking
        self.format = reasoning.detect(engine.tokenizer.has_token)
        self.messages: list[Message] = []
        self.dropped = 0
        self._generation: Generation | None = None  # that of the last answer
        # The last prompt and its answer: as rendered text, and as pieces (images, and ids with the generated ones).
        self._rendered, self._rendered_pieces = Traced(), []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message. Setting it keeps the turns; None or "" removes it."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        turns = self.messages[1:] if self.system is not None else self.messages
        self.messages = ([Message(role="system", content=text)] if text else []) + turns

    @property
    def on_full(self) -> Literal["error", "drop"]:
        """The action when the conversation exceeds the context."""
        return self._on_full

    @on_full.setter
    def on_full(self, value: Literal["error", "drop"]) -> None:
        if value not in ON_FULL:
            raise UserError(f"on_full is {value!r}: it must be {' or '.join(ON_FULL)}")
        self._on_full: Literal["error", "drop"] = value

    @property
    def thinking(self) -> str:
        """Whether, or how much, the model thinks before it answers."""
        return self._thinking

    @thinking.setter
    def thinking(self, value: str) -> None:
        self._variables = self.engine.chat_template.switch(value)
        self._thinking = value

    @property
    def stats(self) -> Stats:
        """Statistics of the last answer, also while it is being generated; all zero before the first."""
        return self._generation.stats if self._generation else Stats()

    def reset(self) -> None:
        """Removes all turns; the system message stays."""
        system = self.system
        self.messages, self.dropped = [], 0
        self.system = system
        self._rendered, self._rendered_pieces = Traced(), []

    def undo(self) -> Content | None:
        """Removes the user's last message and all messages after it. Returns its content; None if there is no turn."""
        turn = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if turn is None:
            return None
        content = content_of(self.messages[turn])
        self.messages = self.messages[:turn]
        return content

    def ask(self, text: str | Sequence[Mapping[str, Any]], **options: Unpack[TurnOptions]) -> str:
        """The whole answer of `chat`, with the same options. If the engine's `cancel` ends it, the part so far."""
        return "".join(self.chat(text, **options))

    def chat(
        self,
        text: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        *,
        sampling: Sampling | None = None,
        thinking: str | None = None,
        progress: ProgressCallback | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Generator[str, None, None]:
        """`stream`, with the same arguments, but yields only the answer's text, without thinking and calls."""
        return _final(
            self.stream(text, max_tokens, stop, sampling=sampling, thinking=thinking, progress=progress, **changes)
        )

    def stream(
        self,
        text: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        *,
        sampling: Sampling | None = None,
        thinking: str | None = None,
        progress: ProgressCallback | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Generator[reasoning.AnswerPart, None, None]:
        """Adds a user turn and yields the answer in parts; closing the iterator stops it and keeps what was yielded.

        text: a text, or a list of parts (runtime/text/messages.py). sampling, thinking: for this turn, instead of the
        conversation's; changes: single sampling parameters. max_tokens, stop, progress: see `Engine.generate`.

        Raises UserError for invalid arguments, at once. The first `next` raises ContextFull if the conversation does
        not fit, and UserError if the template or the engine rejects the messages. The conversation is unchanged after
        such an error, and if the answer is stopped before its first word or ends within the thinking.
        """
        template = self.engine.chat_template
        variables = self._variables if thinking is None else template.switch(thinking)
        chosen = (sampling or self.sampling).changed(**changes)
        limit, stops = check_max_tokens(max_tokens), (*template.stop_strings(), *check_stop(stop))
        question = check_content("user", text)
        if "images" in question:
            self.engine.images.check()
        return self._stream(question, chosen, limit, stops, variables, progress)

    def _stream(
        self,
        question: Message,
        sampling: Sampling,
        max_tokens: int | None,
        stops: Sequence[str],
        variables: Mapping[str, Any],
        progress: ProgressCallback | None,
    ) -> Generator[reasoning.AnswerPart, None, None]:
        messages, prompt, given = self._fit([*self.messages, question], max_tokens, variables)
        template, parser = self.engine.chat_template, self.format.parser(prompt)
        shown, hidden, generated = "", False, []
        constraint = self.constrain(prompt) if self.constrain else None
        pieces = self._generation = self.engine.generate(
            Prompt.of(given), sampling, max_tokens, stops, self.format.marks, progress, constraint=constraint
        )
        try:
            for part in _parts(pieces, parser, generated):
                if part.kind != "final":
                    hidden = True
                    yield part
                # The fallback template ends with "Assistant:", so the answer begins with a space.
                elif out := part.text.lstrip() if template.is_fallback and not shown else part.text:
                    shown += out
                    yield reasoning.AnswerPart("final", out)
        except GeneratorExit:
            pieces.close()
        if not shown and (hidden or self.stats.finish == "interrupted"):
            return
        self.dropped += len(self.messages) + 1 - len(messages)
        self.messages = [*messages, {"role": "assistant", "content": shown.rstrip() if template.is_fallback else shown}]
        self._rendered, self._rendered_pieces = Traced(), []
        if self.engine.tokenizer.decode(generated, continues=True) == shown:
            self._rendered, self._rendered_pieces = prompt + shown, [*given, generated]

    def _fit(
        self, messages: list[Message], max_tokens: int | None, variables: Mapping[str, Any]
    ) -> tuple[list[Message], Traced, list[PromptPiece]]:
        """(messages that are kept, their rendered prompt, its pieces). Raises ContextFull."""
        context = self.engine.context
        reserve = 1
        if self.on_full == "drop":
            reserve = max_tokens or min(context // _RESERVE_FRACTION, _RESERVE_MAX)
        while True:
            prompt = self.engine.chat_template.render(messages, **variables)
            pieces = self._encode(prompt, images_of(messages))
            length = sum(piece.rows if isinstance(piece, PreparedImage) else len(piece) for piece in pieces)
            first = 1 if messages[0]["role"] == "system" else 0
            if length + reserve <= context:
                return messages, prompt, pieces
            later = [i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user"]
            if self.on_full == "error" or not later:
                if length < context and not later:
                    return messages, prompt, pieces  # it fits alone, with less room for an answer than reserved
                what = "the conversation with this message" if later else "this message"
                advice = 'begin a new one, use on_full="drop", or' if later else "shorten it, or"
                raise ContextFull(
                    f"{what} is {length} tokens, the context holds {context}",
                    f"{advice} load the model with a larger context",
                    turns=bool(later),
                )
            messages = messages[:first] + messages[later[0] :]

    def _encode(self, prompt: Traced, images: list[bytes]) -> list[PromptPiece]:
        """The pieces of the rendered conversation. The ids of the last answer stay as the model generated them: a model
        may divide a word into other tokens than the tokenizer does, and other ids would not be in the cache."""
        tokenizer = self.engine.tokenizer
        if self._rendered and prompt.begins_with(self._rendered):
            rest = self.engine.images.encode(
                prompt[len(self._rendered) :], images[self._rendered.count(IMAGE) :], False
            )
            # The rest must begin with an added token: otherwise a token could span the border between both texts.
            if rest and not isinstance(rest[0], PreparedImage) and tokenizer.is_added(rest[0][0]):
                return self._rendered_pieces + rest
        return self.engine.images.encode(prompt, images)

    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON, atomically. If the cache is kept on disk, also writes the conversation's part of
        the cache, to the file PATH.cache. Raises UserError."""
        path = Path(path).expanduser()
        messages = [{"role": message["role"], "content": content_of(message, True)} for message in self.messages]
        text = json.dumps({"format": _FORMAT, "messages": messages}, ensure_ascii=False, indent=1) + "\n"
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                temporary = file.name
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if temporary and os.path.exists(temporary):
                os.unlink(temporary)
            raise UserError(f"cannot save the conversation to {path}: {error.strerror}; choose another file") from error
        if self._generation and self.engine.keeps_on_disk:
            self.engine.stored.save(self._generation.sequences[0], _cache_of(path))

    def load(self, path: str | Path) -> None:
        """Replaces all messages, also the system message, by saved ones. Raises UserError if the file is not a saved
        conversation. If the cache is kept on disk, the saved part of it is used, unless it is another model's."""
        path = Path(path).expanduser()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; give the file of a saved conversation") from error
        except ValueError as error:
            raise UserError(f"{path} is not a saved conversation: it is not JSON") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise UserError(f"{path} is not a saved conversation of format {_FORMAT}")
        try:
            messages = check_messages(content.get("messages"))
        except UserError as error:
            raise UserError(f"{path} is not a saved conversation: {error}") from error
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if turns != ["user", "assistant"] * (len(turns) // 2):
            raise UserError(f"{path} is not a saved conversation: it has messages without an answer")
        self.reset()
        self.messages = messages
        if self.engine.keeps_on_disk and _cache_of(path).exists():
            with suppress(UserError):  # without the saved cache, the conversation is computed again
                self.engine.stored.open(self, _cache_of(path))


def _cache_of(path: Path) -> Path:
    """The file for the cache of a saved conversation."""
    return path.with_name(f"{path.name}.cache")


def _final(parts: Generator[reasoning.AnswerPart, None, None]) -> Generator[str, None, None]:
    """The texts of the parts of kind "final". Closing this iterator closes `parts`."""
    with closing(parts):
        for part in parts:
            if part.kind == "final":
                yield part.text


def _parts(pieces: Iterator[Piece], parser: reasoning.Parser, generated: list[int]) -> Iterator[reasoning.AnswerPart]:
    """The parts of a generated text. Appends its token ids to `generated`."""
    for piece in pieces:
        generated.append(piece.id)
        yield from parser.feed(piece.text)
    yield from parser.finish()
