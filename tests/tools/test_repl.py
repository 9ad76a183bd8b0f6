"""The chat that a person types into: on a pseudo-terminal, with keys pressed as a person would; and its commands."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from mlc_amd.runtime.engine.generation import Stats
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.text.traced_text import Traced
from mlc_amd.tools import cli
from mlc_amd.tools.options import ChatOptions
from mlc_amd.tools.terminal import display, line_editor, terminal
from mlc_amd.tools.terminal.session import Session

QUESTION = "What does os.path.join do?"
CONTEXT = 2048


# ---- the terminal

MLC_AMD = Path(sys.executable).with_name("mlc-amd")
PROMPT = r">\S*\x1b\[\?25h"  # drawn, and the cursor shown again


class Terminal:
    """A process on a pseudo-terminal, driven like a person would: wait for a text, type, press Ctrl-C."""

    def __init__(self, command, env):
        self.master, slave = pty.openpty()
        env = env | {"PROMPT_TOOLKIT_NO_CPR": "1"}
        # A session of its own, whose terminal this is: then Ctrl-C typed on it reaches the process as SIGINT.
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=_own_terminal, **streams)
        os.close(slave)
        self.seen = ""

    def wait_for(self, pattern: str, seconds: float = 180) -> str:
        """Reads until the pattern matches what came since the last match; returns that text."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        found, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return found

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def at_prompt(self, text: str) -> None:
        """Types once the line editor is ready."""
        self.wait_for(PROMPT)
        self.type(text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where a shell runs the tests in its background


@pytest.fixture
def chat(loaded, tmp_path):
    """Starts a chat with the compiled bundled model on a terminal of its own; its history goes to tmp_path."""
    opened = []

    def start(*tokens, **variables) -> Terminal:
        env = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"} | variables
        opened.append(Terminal([MLC_AMD, "chat", loaded.artifact.path, *tokens], env))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_the_chat_line_streams_edits_and_leaves(chat, tmp_path):
    session = chat("--temperature", "1.5", "--seed", "3", "--max-tokens", "40")
    session.wait_for(r"2048 tokens of context")
    session.at_prompt(QUESTION + "\r")
    session.wait_for(r"\x1b\[2m")
    footer = session.wait_for(r"\x1b\[0m").removesuffix("\x1b[0m")
    assert re.search(r"\d+ new \+ 0 cached", footer) and len(footer) < 80
    session.at_prompt("/set max_tokens 6\r")
    session.wait_for(r"max_tokens = 6")
    session.at_prompt("And os.path.spli?\x1b[Dt\r")  # the left arrow mends a word
    assert int(re.search(r"(\d+) new", session.wait_for(r"\d+ new \+ [1-9]\d+ cached"))[1]) < 25
    session.at_prompt("\x12path.spl")  # Ctrl-R finds it again; the first Enter takes it, the second sends it
    session.wait_for(r"it\?.*I-search backward.*path\.spl")
    session.type("\r\r")
    session.wait_for(r"\d+ new \+ [1-9]\d+ cached")
    session.at_prompt("one\\\rtwo\x1b\rthree\r")  # a backslash and Alt-Enter go on in the next line
    session.wait_for(r"\d+ new \+ [1-9]\d+ cached")
    session.at_prompt(f"/save {tmp_path / 'talk.json'}\r")
    session.wait_for(r"saved to")
    session.at_prompt("/nonsense\r")
    session.wait_for("error: unknown command /nonsense")
    session.at_prompt("\x03")
    session.wait_for("/exit to leave")
    session.at_prompt("\x04")
    assert session.process.wait(60) == 0
    history = (tmp_path / "mlc-amd" / "history").read_text()
    assert QUESTION in history and "And os.path.split?" in history
    said = [m["content"] for m in json.loads((tmp_path / "talk.json").read_text())["messages"] if m["role"] == "user"]
    assert said == [QUESTION, "And os.path.split?", "And os.path.split?", "one\ntwo\nthree"]


def test_ctrl_c_stops_the_answer_and_not_the_program(chat):
    # So hot that it does not end by itself before the context does.
    session = chat("--temperature", "30", "--seed", "1", NO_COLOR="1")
    session.at_prompt("Tell me everything.\r")
    session.wait_for(r"\x1b\[\?2004l.{30}")  # the line editor is gone, the answer has begun
    session.type("\x03")
    assert "\x1b" not in session.wait_for("interrupted[^\r]*\r")
    session.at_prompt("/set temperature 0\r")
    session.wait_for(r"temperature = 0")
    session.at_prompt("/set max_tokens 5\r")
    session.wait_for("max_tokens = 5")
    session.at_prompt(QUESTION + "\r")
    session.wait_for(r"5 out")
    session.at_prompt("/exit\r")
    assert session.process.wait(60) == 0


# ---- commands


@pytest.fixture
def session(engine) -> Session:
    return Session(engine.conversation("Be brief."), ChatOptions(max_tokens=6), interactive=True)


def run(session: Session, capsys, *lines: str) -> str:
    """What the lines print on stderr."""
    capsys.readouterr()
    for line in lines:
        session.handle(line)
    return capsys.readouterr().err


def test_the_last_turn_can_be_taken_back_and_answered_again(session, capsys):
    messages = session.conversation.messages
    for command, what in (("/undo", "nothing to take back"), ("/regen", "nothing to answer")):
        with pytest.raises(UserError, match=what):
            session.handle(command)
    run(session, capsys, QUESTION)
    answer = session.conversation.messages[-1]["content"]
    run(session, capsys, "/set temperature 3", "/set seed 5", "/regen")
    other = session.conversation.messages
    assert other[-1]["content"] != answer and [m["role"] for m in other] == ["system", "user", "assistant"]
    run(session, capsys, "/set temperature 0", "/regen")
    assert session.conversation.messages[-1]["content"] == answer
    assert "(taken back: 'What does" in run(session, capsys, "/undo") and session.conversation.messages == messages


def test_an_answer_that_cannot_be_given_again_stays(session, capsys):
    run(session, capsys, QUESTION)
    before = session.conversation.messages
    template = session.conversation.engine.chat_template
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(template), "render", lambda *_, **__: Traced.all_own("word " * CONTEXT))
        with pytest.raises(UserError, match="this message is"):
            session.handle("/regen")
    assert session.conversation.messages == before


