"""Reads messages from the keyboard, of one or several lines. On a terminal there are editing, history and completion
(prompt_toolkit).

In: keys, or lines of a pipe. Out: the text of the message.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlc_amd.tools.terminal import display

KEYS = (
    ("Enter", "send"),
    ("Alt-Enter", 'new line (or end a line with \\, or write between lines of ``` or """)'),
    ("Ctrl-C", "stop the answer"),
    ("Up, Ctrl-R", "earlier messages"),
)
_QUOTED, _PLAIN = r"""(?P<mark>['"])(?P<quoted>[/~][^'"\n]*)(?P=mark)""", r"(?P<plain>(?:file://)?[/~](?:\\.|[^\s\\])*)"
_DROPPED = re.compile(rf"\s*(?:{_QUOTED}|{_PLAIN})(?=\s|$)")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif")
_FENCES = ('"""', "```")


def complete(text: str) -> bool:
    """Whether `text` is a complete message: no open block of ``` or triple quotes, and no backslash at its end."""
    fence = next((f for f in _FENCES if text.lstrip().startswith(f)), None)
    if fence:
        return text.count(fence) >= 2 and text.rstrip().endswith(fence)
    return not text.endswith("\\")


def unwrap(text: str) -> str:
    """The text of the message, without triple quotes around it and without the backslashes that joined its lines."""
    inner = text.strip()
    if inner.startswith('"""') and inner.endswith('"""') and len(inner) >= 6:
        return inner[3:-3].strip("\n")
    return text if inner.startswith("```") else text.replace("\\\n", "\n")


def dropped(text: str) -> tuple[list[str], str]:
    """(paths of images, the rest of the message), for a message that begins with images. Terminals write files that are
    dropped onto them as absolute paths with quotes or backslashes, or as file URLs."""
    found = []
    while match := _DROPPED.match(text):
        path = match["quoted"] or re.sub(r"\\(.)", r"\1", match["plain"])
        path = unquote(urlsplit(path).path) if path.startswith("file://") else path
        if not path.lower().endswith(_IMAGES) or not Path(path).expanduser().is_file():
            break
        found.append(path)
        text = text[match.end() :]
    return found, text.strip() if found else text


def history_path() -> Path:
    """The file of typed lines."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "mlc-amd" / "history"


def line_editor(words: Sequence[str]) -> Callable[[], str]:
    """A function that reads one message. Tab completes lines that begin one of `words`. It raises EOFError on Ctrl-D
    and KeyboardInterrupt on Ctrl-C."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # not in the search of Ctrl-R, where Enter accepts the found line

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
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
    )
    return lambda: session.prompt("> ")
