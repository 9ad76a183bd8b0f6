"""The interactive chat. In: messages and commands. Out: streamed answers, and lines for the user.

A `Session` runs what is typed. `interact` reads it from a terminal, `follow` from a pipe. Answers go to stdout,
everything else to stderr.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

from mlc_amd.runtime.engine.chat import Conversation
from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.text.messages import Content
from mlc_amd.runtime.text.reasoning import AnswerPart
from mlc_amd.tools import interrupts
from mlc_amd.tools.options import ChatOptions
from mlc_amd.tools.terminal import display, settings, terminal, texts
from mlc_amd.tools.terminal.line_editor import KEYS, complete, dropped, line_editor, unwrap
from mlc_amd.tools.terminal.monitor import Monitor

# command -> (its arguments, what it does); the method is `Session._<command>`.
COMMANDS = {
    "help": ("", "this list"),
    "regen": ("", "answer the last message once more"),
    "image": ("FILE", "add an image to the next message, as an image file that is dropped onto the line"),
    "undo": ("", "take back the last message and its answer"),
    "reset": ("", "clear the conversation, keep the system message"),
    "stats": ("", "show statistics of the last answer"),
    "system": ("[TEXT]", "set the system message; without a text: show it; '-' removes it"),
    "save": ("FILE", "write the conversation to a file"),
    "load": ("FILE", "continue a saved conversation"),
    "set": ("[NAME VALUE]", "change a setting (temperature, seed, max_tokens, stop, on_full, ...); without: show all"),
    "exit": ("", "leave (also Ctrl-D)"),
}
# What is shown for an answer that ends with a part of this kind.
_UNANSWERED = {
    "thinking": "(no answer: the model was still thinking; the conversation is unchanged)",
    "tool": "(no answer: the model called a tool, and chat has none; the conversation is unchanged)",
}
# How to make room in the context, by whether a person types, and whether there are earlier turns.
_ROOM = {
    (True, True): "/undo, /reset or /set on_full drop make room",
    (True, False): "shorten it, or begin again with a larger --ctx",
    (False, True): "use --on-full drop, or a larger --ctx",
    (False, False): "shorten it, or use a larger --ctx",
}


class Leave(Exception):
    """The user ends the session."""


class Session:
    """A conversation, the options of its answers, and the commands that change both. interactive: whether a person
    types; then Ctrl-C ends an answer, not the program."""

    def __init__(self, conversation: Conversation, options: ChatOptions, interactive: bool = False) -> None:
        self.conversation, self.options, self.interactive = conversation, options, interactive
        self._dropped = 0
        self._open: Content | None = None  # a message without an answer
        self._images: list[bytes] = []  # for the next message

    def handle(self, line: str) -> None:
        """Runs a command or answers a message. Raises Leave after /exit; otherwise errors as `answer` does."""
        text = unwrap(line)
        files, text = dropped(text) if self.interactive else ([], text)
        for file in files:
            self._image(file)
        if text.startswith("/") and not files:
            self._command(text[1:])
        elif text.strip():
            self.answer(text)

    def add_images(self, images: Sequence[bytes]) -> None:
        """Adds images to the next message. Raises UserError if the model accepts none."""
        if images:
            self.conversation.engine.images.check()
            self._images += images

    def answer(self, text: Content) -> None:
        """Streams the answer to `text` to stdout, and ends it with a newline. If the model's thinking is shown, it goes
        to stderr. On a terminal, statistics follow. Raises UserError if the context is too small for the message or the
        answer, and KeyboardInterrupt after Ctrl-C unless the session is interactive."""
        conversation, options, last, answered = self.conversation, self.options, None, False
        if self._images and isinstance(text, str):
            images = [{"type": "image", "image": image} for image in self._images]
            text = [*images, {"type": "text", "text": text}]
            self._images = []
        self._open = text
        try:
            with Monitor(conversation.engine) as monitor:
                parts = conversation.stream(text, options.max_tokens, options.stop, progress=monitor.progress)
                for part in parts:
                    self._show(part, last, monitor)
                    last, answered = part.kind, answered or part.kind == "final"
                    if monitor.stopped:
                        break
                parts.close()
                if last in _UNANSWERED and self.options.show_thinking:
                    terminal.aside("\n\n")
        except ContextFull as error:
            raise UserError(f"{error.what}: {_ROOM[self.interactive, error.turns]}") from error
        if answered:
            self._open = None
        if last or not monitor.stopped:
            terminal.stream("\n")
            self._tell(None if answered else last)
        else:
            display.message("(stopped: the conversation is unchanged)")
        if monitor.stopped and not self.interactive:
            raise KeyboardInterrupt
        if conversation.stats.finish == "context":
            size = conversation.engine.context
            raise UserError(
                f"the answer was cut off, the context of {size} tokens is full: {_ROOM[self.interactive, True]}"
            )

    def _tell(self, unanswered: str | None) -> None:
        """Writes lines about an answer. unanswered: the kind of the part with which it ended, if this was not the
        answer itself."""
        if unanswered in _UNANSWERED:
            display.message(_UNANSWERED[unanswered])
        if (dropped := self.conversation.dropped) > self._dropped:
            display.message(f"(the context is full: the oldest {dropped - self._dropped} messages were removed)")
            self._dropped = dropped
        if self.options.quiet:
            return
        if terminal.is_terminal(sys.stderr):
            display.message(display.footer(self._statistics(), terminal.width() - 1), dimmed=True)
        elif self.conversation.stats.finish == "length":
            display.message(f"(cut off: max_tokens is {self.options.max_tokens})")

    def _show(self, part: AnswerPart, last: str | None, monitor: Monitor) -> None:
        """Prints a part. last: the kind of the part before it."""
        if part.kind == "final":
            monitor.begin()
            if last in _UNANSWERED and self.options.show_thinking:
                terminal.aside("\n\n")
            terminal.stream(part.text)
        elif self.options.show_thinking:
            monitor.begin()
            terminal.aside(part.text)
        elif part.kind != last:
            monitor.wait("thinking ...")

    def _statistics(self) -> list[str]:
        engine = self.conversation.engine
        return display.statistics(self.conversation.stats, engine.context)

    def _command(self, line: str) -> None:
        name, _, argument = line.strip().partition(" ")
        if name not in COMMANDS:
            raise UserError(f"unknown command /{name}: /help lists them (begin with a space to send this as a message)")
        argument = argument.strip()
        wants = COMMANDS[name][0]
        if argument and not wants:
            raise UserError(f"/{name} takes no argument")
        if not argument and wants and not wants.startswith("["):
            raise UserError(f"/{name} needs an argument: /{name} {wants}")
        getattr(self, f"_{name}")(argument)

    def _help(self, _: str) -> None:
        rows = [(f"/{name} {arguments}".rstrip(), what) for name, (arguments, what) in COMMANDS.items()]
        width = max(len(left) for left, _ in rows) + 2
        display.message("\n".join(f"  {left.ljust(width)}{right}" for left, right in (*rows, *KEYS)))

    def _regen(self, _: str) -> None:
        conversation, before = self.conversation, self.conversation.messages
        text = self._open or conversation.undo()
        if text is None:
            raise UserError("there is nothing to answer: no message yet")
        kept = conversation.messages
        try:
            self.answer(text)
        finally:
            if conversation.messages is kept:  # there was no answer: the one before stays
                conversation.messages = before

    def _undo(self, _: str) -> None:
        text, self._open = self.conversation.undo(), None
        if text is None:
            raise UserError("there is nothing to take back: no message yet")
        parts = [part["text"] for part in text if "text" in part] if isinstance(text, list) else [text]
        display.message(f"(taken back: {shorten(''.join(parts))})")

    def _image(self, path: str) -> None:
        self.add_images([texts.picture(path)])
        display.message(f"(image {path}: part of the next message)")

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self._dropped, self._open, self._images = 0, None, []
        display.message("(conversation forgotten)")

    def _stats(self, _: str) -> None:
        lines = self._statistics() if self.conversation.stats.prompt_tokens else ["(no answer yet)"]
        display.message("\n".join(lines))

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
        display.message(f"(system message: {self.conversation.system or 'none'})")

    def _save(self, path: str) -> None:
        self.conversation.save(path)
        display.message(f"(saved to {path})")

    def _load(self, path: str) -> None:
        self.conversation.load(path)
        self._dropped, self._open = 0, None
        display.message(f"(loaded {len(self.conversation.messages)} messages)")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if name:
            self.options = settings.change(self.conversation, self.options, name, value.strip())
        shown = settings.values(self.conversation, self.options)
        rows = "\n".join(f"  {name.ljust(20)}{value}" for name, value in shown.items())
        display.message(f"({name} = {shown[name]})" if name else rows)

    def _exit(self, _: str) -> None:
        raise Leave


# ---- sources of lines


def follow(session: Session, lines: Iterable[str]) -> None:
    """Runs a stream of lines. An error becomes a line on stderr, and the next line follows. At the end, raises
    UserError if there was an error."""
    count = failed = 0
    for text in _messages(lines):
        count += 1
        try:
            session.handle(text)
        except Leave:
            break
        except UserError as error:
            failed += 1
            display.message(f"error: {error}")
    if failed:
        raise UserError(f"{failed} of {count} messages and commands failed")


def _messages(lines: Iterable[str]) -> Iterator[str]:
    """The messages in the lines. A message may have several lines; blank lines are ignored."""
    waiting = ""
    for line in lines:
        waiting += line.rstrip("\r\n")
        if not complete(waiting):
            waiting += "\n"
            continue
        if waiting.strip():
            yield waiting
        waiting = ""
    if waiting.strip():
        yield waiting


def interact(session: Session) -> None:
    """Runs the conversation on a terminal, until Ctrl-D or /exit. Errors are shown, and the session continues."""
    engine = session.conversation.engine
    read = line_editor([*(f"/{name}" for name in COMMANDS), *(f"/set {name}" for name in settings.NAMES)])
    if not session.options.quiet:
        name, size = engine.artifact.manifest["name"], engine.context
        display.message(f"{name} on {engine.device.name}, {size} tokens of context")
        display.message("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            with interrupts.raising():
                line = read()
                with terminal.silent_keyboard():
                    session.handle(line)
        except (EOFError, Leave):
            return
        except UserError as error:
            display.message(f"error: {error}")
        except KeyboardInterrupt:
            display.message("(Ctrl-D or /exit to leave)")