def test_settings(session, capsys):
    shown = run(session, capsys, "/set on_full drop", '/set stop END "two words" "a\\nb"', "/set quiet on", "/set")
    assert session.conversation.on_full == "drop" and session.options.quiet
    assert session.options.stop == ("END", "two words", "a\nb")
    for line in ("on_full             drop", "stop                END 'two words' 'a\\nb'", "max_tokens          6"):
        assert f"  {line}\n" in shown
    run(session, capsys, "/set stop -", "/set max-tokens -", "/set seed 3", "/set seed -", "/set top_k 4")
    sampling = session.conversation.sampling
    options = session.options
    assert (options.stop, options.max_tokens, sampling.seed, sampling.top_k) == ((), None, None, 4)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("/nonsense", "unknown command /nonsense"),
        ("/set warmth 3", "unknown setting warmth: choose from temperature"),
        ("/set top_k", "top_k needs a value"),
        ("/set top_k 1.5", "top_k must be a whole number, not '1.5'"),
        ("/set top_p 3", "top_p is 3.0: it must be at most 1"),
        ("/set max_tokens 0", "max_tokens is 0"),
        ("/set on_full maybe", "on_full is 'maybe': it must be error or drop"),
        ("/set thinking maybe", "thinking cannot be maybe"),
        ("/set quiet maybe", "quiet must be on or off"),
        ('/set stop "open', "a quote without an end"),
        ("/undo 3", "takes no argument"),
    ],
)
def test_what_cannot_be_set(session, line, error):
    with pytest.raises(UserError, match=re.escape(error)):
        session.handle(line)


def test_a_full_context_names_what_can_be_typed(session, capsys):
    with pytest.raises(UserError, match=r"^this message is .*: shorten it, or begin again with a larger --ctx"):
        session.handle("word " * CONTEXT)
    run(session, capsys, QUESTION)
    with pytest.raises(UserError, match=r"with this message is .*: /undo, /reset or /set on_full drop make room"):
        session.handle("word " * (CONTEXT - 20))
    session.interactive = False
    with pytest.raises(UserError, match=r"with this message is .*: use --on-full drop, or a larger --ctx"):
        session.handle("word " * (CONTEXT - 20))
    session.options, session.interactive = ChatOptions(), True
    run(session, capsys, "/set temperature 30", "/set seed 0")
    with pytest.raises(UserError, match="cut off, the context of 2048 tokens is full: /undo"):
        session.handle("word " * (CONTEXT - 100))


# ---- pipes


