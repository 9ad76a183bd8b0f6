"""Names of files, models and hosts that are not UTF-8, or no names at all: every command that takes one says so in a
line, or takes it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mlc_amd.tools import cli


@pytest.fixture
def mlc_amd(capsys, monkeypatch, tmp_path):
    """Runs a command line in this process, in an empty folder and with caches of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*tokens: str | Path) -> subprocess.CompletedProcess:
        capsys.readouterr()
        line = [*map(str, tokens)]
        return subprocess.CompletedProcess(line, cli.main(line), *capsys.readouterr())

    return run


ODD = os.fsdecode(b"odd\xff")  # a name that is not UTF-8; below MODEL is a compiled model, and GGUF a file


@pytest.mark.parametrize(
    "line",
    [
        f"chat {ODD} -p x", f"generate {ODD} -p x", f"generate MODEL -p {ODD}", f"generate MODEL --file {ODD}/x",
        f"generate MODEL -p x --draft {ODD}", f"generate MODEL -p x --device {ODD}", f"chat MODEL -p x --system {ODD}",
        f"generate MODEL -p x --json-schema-file {ODD}", f"generate MODEL -p x --grammar-file {ODD}",
        f"bench {ODD}", f"bench --synthetic {ODD}", f"perplexity {ODD} --text {ODD}", f"perplexity MODEL --ids {ODD}",
        f"perplexity MODEL --text {ODD}/x", f"tokenize {ODD} x", f"tokenize MODEL {ODD}", f"inspect {ODD}",
        f"inspect MODEL --asm {ODD}", f"compile {ODD}", f"compile GGUF -o {ODD}", f"compile GGUF --arch {ODD}",
        f"selftest {ODD}", f"selftest MODEL -o {ODD}/x", f"tune {ODD} --list", f"tune --import-kit {ODD}",
        f"tune --plans {ODD}", f"deploy {ODD} --to linux", f"pull {ODD}", f"cache rm {ODD}", f"cache {ODD}",
        f"serve MODEL --api-key-file {ODD}/x", f"serve MODEL --host {ODD}", "serve MODEL --host a..b",
        f"tune-server --tracker {ODD} --key x",
        f"completion {ODD}", f"{ODD}", f"chat --{ODD}",
    ],
)  # fmt: skip
def test_names_that_are_not_utf8_are_a_mistake(mlc_amd, demo_artifact, demo_gguf, tmp_path, line):
    (tmp_path / ODD).write_bytes(b"no model")
    places = {"MODEL": demo_artifact, "GGUF": demo_gguf}
    done = mlc_amd(*(places.get(word, word) for word in line.split()))
    assert done.returncode in (1, 2) and done.stdout == "" and "bug" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr


def test_models_whose_names_are_not_utf8_are_models(mlc_amd, demo_gguf, tmp_path):
    shutil.copy(demo_gguf, tmp_path / f"{ODD}.gguf")
    assert mlc_amd("tokenize", f"{ODD}.gguf", "hi", "--ids-only").stdout == "7083\n"
    assert "Q4_K_M" in mlc_amd("inspect", f"{ODD}.gguf").stdout
