"""The wheel: it holds every file of the package and nothing else, and runs where the repository is not."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("compiler", "schedules", "runtime", "tools", "dist")
DATA = {
    "compiler/codegen/relay.ll",
    "runtime/devices/cpu.c",
    "dist/README.md",
    "dist/demo/llama-q4_k_m.gguf",
    "dist/bundle/run.sh",
    "tools/server/page/index.html",
}
PAGE_SOURCE = "tools/server/page_source/"  # the wheel has what is built of it


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, timeout=400, **options)


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """The files of a clone, with those that are not committed yet."""
    try:
        listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPO).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no git repository")
    return [name for name in listed.split("\0") if name and (REPO / name).exists()]


@pytest.fixture(scope="module")
def wheel(once, sources) -> Path:
    """The wheel of a copy of the sources: a build folder of an older state must not matter."""

    def build(out: Path) -> None:
        clone = out / "clone"
        for name in sources:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, clone / name, follow_symlinks=False)
        options = ("--quiet", "--disable-pip-version-check", "--no-deps")
        run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, clone)

    (path,) = once("wheel", build).glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(once, wheel) -> Path:
    """The Python of a new virtual environment with the wheel; what it depends on comes from the current one."""

    def install(out: Path) -> None:
        venv.create(out, with_pip=False)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(out), "platbase": str(out)}))
        # .pth files in a folder that a .pth file names are not read, so an editable install there does not count
        (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile")
        run(sys.executable, "-m", "pip", "--python", out / "bin" / "python", "install", *options, wheel)

    return once("environment of the wheel", install) / "bin" / "python"


def test_files(wheel, sources):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    held = [name for name in names if ".dist-info/" not in name]
    package = {name for name in sources if name.startswith("mlc_amd/") and not (REPO / name).is_symlink()}
    installed = {name for name in sources if name.split("/")[0] in FOLDERS and not name.startswith(PAGE_SOURCE)}
    assert sorted(held) == sorted(package | {f"mlc_amd/{name}" for name in installed})
    assert {f"mlc_amd/{name}" for name in DATA} <= set(held)
    assert any(name.endswith("/LICENSE") for name in names)


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """That of a new user."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}


def test_it_compiles_a_model(python, environment, tmp_path):
    code = "import sys, mlc_amd; print(mlc_amd.__version__, mlc_amd.__file__, *{'tvm', 'numpy'} & set(sys.modules))"
    version, file = run(python, "-c", code, env=environment, cwd=tmp_path).stdout.split()
    assert version == run(python.with_name("mlc-amd"), "--version", env=environment, cwd=tmp_path).stdout.split()[1]
    assert Path(file).is_relative_to(python.parent.parent)
    command = python.with_name("mlc-amd")
    run(command, "compile", "--synthetic", "tiny:f16", "--target", "cpu", "--ctx", "64", "-o", "model",
        env=environment, cwd=tmp_path)  # fmt: skip
    assert "tiny" in run(command, "inspect", "model", env=environment, cwd=tmp_path).stdout


@pytest.mark.full
def test_the_first_chat(python, first_chat, environment, tmp_path):
    """The bundled model, as the repository's program compiles it."""
    expected, _ = first_chat
    command = (python.with_name("mlc-amd"), *expected.args[1:])
    done = run(*command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.stdout == expected.stdout != ""
    assert "compiling llama-q4_k_m.gguf" in done.stderr