def piped(monkeypatch, capsys, *tokens, stdin: str | None = "") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command that reads this from a pipe; None: stdin is closed."""
    monkeypatch.setattr(sys, "stdin", None if stdin is None else io.StringIO(stdin))
    capsys.readouterr()
    return cli.main(list(map(str, tokens))), *capsys.readouterr()


def test_a_line_that_is_wrong_does_not_end_a_piped_chat(monkeypatch, capsys, demo_artifact):
    code, out, err = piped(
        monkeypatch, capsys, "chat", demo_artifact, "-n", 4, stdin=f"/nonsense\n\n{QUESTION}\n/undo\n"
    )
    assert code == 1 and out.strip() and "error: unknown command /nonsense" in err and "(taken back:" in err
    assert "(cut off: max_tokens is 4)\n" in err and err.endswith("error: 1 of 3 messages and commands failed\n")


def test_an_answer_that_the_context_cuts_off_is_an_error(monkeypatch, capsys, demo_artifact):
    long = "word " * (CONTEXT - 60)
    code, out, err = piped(monkeypatch, capsys, "chat", demo_artifact, "--temperature", 30, "--seed", 1, "-p", long)
    assert code == 1 and out.strip()
    assert err == (
        "error: the answer was cut off, the context of 2048 tokens is full: use --on-full drop, or a larger --ctx\n"
    )
    code, out, err = piped(monkeypatch, capsys, "generate", demo_artifact, "--temperature", 30, "--seed", 1, "-p", long)
    assert code == 1 and out.strip() and "the text was cut off" in err
    code, out, err = piped(monkeypatch, capsys, "generate", demo_artifact, "-p", long * 2)
    assert code == 1 and out == "" and "shorten the prompt, or use a larger --ctx" in err


def test_prompts_come_from_files_and_pipes(monkeypatch, capsys, demo_artifact, tmp_path):
    file = tmp_path / "prompt"
    file.write_text("import os\n")
    expected = piped(monkeypatch, capsys, "generate", demo_artifact, "-n", 4, "-p", "import os")
    assert expected[0] == 0
    for tokens, stdin in (
        (("-p", "-"), "import os\n"),
        (("-f", file), ""),
        (("-f", "-"), "import os"),
        ((), "import os"),
    ):
        assert piped(monkeypatch, capsys, "generate", demo_artifact, "-n", 4, *tokens, stdin=stdin) == expected
    answer = piped(monkeypatch, capsys, "chat", demo_artifact, "-q", "-n", 4, "-p", QUESTION)
    assert answer[::2] == (0, "")
    file.write_text(QUESTION)
    assert piped(monkeypatch, capsys, "chat", demo_artifact, "-q", "-n", 4, "--file", file) == answer
    assert piped(monkeypatch, capsys, "chat", demo_artifact, "-q", "-n", 4, "-p", "-", stdin=QUESTION) == answer


@pytest.mark.parametrize(
    ("tokens", "stdin", "error"),
    [
        (("generate",), "", "--prompt is missing"),
        (("generate",), None, "--prompt is missing"),
        (("generate", "-p", "x", "-f", "y"), "", "--prompt or --file, not both"),
        (("chat", "-f", "/nowhere/prompt"), "", "/nowhere/prompt: no such file"),
    ],
)
def test_prompts_that_are_missing(monkeypatch, capsys, tokens, stdin, error):
    code, out, err = piped(monkeypatch, capsys, *tokens, stdin=stdin)
    assert code and out == "" and error in err and err.count("\n") == 1


def test_a_closed_stdin_is_an_empty_one(monkeypatch, capsys, demo_artifact):
    assert piped(monkeypatch, capsys, "chat", demo_artifact, stdin=None) == (0, "", "")


# ---- small parts


@pytest.mark.parametrize("finish", ["stop", "length", "context", "interrupted"])
def test_a_footer_fits_the_terminal(finish):
    stats = Stats(117655, 94199, 12.5, 12.6, 12345, 123.0, finish)
    parts = display.statistics(stats, 131072)
    for width in (20, 79, 120):
        line = display.footer(parts, width)
        assert line.startswith(parts[0]) and (len(line) <= width or line == parts[0])
    assert display.footer(parts, 1000) == " | ".join(parts) and "context 130000/131072" in parts


def test_a_command_in_the_background_leaves_the_terminal_alone():
    # The system stops a background process that changes its terminal, and the waiting parent would hear of that.
    code = """if True:
        import os
        from mlc_amd.tools.terminal import terminal
        if (child := os.fork()) == 0:
            os.setpgid(0, 0)
            with terminal.silent_keyboard():
                os._exit(0)
        print("stopped" if os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1]) else "ran", flush=True)
        """
    parent = Terminal([sys.executable, "-c", code], os.environ)
    assert parent.wait_for("ran|stopped") == "ran"
    parent.close()


def test_typing_during_progress_is_not_shown_and_not_lost(monkeypatch):
    master, slave = pty.openpty()
    echo = lambda: bool(termios.tcgetattr(slave)[3] & termios.ECHO)  # noqa: E731
    with open(slave, closefd=False) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        with terminal.silent_keyboard():
            assert not echo()
            os.write(master, b"typed\n")
            assert select.select([slave], [], [], 60)[0]  # the terminal has it
        assert echo() and keyboard.readline() == "typed\n"
        assert not select.select([master], [], [], 0.05)[0]
    os.close(slave)
    os.close(master)


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("hello", "hello"),
        ("one\\\ntwo", "one\ntwo"),
        ('"""\na\n\nb\n"""', "a\n\nb"),
        ("```\nx = 1\n```", "```\nx = 1\n```"),
    ],
)
def test_several_lines_make_one_message(typed, sent):
    partial = ""
    for line in typed.split("\n")[:-1]:
        partial += line
        assert not line_editor.complete(partial)
        partial += "\n"
    assert line_editor.complete(typed) and line_editor.unwrap(typed) == sent
