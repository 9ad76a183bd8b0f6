"""What happens while a text is generated: Ctrl-C, the line about a long prompt, and what a terminal is sent."""

import io
import os
import re
import signal
import sys
import threading
import time

import pytest

from mlc_amd.tools import cli
from mlc_amd.tools.terminal import monitor, terminal

IDS = list(range(1000, 2100))  # three chunks


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch) -> Screen:
    """A terminal for stderr. (Fixtures cannot have it: pytest sets the streams once more before a test.)"""
    monkeypatch.setattr(sys, "stderr", Screen())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return sys.stderr


@pytest.fixture(autouse=True)
def heed(monkeypatch):
    """Ctrl-C is ignored where a shell runs the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_ctrl_c_is_acknowledged_at_once_and_stops_a_prompt_between_two_chunks(engine, capsys):
    with monitor.Monitor(engine) as attended:

        def progress(done: int, total: int) -> None:
            attended.progress(done, total)
            if done == 512:
                os.kill(os.getpid(), signal.SIGINT)
                wait_until(lambda: attended.stopped)  # while the engine is still busy

        assert list(engine.generate(IDS, progress=progress)) == []
    assert capsys.readouterr().err == "(stopping)\n"
    made = [piece.id for piece in engine.generate(IDS, max_tokens=3)]
    engine.reset()
    assert [piece.id for piece in engine.generate(IDS, max_tokens=3)] == made


def test_ctrl_c_before_the_prompt_counts(engine):
    with monitor.Monitor(engine) as attended:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: attended.stopped)
        assert list(engine.generate(IDS, progress=attended.progress)) == []
        with pytest.raises(KeyboardInterrupt):  # the second one does not wait
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda: False)
    with pytest.raises(KeyboardInterrupt):  # as before
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: False)


def test_ctrl_c_ends_generate_with_what_was_written(demo_artifact, monkeypatch, capsys):
    class Reader(io.StringIO):
        """Presses Ctrl-C when it has read the first piece."""

        def write(self, text: str) -> int:
            if not self.getvalue():
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Reader())
    arguments = ["-p", "import", "--temperature", "30", "--seed", "1", "-n", "1500"]
    assert cli.main(["generate", str(demo_artifact), *arguments]) == 130
    assert sys.stdout.getvalue()
    assert capsys.readouterr().err == "(stopping)\n"


def test_a_long_prompt_shows_how_far_it_is(engine, monkeypatch):
    screen = watched(monkeypatch)
    monkeypatch.setattr(monitor, "_PATIENCE", 0.0)
    with monitor.Monitor(engine) as attended:
        for _ in engine.generate(IDS, max_tokens=2, progress=attended.progress):
            attended.begin()
    shown = screen.getvalue()
    assert re.search(r"reading the prompt: 512 of 1100 tokens, \d+ s left", shown)
    assert "1100 of 1100" in shown and shown.endswith(" \r")  # the line is gone


def test_stopping_is_said_where_it_can_be_read(engine, monkeypatch):
    screen = watched(monkeypatch)
    for writes, expected in ((False, "stopping after this step"), (True, " (stopping)")):
        screen.truncate(0)
        with monitor.Monitor(engine) as attended:
            (attended.begin if writes else lambda: attended.wait("thinking ..."))()
            os.kill(os.getpid(), signal.SIGINT)
            wait_until(lambda at=expected: at in screen.getvalue())


def test_other_threads_have_no_signals(engine):
    made = []

    def other() -> None:
        with monitor.Monitor(engine) as attended:
            made.extend(engine.generate(IDS[:5], max_tokens=2, progress=attended.progress))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(made) == 2


@pytest.mark.parametrize(
    ("variables", "dimmed", "lines"),
    [({}, True, True), ({"NO_COLOR": "1"}, False, True), ({"TERM": "dumb"}, False, False)],
)
def test_escapes_only_where_they_are_wanted(monkeypatch, variables, dimmed, lines):
    screen = watched(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status = terminal.Status()
    status.show("a line")
    status.show("x" * 1000)
    status.clear()
    with terminal.clean_output():
        terminal.aside("thought\x1b[31m")
        sys.stderr.write("plain\x1b[32m")
    shown = screen.getvalue()
    assert ("a line" in shown) == lines and ("\x1b" in shown) == dimmed and "\x1b[3" not in shown
    assert ("\x1b[2mthought[31m\x1b[0m" in shown) == dimmed
    assert "x" * terminal.width() not in shown
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    terminal.aside("text")
    assert sys.stderr.getvalue() == "text"
