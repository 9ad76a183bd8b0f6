"""A share of what the fuzzing programs of tests/dev/fuzz try, the same in each run: GGUF files, chat templates, texts,
artifacts, files of tuning, pictures, image encoders and whole models that are damaged end in errors of one line, and
no text becomes a control token."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from samples import sample

REPO = Path(__file__).resolve().parents[2]
# Program and number of cases: some seconds each
SHARES = [
    ("gguf", 100), ("templates", 8), ("texts", 4), ("artifacts --model latent", 10), ("tuning", 40), ("images", 150),
    ("mmproj --open", 150), ("pages", 300), ("gguf", 3000), ("compile", 40), ("artifacts", 1000), ("tuning", 500),
    ("mmproj", 300),
]  # fmt: skip


@pytest.mark.parametrize(("program", "count"), sample(SHARES, SHARES[:8]))
def test_fuzzing(program, count, tmp_path):
    command = [sys.executable, "-m", *f"tests.dev.fuzz.{program}".split(), "--seed", "7", "--count", str(count)]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"next case {count}\n")
