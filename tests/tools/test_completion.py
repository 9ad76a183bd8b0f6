"""Shell completion, in the shells themselves, and `--version`."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import mlc_amd
from mlc_amd.tools import cli, version
from mlc_amd.tools.commands import completion

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_mlc_amd
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """A folder with the script of each shell, named after it."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        with pytest.MonkeyPatch.context() as patch, open(folder / shell, "w") as file:
            patch.setattr("sys.stdout", file)
            completion.run(shell)
    return folder


def run(*command: str | Path) -> list[str]:
    """The words that a shell's program prints, sorted; nothing on stderr."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
    return sorted(done.stdout.split())


CASES = [
    (("t",), ["tokenize", "tune", "tune-server"]),
    (("chat", "--th"), ["--thinking", "--threads"]),
    (("chat", "model.gguf", "--on-f"), ["--on-full"]),
    (("chat", "--thinking", "o"), ["off", "on"]),
    (("completion", ""), ["bash", "fish", "zsh"]),
    (("bench", "-o", "j"), ["json", "jsonl"]),
    (("tune", "--h"), ["--help"]),
]


@pytest.mark.parametrize(("words", "offered"), CASES)
def test_bash(scripts, words, offered):
    assert run("bash", "-c", COMPLETE, "bash", scripts / "bash", "mlc-amd", *words) == offered


def test_bash_divides_words_at_equals_signs(scripts):
    for words, offered in ((("=",), ["error", "drop"]), (("=", "d"), ["drop"])):
        found = run("bash", "-c", COMPLETE, "bash", scripts / "bash", "mlc-amd", "chat", "--on-full", *words)
        assert found == sorted(offered)


@pytest.mark.parametrize("words", [("chat", ""), ("chat", "--prompt", ""), ("nothing", "-")])
def test_bash_leaves_files_to_itself(scripts, words):
    assert run("bash", "-c", COMPLETE, "bash", scripts / "bash", "mlc-amd", *words) == []


def fish(scripts: Path, line: str) -> list[str]:
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {scripts / 'fish'}; complete -C '{line}'"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return sorted(row.partition("\t")[0] for row in done.stdout.splitlines())


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish here")
@pytest.mark.parametrize(("words", "offered"), CASES)
def test_fish(scripts, words, offered):
    assert fish(scripts, " ".join(("mlc-amd", *words))) == offered


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish here")
def test_fish_tells_letters_from_words_after_one_dash(scripts):
    assert {"-n", "-ngl", "--max-tokens"} <= set(fish(scripts, "mlc-amd chat -"))


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
def test_zsh_takes_the_script(scripts):
    code = f"autoload -U compinit; compinit -D -u; source {scripts / 'zsh'}; print $_comps[mlc-amd]"
    assert "_mlc_amd" in " ".join(run("zsh", "-f", "-c", code))


def test_every_command_is_completed(scripts):
    for shell in ("bash", "fish"):
        text = (scripts / shell).read_text()
        assert all(verb in text for verb in cli.verbs())


def test_an_unknown_shell(capsys):
    assert cli.main(["completion", "tcsh"]) != 0
    assert "bash, zsh or fish" in capsys.readouterr().err


# ---- --version


def git(root: Path, *arguments: str) -> str:
    names = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    command = ["git", "-C", str(root), *names, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


def test_the_version_names_what_kernels_depend_on(capsys, monkeypatch):
    monkeypatch.setenv("VK_DRIVER_FILES", "/nowhere.json")  # a machine without a Vulkan device
    assert cli.main(["--version"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["mlc-amd", mlc_amd.__version__]
    assert second == f"TVM {metadata.version('apache-tvm')}"


def test_the_commit_is_that_of_the_work_tree(tmp_path, monkeypatch):
    package = tmp_path / "mlc_amd" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    monkeypatch.setattr(mlc_amd, "__file__", str(package))
    assert version.commit() is None  # an installed copy
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "x")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert version.commit() == head
    package.write_text("changed")
    assert version.commit() == f"{head}-dirty"


def test_the_driver_of_a_vulkan_device_is_named():
    from mlc_amd.tools.checks import machine

    devices = machine.vulkan()["devices"]
    if not devices:
        pytest.skip("no Vulkan device here")
    assert all(any(device["driver"] in line for line in version.text().splitlines()) for device in devices)
