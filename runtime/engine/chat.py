"""A conversation with a model: turns of text in, streamed answers out.

A turn renders the whole conversation through the model's chat template, and the engine prefills only what is not in the
KV cache. The messages always match what was shown: an interrupted answer is kept as far as it was shown, a turn that
failed before its first word is not. The model's thinking is no part of the messages, as in chat templates.
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
# Tokens that `drop` reserves for an answer without max_tokens: a fraction (1/4) of the context, and a maximum.
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

    system: the system message or None. sampling: sampling parameters, None: the model's defaults (may be replaced
    between turns). on_full: when the conversation exceeds the context, "error" raises ContextFull, "drop" removes the
    oldest turns but never the system message. thinking: a value of `chat_template.THINKING`, UserError for one that the
    model's template does not support. format: the marks of the parts of an answer. dropped: number of messages removed
    so far. constrain: a function from a rendered prompt to the `constraint` of the answer (`Engine.generate`).
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
        self._generation: Generation | None = None  # of the last answer
        # The last prompt with its answer as rendered text, and as ids, with those that were generated, and images.
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
        """Removes the user's last message and all after it, and returns its content; None where there is no turn."""
        turn = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if turn is None:
            return None
        content = content_of(self.messages[turn])
        self.messages = self.messages[:turn]
        return content

    def ask(self, text: str | Sequence[Mapping[str, Any]], **options: Unpack[TurnOptions]) -> str:
        """The whole answer of `chat`, with the same options. Where the engine's `cancel` ends it, as far as it is."""
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
        """The answer of `stream`, with the same arguments, in pieces, without the model's thinking and calls."""
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
        conversation's; changes: single sampling parameters. max_tokens, stop, progress: as in `Engine.generate`.
        Raises UserError for arguments out of range, at once; at the first step, ContextFull if the conversation does
        not fit, before anything is computed, and UserError where the template or the engine rejects the messages. The
        conversation is then unchanged, as it is if the answer is stopped before its first word or within the thinking.
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
                # In a plain dialogue the answer begins with the space that the template writes after "Assistant:".
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
        """The messages that are kept, their rendered prompt and its pieces."""
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
        """The pieces of the rendered conversation; generated ids stay as they were generated: a model may split a word
        into other tokens than the tokenizer, which would miss the cache from there on."""
        tokenizer = self.engine.tokenizer
        if self._rendered and prompt.begins_with(self._rendered):
            rest = self.engine.images.encode(
                prompt[len(self._rendered) :], images[self._rendered.count(IMAGE) :], False
            )
            # Only an added token separates safely: elsewhere, the text on both sides may form one token.
            if rest and not isinstance(rest[0], PreparedImage) and tokenizer.is_added(rest[0][0]):
                return self._rendered_pieces + rest
        return self.engine.images.encode(prompt, images)

    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON, atomically; where the cache is kept on disk, what it has of the conversation to
        the file PATH.cache, too."""
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
        """Replaces the messages, the system message too, by saved ones. UserError if the file has none. What was saved
        of the cache is used where it is this model's, and the cache is kept on disk."""
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
            with suppress(UserError):  # it is computed again
                self.engine.stored.open(self, _cache_of(path))


def _cache_of(path: Path) -> Path:
    """Beside a saved conversation."""
    return path.with_name(f"{path.name}.cache")


def _final(parts: Generator[reasoning.AnswerPart, None, None]) -> Generator[str, None, None]:
    """The text of the answer itself; closing this closes `parts`."""
    with closing(parts):
        for part in parts:
            if part.kind == "final":
                yield part.text


def _parts(pieces: Iterator[Piece], parser: reasoning.Parser, generated: list[int]) -> Iterator[reasoning.AnswerPart]:
    """The parts of a generated text; its ids are appended to `generated`."""
    for piece in pieces:
        generated.append(piece.id)
        yield from parser.feed(piece.text)
    yield from parser.finish()
