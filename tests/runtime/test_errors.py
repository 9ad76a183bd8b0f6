"""What a user reads when something goes wrong: one line, also where no exception can be raised."""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mlc_amd.runtime import errors
from mlc_amd.tools.terminal import display, terminal

ENDED = rb"error: a file that is in use was cut off[^\n]+\n"
READS_A_FILE_THAT_SHRINKS = """
import mmap, os, sys
from mlc_amd.tools import bus_error
bus_error.install()
file = open(sys.argv[1], "r+b")
view = mmap.mmap(file.fileno(), 1 << 20)
os.truncate(sys.argv[1], 0)
view[1 << 19]
"""


def test_weights_that_are_cut_off_while_kernels_read_them(demo_artifact, tmp_path):
    copy = shutil.copytree(demo_artifact, tmp_path / "copy")
    command = [Path(sys.executable).with_name("mlc-amd"), "chat", copy, "-n", "4", "--quiet", "--threads", "2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONFAULTHANDLER": ""}
    process = subprocess.Popen(command, env=environment, **pipes)
    process.stdin.write(b"/stats\n")
    process.stdin.flush()
    assert b"no answer yet" in process.stderr.readline()
    os.truncate(copy / "weights.safetensors", 4096)
    out, err = process.communicate(b"hello\n", timeout=120)
    assert process.returncode == 1 and out == b"" and re.fullmatch(ENDED, err)


def test_a_file_that_is_cut_off_while_python_reads_it(tmp_path):
    path = tmp_path / "mapped"
    path.write_bytes(bytes(1 << 20))
    environment = os.environ | {"PYTHONFAULTHANDLER": ""}
    command = [sys.executable, "-c", READS_A_FILE_THAT_SHRINKS, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 1 and re.fullmatch(ENDED, done.stderr)


def test_a_process_of_others_writes_no_control_characters(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    written = sys.stdout, sys.stderr
    for _ in range(2):  # replicas may share a process
        terminal.clean_process()
    print("a\x1b[2J\n\x9b31mb")
    display.message("\x1b]0;title\x07")
    assert [stream.getvalue() for stream in written] == ["a[2J\n31mb\n", "]0;title\n"]


def test_what_messages_quote_is_one_line_of_printable_text():
    for text, line in (
        ("a\n\tb\u2028c\x00d", "a b c\ufffdd"),
        ("\x1b[31m\u202eabc\udcff", "\ufffd[31m\ufffdabc\ufffd"),
        ("نمی\u200cخواهم 👩\u200d🔬", "نمی\u200cخواهم 👩\u200d🔬"),
    ):
        assert errors.one_line(text) == line == str(errors.UserError(text))
    assert errors.one_line("x" * 300, 240) == "x" * 237 + "..." and len(errors.shorten("\x1b" * 90)) == 60
