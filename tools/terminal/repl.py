"""Where the lines of a chat come from: `interact` reads them on a terminal, `follow` from a pipe."""

from collections.abc import Iterable, Iterator

from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.terminal import display, settings, terminal
from mlc_amd.tools.terminal.line_editor import complete, line_editor
from mlc_amd.tools.terminal.session import COMMANDS, Leave, Session


def follow(session: Session, lines: Iterable[str]) -> None:
    """Runs a stream of lines. An error is a line on stderr, and the next line follows; in the end it is a UserError."""
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
    """What is sent, of one line or several; blank lines are nothing."""
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
    """The conversation on a terminal, until Ctrl-D or /exit. Errors are shown and the session goes on."""
    engine = session.conversation.engine
    read = line_editor([*(f"/{name}" for name in COMMANDS), *(f"/set {name}" for name in settings.NAMES)])
    if not session.options.quiet:
        name, size = engine.artifact.manifest["name"], engine.context
        display.message(f"{name} on {engine.device.name}, {size} tokens of context")
        display.message("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            line = read()
            with terminal.silent_keyboard():
                session.handle(line)
        except (EOFError, Leave):
            return
        except UserError as error:
            display.message(f"error: {error}")
        except KeyboardInterrupt:
            display.message("(Ctrl-D or /exit to leave)")
