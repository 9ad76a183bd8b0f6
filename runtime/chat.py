"""A conversation with a model: turns of text in, streamed answers out.

A turn renders the whole conversation through the model's chat template, and the engine prefills only what is not in the
KV cache. The messages always match what was shown: an interrupted answer is kept as far as it was shown, and a turn
that failed before its first word leaves the conversation unchanged. What the model thinks before it answers is no part
of the messages: chat templates leave it out of earlier turns, too.
"""

import json
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeGuard

from mlc_amd.runtime import reasoning
from mlc_amd.runtime.engine import ContextFull, Engine, Piece, Stats
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.sampling import Sampling

_FORMAT = 1  # of saved conversations
# Tokens that `drop` reserves for an answer without max_tokens: a fraction (1/4) of the context, and a maximum.
_RESERVE_FRACTION, _RESERVE_MAX = 4, 512


class Conversation:
    """Messages of the roles system, user and assistant, in order, and an engine that answers them.

    system: the system message or None. sampling: sampling parameters, None: the model's defaults (may be replaced
    between turns). on_full: when the conversation exceeds the context, "error" raises ContextFull, "drop" removes the
    oldest turns but never the system message. thinking: a value of `chat_template.THINKING`, UserError for one that the
    model's template has no switch for. format: how the model marks the parts of an answer. dropped: number of messages
    removed so far.
    """

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        sampling: Sampling | None = None,
        on_full: Literal["error", "drop"] = "error",
        thinking: str = "auto",
    ) -> None:
        if on_full not in ("error", "drop"):
            raise UserError(f"on_full is {on_full!r}: it must be error or drop")
        self.engine, self.sampling, self.on_full = engine, sampling or engine.sampling, on_full
        self.thinking = thinking
        self.format = reasoning.detect(engine.tokenizer.has_token)
        self.messages: list[dict[str, str]] = []
        self.dropped = 0
        # The last prompt with its answer as rendered text, and its ids as they were generated.
        self._rendered, self._rendered_ids = "", []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message. Setting it keeps the turns; None or "" removes it."""
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        turns = self.messages[1:] if self.system is not None else self.messages
        self.messages = ([{"role": "system", "content": text}] if text else []) + turns

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
        return self.engine.last

    def reset(self) -> None:
        """Removes all turns; the system message stays."""
        system = self.system
        self.messages, self.dropped = [], 0
        self.system = system
        self._rendered, self._rendered_ids = "", []
        self.engine.reset()

    def ask(self, text: str, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Iterator[str]:
        """The answer of `stream` in pieces, without the model's thinking and calls."""
        parts = self.stream(text, max_tokens, stop)
        try:
            for part in parts:
                if part.kind == "final":
                    yield part.text
        finally:
            parts.close()

    def stream(
        self, text: str, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Generator[reasoning.Part, None, None]:
        """Adds a user turn and yields the answer in parts; closing the iterator stops it and keeps what was yielded.

        Raises ContextFull (a UserError) before anything is computed if the conversation does not fit, and UserError
        for what the template or the engine rejects; the conversation is then unchanged. An answer that ends within the
        thinking leaves it unchanged, too.
        """
        messages, prompt, ids = self._fit([*self.messages, {"role": "user", "content": text}], max_tokens)
        template, parser = self.engine.chat_template, self.format.parser(prompt)
        shown, hidden, made, stopped = "", False, [], False
        stops = (*template.stop_strings(), *stop)
        pieces = self.engine.generate(ids, self.sampling, max_tokens, stops, self.format.marks)
        try:
            for part in _parts(pieces, parser, made):
                if part.kind != "final":
                    hidden = True
                    yield part
                # In a plain dialogue the answer begins with the space that the template writes after "Assistant:".
                elif out := part.text.lstrip() if template.is_fallback and not shown else part.text:
                    shown += out
                    yield reasoning.Part("final", out)
        except GeneratorExit:
            stopped = True
            pieces.close()
        if not shown and (stopped or hidden):
            return
        self.dropped += len(self.messages) + 1 - len(messages)
        self.messages = [*messages, {"role": "assistant", "content": shown.rstrip() if template.is_fallback else shown}]
        self._rendered, self._rendered_ids = "", []
        if self.engine.tokenizer.decode(made, continues=True) == shown:
            self._rendered, self._rendered_ids = prompt + self.engine.tokenizer.escape(shown), ids + made

    def _fit(
        self, messages: list[dict[str, str]], max_tokens: int | None
    ) -> tuple[list[dict[str, str]], str, list[int]]:
        """The messages that are kept, their rendered prompt and its ids."""
        context = self.engine.context
        reserve = 1
        if self.on_full == "drop":
            reserve = max_tokens or min(context // _RESERVE_FRACTION, _RESERVE_MAX)
        while True:
            prompt = self._render(messages)
            ids = self._encode(prompt)
            first = 1 if messages[0]["role"] == "system" else 0
            if len(ids) + reserve <= context:
                return messages, prompt, ids
            later = [i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user"]
            if self.on_full == "error" or not later:
                if len(ids) < context and not later:
                    return messages, prompt, ids  # it fits alone, with less room for an answer than reserved
                what = "the conversation with this message" if later else "this message"
                advice = (
                    "start over, use --on-full drop or a larger --ctx" if later else "shorten it or use a larger --ctx"
                )
                raise ContextFull(f"{what} is {len(ids)} tokens, the context holds {context}: {advice}")
            messages = messages[:first] + messages[later[0] :]

    def _render(self, messages: list[dict[str, str]]) -> str:
        # User text must not produce control tokens.
        escaped = [{**message, "content": self.engine.tokenizer.escape(message["content"])} for message in messages]
        return self.engine.chat_template.render(escaped, **self._variables)

    def _encode(self, prompt: str) -> list[int]:
        """Token ids of the rendered conversation; generated ids are kept as they were generated.

        A model may split a word into other tokens than the tokenizer does; encoding its text again would then miss the
        cache from there on.
        """
        tokenizer = self.engine.tokenizer
        if self._rendered and prompt.startswith(self._rendered):
            rest = tokenizer.encode(prompt[len(self._rendered) :], add_special=False)
            # Only an added token separates safely: elsewhere, the text on both sides may form one token.
            if rest and tokenizer.is_added(rest[0]):
                return self._rendered_ids + rest
        return tokenizer.encode(prompt, add_special=not tokenizer.add_eos)

    def save(self, path: str | Path) -> None:
        """Writes the messages as JSON, atomically."""
        path = Path(path).expanduser()
        text = json.dumps({"format": _FORMAT, "messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
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

    def load(self, path: str | Path) -> None:
        """Replaces the messages, including the system message, by saved ones. UserError if the file is not a saved
        conversation."""
        path = Path(path).expanduser()
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; give a file written by /save") from error
        except ValueError as error:
            raise UserError(f"{path} is not a saved conversation (not JSON); give a file written by /save") from error
        messages = content.get("messages") if isinstance(content, dict) and content.get("format") == _FORMAT else None
        if not _is_conversation(messages):
            raise UserError(f"{path} is not a saved conversation; give a file written by /save")
        self.reset()
        self.messages = messages


def _parts(pieces: Iterator[Piece], parser: reasoning.Parser, made: list[int]) -> Iterator[reasoning.Part]:
    """The parts of a generated text; its ids are appended to `made`."""
    for piece in pieces:
        made.append(piece.id)
        yield from parser.feed(piece.text)
    yield from parser.finish()


def _is_conversation(messages: object) -> TypeGuard[list[dict[str, str]]]:
    """Whether this is a list of messages: an optional system message, then pairs of user and assistant messages."""
    if not isinstance(messages, list):
        return False
    if not all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and isinstance(m["content"], str) for m in messages
    ):
        return False
    roles = [m["role"] for m in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    return turns == ["user", "assistant"] * (len(turns) // 2)
