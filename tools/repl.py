"""The interactive chat: turns input lines into messages and commands, and streams answers to stdout.

`Session` holds the conversation and runs commands, wherever the lines come from. `interact` reads them on a terminal
(prompt_toolkit: editing, history, several lines); `follow` reads them from a pipe. Answers go to stdout, everything
else to stderr.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mlc_amd.runtime.chat import Conversation
from mlc_amd.runtime.chat_template import THINKING
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.reasoning import Part
from mlc_amd.runtime.sampling import Sampling
from mlc_amd.tools import display, terminal
from mlc_amd.tools.monitor import Monitor

# command -> (its arguments, what it does); the method is `Session._<command>`.
COMMANDS = {
    "help": ("", "this list"),
    "reset": ("", "clear the conversation, keep the system message"),
    "stats": ("", "show statistics of the last answer"),
    "system": ("[TEXT]", "set the system message; without a text: show it; '-' removes it"),
    "save": ("FILE", "write the conversation to a file"),
    "load": ("FILE", "continue a saved conversation"),
    "set": ("[NAME VALUE]", "change a setting (temperature, top_p, seed, max_tokens, ...); without: show all"),
    "exit": ("", "leave (also Ctrl-D)"),
}
KEYS = (
    ("Enter", "send"),
    ("Alt-Enter", 'new line (or end a line with \\, or write between lines of ``` or """)'),
    ("Ctrl-C", "stop the answer"),
    ("Up, Ctrl-R", "earlier messages"),
)
# What is said of an answer that ends with a part of this kind.
_UNANSWERED = {
    "thinking": "(no answer: the model was still thinking; the conversation is unchanged)",
    "tool": "(no answer: the model called a tool, and chat has none; the conversation is unchanged)",
}
_SWITCH = ("off", "on")
# Settings with names for values.
_CHOICES = {"thinking": THINKING, "show_thinking": _SWITCH}
_FENCES = ('"""', "```")


class Leave(Exception):
    """The user ends the session."""


def complete(text: str) -> bool:
    """Whether `text` can be sent: no open block of ``` or triple quotes, no backslash at its end."""
    fence = next((f for f in _FENCES if text.lstrip().startswith(f)), None)
    if fence:
        return text.count(fence) >= 2 and text.rstrip().endswith(fence)
    return not text.endswith("\\")


def unwrap(text: str) -> str:
    """The message that was meant: without triple quotes around it and without the backslashes that joined its lines."""
    inner = text.strip()
    if inner.startswith('"""') and inner.endswith('"""') and len(inner) >= 6:
        return inner[3:-3].strip("\n")
    return text if inner.startswith("```") else text.replace("\\\n", "\n")


class Session:
    """A conversation, the limits of its answers, and the commands that change both."""

    def __init__(
        self,
        conversation: Conversation,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        show_thinking: bool = False,
    ) -> None:
        self.conversation, self.max_tokens, self.stop = conversation, max_tokens, stop
        self.show_thinking = show_thinking
        self._dropped = 0

    def handle(self, line: str, stoppable: bool = False) -> bool:
        """Runs a command or answers a message; returns whether there was an answer. Raises UserError, and Leave after
        /exit.

        stoppable: Ctrl-C ends the answer instead of raising KeyboardInterrupt.
        """
        text = unwrap(line)
        if not text.strip():
            return False
        if text.startswith("/"):
            self._command(text[1:])
            return False
        self.answer(text, stoppable)
        return True

    def answer(self, text: str, stoppable: bool = False) -> None:
        """Streams the answer to `text` to stdout and ends it with a newline; what the model thinks goes to stderr, if
        it is shown."""
        last, answered = None, False
        with Monitor(self.conversation.engine) as monitor:
            parts = self.conversation.stream(text, self.max_tokens, self.stop, progress=monitor.progress)
            for part in parts:
                self._show(part, last, monitor)
                last, answered = part.kind, answered or part.kind == "final"
                if monitor.stopped:
                    break
            parts.close()
            if last in _UNANSWERED and self.show_thinking:
                terminal.aside("\n\n")
        if last in _UNANSWERED and not answered:
            display.message(_UNANSWERED[last])
        if last or not monitor.stopped:
            terminal.stream("\n")
        else:
            display.message("(stopped: the conversation is unchanged)")
        if monitor.stopped and not stoppable:
            raise KeyboardInterrupt
        if self.conversation.dropped > self._dropped:
            display.message(
                f"(the context is full: the oldest {self.conversation.dropped - self._dropped} messages were removed)"
            )
            self._dropped = self.conversation.dropped

    def _show(self, part: Part, last: str | None, monitor: Monitor) -> None:
        """Prints a part; last: the kind of the part before."""
        if part.kind == "final":
            monitor.begin()
            if last in _UNANSWERED and self.show_thinking:
                terminal.aside("\n\n")
            terminal.stream(part.text)
        elif self.show_thinking:
            monitor.begin()
            terminal.aside(part.text)
        elif part.kind != last:
            monitor.wait("thinking ...")

    def footer(self) -> str:
        """One line about the last answer."""
        engine = self.conversation.engine
        return display.footer(self.conversation.stats, engine.position, engine.context)

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

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self._dropped = 0
        display.message("(conversation forgotten)")

    def _stats(self, _: str) -> None:
        display.message(self.footer() if self.conversation.stats.prompt_tokens else "(no answer yet)")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text == "-" else text
        display.message(f"(system message: {self.conversation.system or 'none'})")

    def _save(self, path: str) -> None:
        self.conversation.save(path)
        display.message(f"(saved to {path})")

    def _load(self, path: str) -> None:
        self.conversation.load(path)
        self._dropped = 0
        display.message(f"(loaded {len(self.conversation.messages)} messages)")

    def _set(self, text: str) -> None:
        settings = dataclasses.asdict(self.conversation.sampling) | {
            "max_tokens": self.max_tokens,
            "thinking": self.conversation.thinking,
            "show_thinking": _SWITCH[self.show_thinking],
        }
        if not text:
            display.message(
                "\n".join(f"  {name.ljust(20)}{'-' if value is None else value}" for name, value in settings.items())
            )
            return
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if name not in settings:
            raise UserError(f"unknown setting {name}: choose from {', '.join(settings)}")
        parsed = _setting(name, value.strip())
        if name == "max_tokens":
            self.max_tokens = parsed
        elif name == "show_thinking":
            self.show_thinking = parsed == "on"
        elif name == "thinking":
            self.conversation.thinking = parsed
        else:
            self.conversation.sampling = dataclasses.replace(self.conversation.sampling, **{name: parsed})
        display.message(f"({name} = {'-' if parsed is None else parsed})")

    def _exit(self, _: str) -> None:
        raise Leave


