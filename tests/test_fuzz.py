"""A small share of what programs fuzz for hours (tools/dev/fuzz_*.py), the same cases in every run."""

import subprocess
import sys

import pytest


def fuzz(name: str, *arguments: str) -> str:
    """The report of a program that found nothing. In a process of its own: it forks, and this one may have threads."""
    command = [sys.executable, "-m", f"mlc_amd.tools.dev.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_artifacts(compiled):
    report = fuzz("fuzz_artifacts", "--artifact", str(compiled("tiny:q4_0", 64)), "--count", "80", "--seed", "7")
    assert "seed 7, next case 80" in report


def test_kits_and_measurements():
    pytest.importorskip("xgboost")
    assert "next case 60" in fuzz("fuzz_tuning", "--count", "60", "--seed", "7")
