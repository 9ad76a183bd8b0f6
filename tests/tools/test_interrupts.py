"""Ctrl-C at any moment: a command ends quietly with 130 and leaves nothing, also what a killed one left is removed."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samples import sample

from mlc_amd.runtime.folders import SUFFIX

REPO = Path(__file__).parents[2]
COMPILING = "compiling"  # in the line that a command writes when it begins to compile


class Command:
    """A process that runs a command line in folders of its own, which are empty at first."""

    def __init__(self, place: Path, *tokens: object) -> None:
        self.folders = {name: place / name for name in ("cache", "state", "tmp", "work")}
        for folder in self.folders.values():
            folder.mkdir()
        named = {"XDG_CACHE_HOME": "cache", "XDG_STATE_HOME": "state", "TMPDIR": "tmp"}
        environment = os.environ | {name: str(self.folders[of]) for name, of in named.items()}
        # who starts tests in a shell's background has Ctrl-C ignored, and programs inherit that
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlc_amd.tools.start", *map(str, tokens)],
            env=environment | {"PYTHONPATH": str(REPO)}, cwd=self.folders["work"], preexec_fn=heed, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def begin(self) -> None:
        """Waits until signals are handled, which is before almost everything is imported."""
        status = Path(f"/proc/{self.process.pid}/status")
        while not self._caught(status.read_text()) >> (signal.SIGTERM - 1) & 1:
            time.sleep(0.001)

    @staticmethod
    def _caught(status: str) -> int:
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """(exit code, what it wrote to stderr and this class did not read)."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors

    @property
    def left(self) -> list[str]:
        """What is in its folders, but for what the cache has for good: folders, pipelines of drivers, whole weights."""
        found = [path for folder in self.folders.values() for path in folder.rglob("*")]
        kept = ("cache/mlc-amd/pipelines-*.bin", "cache/mlc-amd/weights/*/*")
        found = [path for path in found if SUFFIX in str(path) or not any(map(path.match, kept))]
        return [str(path) for path in found if path.is_file() or SUFFIX in path.name or path.parent.name == "tmp"]


@pytest.mark.parametrize("seconds", [0, 0.05, 0.1, 0.2, 0.4])
def test_at_the_start(tmp_path, seconds):
    command = Command(tmp_path, "chat", "--prompt", "Hi")
    command.begin()
    time.sleep(seconds)
    assert command.end() == (130, "") and command.left == []


LINES = [
    (("chat", "--prompt", "Hi", "--target", "cpu"), 2),
    (("doctor",), 0.3),
    (("compile", "--synthetic", "tiny:q4_0", "--target", "rocm", "--arch", "gfx1100", "-o", "out"), 3),
    (("chat", "--prompt", "Hi", "--target", "cpu"), 0.5),
    (("bench", "--target", "cpu"), 1),
    (("doctor",), 1.5),
    (("compile", "--synthetic", "tiny:q4_0", "--target", "vulkan", "--arch", "rdna3", "-o", "out"), 1),
    (("compile", "--synthetic", "tiny:q4_0", "--target", "rocm", "--arch", "gfx1100", "-o", "out"), 6),
]


@pytest.mark.parametrize(("line", "seconds"), sample(LINES, LINES[:3]))
def test_during_a_compilation(tmp_path, line, seconds):
    command = Command(tmp_path, *line)
    assert COMPILING in command.process.stderr.readline()
    time.sleep(seconds)
    code, errors = command.end()
    assert (code, errors) == (130, "") and command.left == []


@pytest.mark.parametrize("seconds", [0.5, 2])
def test_during_work_of_a_driver(tmp_path, lavapipe_model, seconds):
    command = Command(tmp_path, "selftest", lavapipe_model)
    command.begin()
    time.sleep(seconds)
    code, errors = command.end()
    assert code == 130 and "error:" not in errors and "Traceback" not in errors and command.left == []


def test_other_signals_leave_nothing(tmp_path):
    for number in (signal.SIGTERM, signal.SIGHUP):
        (tmp_path / str(number)).mkdir()
        command = Command(tmp_path / str(number), "compile", REPO / "dist/demo/llama-q4_k_m.gguf", "--target", "cpu")
        assert COMPILING in command.process.stderr.readline()
        time.sleep(1)
        assert command.end(number) == (128 + number, "") and command.left == []


def test_what_a_killed_command_left_is_removed_by_the_next(tmp_path):
    line = ("compile", "--synthetic", "tiny:f16", "--target", "vulkan", "--arch", "generic", "--ctx", "64")
    line += ("--weights", "none", "-o", "out")
    command = Command(tmp_path, *line)
    command.process.stderr.readline()
    deadline = time.monotonic() + 60
    while not command.left and time.monotonic() < deadline:
        time.sleep(0.01)
    command.end(signal.SIGKILL)
    assert any(SUFFIX in name for name in command.left)
    place = command.folders["work"]
    done = subprocess.run(
        [sys.executable, "-m", "mlc_amd.tools.start", *line], cwd=place, check=False, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": str(command.folders["tmp"])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name for path in place.iterdir()] == ["out"] and list(command.folders["tmp"].iterdir()) == []


def test_tvm_passes_it_on():
    """To users of the package, for whom nothing handles the signal."""
    code = (
        "import tvm, mlc_amd.compiler.pipeline\n"
        "from tvm import tirx\n"
        "@tirx.transform.prim_func_pass(opt_level=0)\n"
        "def interrupted(func, module, context):\n"
        "    raise KeyboardInterrupt\n"
        "func = tirx.PrimFunc([], tirx.Evaluate(0))\n"
        "try:\n"
        "    interrupted(tvm.IRModule({'main': func}))\n"
        "except KeyboardInterrupt:\n"
        "    print('passed on')"
    )
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "passed on\n", done.stderr