def _setting(name: str, value: str) -> Any:
    """The value of /set as the type its name has; "-" unsets what can be unset."""
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise UserError(f"{name} is one of {', '.join(_CHOICES[name])}, not {value!r}")
        return value
    unsettable = name in ("seed", "max_tokens")
    if unsettable and value == "-":
        return None
    kind = int if unsettable else type(getattr(Sampling(), name))
    try:
        parsed = kind(value)
    except ValueError:
        raise UserError(f"{name} expects {'a whole number' if kind is int else 'a number'}, not {value!r}") from None
    if name == "max_tokens" and parsed < 1:
        raise UserError("max_tokens must be at least 1 ('-' for no limit)")
    return parsed


def follow(session: Session, lines: Iterable[str]) -> None:
    """Answers every message of a stream of lines. Errors end it (they are raised): nobody is there to react."""
    waiting = ""
    for line in lines:
        waiting += line.rstrip("\r\n")
        if not complete(waiting):
            waiting += "\n"
            continue
        text, waiting = waiting, ""
        try:
            session.handle(text)
        except Leave:
            return
    session.handle(waiting)


def interact(session: Session) -> None:
    """The conversation on a terminal, until Ctrl-D or /exit. Errors are shown and the session goes on."""
    engine = session.conversation.engine
    read = _line_editor()
    name = engine.artifact.manifest["name"]
    display.message(
        f"{name} on {engine.device.name}, {engine.context} tokens of context. /help for help, Ctrl-D to leave."
    )
    while True:
        try:
            if session.handle(read(), stoppable=True):
                display.message(f"\x1b[2m{session.footer()}\x1b[0m")
        except (EOFError, Leave):
            return
        except UserError as error:
            display.message(f"error: {error}")
        except KeyboardInterrupt:
            display.message("(Ctrl-D or /exit to leave)")


def history_path() -> Path:
    """Where typed lines are kept."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "mlc-amd" / "history"


def _line_editor() -> Callable[[], str]:
    """A function that reads one message. Raises EOFError on Ctrl-D and KeyboardInterrupt on Ctrl-C."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # not in the search of Ctrl-R, whose Enter takes what was found

    @keys.add("enter", filter=typing)
    def _(event) -> None:
        if complete(event.current_buffer.text):
            event.current_buffer.validate_and_handle()
        else:
            event.current_buffer.insert_text("\n")

    @keys.add("escape", "enter", filter=typing)
    def _(event) -> None:
        event.current_buffer.insert_text("\n")

    path = history_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    except OSError as error:
        display.message(f"(no history: {path}: {error.strerror})")
        history = InMemoryHistory()
    session = PromptSession(
        history=history,
        auto_suggest=AutoSuggestFromHistory(),
        completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
    )
    return lambda: session.prompt("> ")
