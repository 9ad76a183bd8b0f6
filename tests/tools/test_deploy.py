"""Bundles: what is in them, that they run where nothing is installed, and what is refused."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from samples import sample

from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import cache_directory
from mlc_amd.tools.bundles import archive, wheels
from mlc_amd.tools.bundles.archive import Entry
from mlc_amd.tools.commands import deploy
from tests.dev.fuzz import resealing

REPO = Path(__file__).resolve().parents[2]
SYSTEM = "/usr/bin:/bin"
VERBS = {"chat", "generate", "serve", "bench", "perplexity", "tokenize", "embed", "rerank", "selftest", "doctor"}


def tag(python: str) -> str:
    """cpython-311 and so on, "" where there is no such Python."""
    code = "import sys; print(sys.implementation.cache_tag)"
    try:
        done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def pythons() -> dict[str, str]:
    """The Pythons here that bundles can use, other than virtual environments: tag -> folder."""
    places = [Path("/usr/bin"), *Path("~/.pyenv/versions").expanduser().glob("*/bin"), Path(sys.base_prefix) / "bin"]
    known = {f"cpython-{python.replace('.', '')}" for python in deploy.PYTHONS}
    found = {tag(str(place / "python3")): str(place) for place in places}
    return {name: place for name, place in sorted(found.items()) if name in known}


PYTHONS = pythons()


@pytest.fixture(scope="module")
def model(lavapipe_model, tmp_path_factory) -> Path:
    """A model for the Vulkan driver that runs on the CPU, in a folder with a space in its name."""
    return shutil.copytree(lavapipe_model, tmp_path_factory.mktemp("artifact") / "tiny model")


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory) -> Path:
    """The model's bundle in a folder, for the Pythons that are here and one more. Skips where wheels cannot be had."""
    if sys.platform != "linux":
        pytest.skip("bundles are for Linux")
    pythons = sorted({f"3.{name.removeprefix('cpython-3')}" for name in PYTHONS} | {"3.13"})
    try:
        wheels.fetch(deploy.PACKAGES, pythons, cache_directory() / "wheels")
    except UserError as error:
        pytest.skip(str(error))
    out = tmp_path_factory.mktemp("deployed") / "my models"
    deploy.run(str(model), to="linux", output=str(out), python=",".join(pythons))
    for path in (*out.rglob("*"), out):
        path.chmod(0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444)
    yield out
    for path in (out, *out.rglob("*")):
        path.chmod(0o755)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A home folder, empty at first; what it gathers makes later starts faster."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def start(bundle, tmp_path, home):
    """Runs the bundle's run.sh from another folder, with no environment but a home and what the driver needs."""

    def run(*tokens, path=SYSTEM, program=None, **more) -> subprocess.CompletedProcess:
        environment = {"PATH": path, "HOME": str(home), **more}
        drivers = {
            name: os.environ[name]
            for name in (
                "VK_DRIVER_FILES",
                "VK_ICD_FILENAMES",
                "XDG_RUNTIME_DIR",
                "MESA_SHADER_CACHE_DIR",
                "GALLIVM_PERF",
            )
            if name in os.environ
        }
        command = [str(program or bundle / "run.sh"), *tokens]
        return subprocess.run(
            command,
            env=drivers | environment,
            cwd=tmp_path,
            input="",
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


needs_python = pytest.mark.skipif(not PYTHONS, reason="no Python here but this virtual environment")


# ---- what is in a bundle


def test_bundle_has_what_it_imports_and_no_more(bundle):
    lib = bundle / "lib"
    modules = {path.relative_to(lib).with_suffix("").as_posix().replace("/", ".") for path in lib.rglob("*.py")}
    modules |= {module.removesuffix(".__init__") for module in modules}
    for path in (lib / "mlc_amd").rglob("*.py"):
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom | ast.Import)]
        for node in top:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mlc_amd"):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                files = {name: REPO / "mlc_amd" / f"{name[8:].replace('.', '/')}.py" for name in names}
                needed = {name for name, file in files.items() if file.exists()} or {node.module}
                assert needed <= modules, f"{path}: {ast.unparse(node)}"
    assert not any(path.name in ("tvm", "tvm_ffi", "pip", "__pycache__") for path in bundle.rglob("*"))
    assert not (lib / "mlc_amd" / "compiler").exists()
    assert not list(bundle.rglob("*.pyi")) and not list(bundle.rglob("tests"))
    assert list(lib.glob("numpy-*.dist-info/METADATA")) and list(lib.glob("numpy-*.dist-info/licenses/*"))
    assert len(list(bundle.glob("lib/numpy.libs/*openblas*"))) == 1
    pythons = json.loads((bundle / "bundle.json").read_text())["pythons"]
    native = [path.name.split(".")[1][:11] for path in bundle.glob("lib/numpy/_core/_multiarray_umath.*.so")]
    assert sorted(native) == [f"cpython-{python.replace('.', '')}" for python in pythons]


def test_bundled_model_is_the_artifact(bundle, model):
    ours, theirs = Artifact.open(bundle / "model", verify=True), Artifact.open(model)
    for key in theirs.manifest.keys() - {"files"}:
        assert ours.manifest[key] == theirs.manifest[key]
    kernels = set(theirs.manifest["libraries"].values())
    assert set(ours.manifest["files"]) == kernels | {
        "weights.safetensors",
        "tables.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in (bundle / "model").iterdir()} == {*ours.manifest["files"], "manifest.json"}


def test_without_weights(model):
    opened = Artifact.open(model)
    files = deploy.model_files(opened, weightless=True)
    manifest = json.loads(files["manifest.json"])
    assert manifest["weights"] == "random" and opened.manifest["weights"] == "file"
    assert len(files["weights.safetensors"]) < opened.manifest["files"]["weights.safetensors"]["bytes"] / 10
    assert manifest["files"]["weights.safetensors"]["bytes"] == len(files["weights.safetensors"])


@pytest.fixture(scope="module")
def weightless(model, tmp_path_factory) -> Path:
    """The artifact as a bundle without weights has it."""
    folder = tmp_path_factory.mktemp("weightless") / "model"
    entries = [
        Entry(name, content) for name, content in deploy.model_files(Artifact.open(model), weightless=True).items()
    ]
    archive.write_folder(folder, entries, lambda nbytes: None)
    return folder


def test_a_weightless_artifact_opens_and_has_all_tensors(weightless, model):
    ours, theirs = Artifact.open(weightless, verify=True), Artifact.open(model)
    assert set(ours.weights.places) == set(theirs.weights.places)
    for name in theirs.weights.places.keys() - theirs.manifest["tensors"].keys():
        assert np.array_equal(ours.weights[name], theirs.weights[name])


# ---- a bundle at work


@needs_python
@pytest.mark.parametrize("python", sample(PYTHONS, [*PYTHONS][:: max(len(PYTHONS) - 1, 1)]))  # the oldest, the newest
def test_runs_with_every_python(start, bundle, python):
    path = f"{PYTHONS[python]}:{SYSTEM}"
    tokens = start("tokenize", str(bundle / "model"), "hello", path=path)
    assert (tokens.returncode, tokens.stderr) == (0, f"{len(tokens.stdout.splitlines())} tokens\n")
    doctor = json.loads(start("doctor", "--json", path=path).stdout)
    assert f"cpython-{doctor['python'].replace('.', '')}".startswith(python)
    assert doctor["packages"] and all(package["ok"] for package in doctor["packages"]) and not doctor["tvm"]


@needs_python
def test_verbs(start):
    version = start("--version")
    assert (version.returncode, version.stdout.split()[0], version.stderr) == (0, "mlc-amd", "")
    listed = {line.split()[0] for line in start("--help").stdout.splitlines() if line.startswith("  ")}
    assert listed == VERBS
    for verb in VERBS:
        done = start(verb, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"usage: run.sh {verb}"), done.stderr
    assert "unknown flag --promt: did you mean --prompt?" in start("--promt", "hello").stderr  # of chat
    assert "unknown command 'compile'" in start("compile", "x.gguf").stderr


@needs_python
def test_what_a_bundle_lacks_is_for_an_installation(start):
    done = start("serve", "--ray", "auto")
    assert done.returncode == 1 and "`run.sh serve --ray` needs the package ray" in done.stderr
    assert "(not into this bundle: where mlc-amd itself is installed)" in done.stderr and done.stderr.count("\n") == 1


@needs_python
def test_cannot_compile(start, tmp_path):
    (tmp_path / "x.gguf").touch()
    for tokens in (("chat", "x.gguf"), ("tokenize", "x.gguf", "hello"), ("bench", "--synthetic", "tiny:q4_0")):
        done = start(*tokens)
        assert done.returncode == 1 and "a bundle has no compiler" in done.stderr and done.stderr.count("\n") == 1


@needs_python
def test_an_artifact_for_the_cpu_is_refused(start, compiled):
    done = start("chat", str(compiled("tiny:q4_0", 64)), "--prompt", "hello")
    assert done.returncode == 1 and done.stderr.startswith("error: this model was compiled for target 'cpu', which")


@needs_python
def test_takes_nothing_from_its_surroundings(start, bundle, tmp_path):
    """Neither the user's modules nor those of the current folder nor PYTHON variables; found through a link; no home at
    all."""
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    (tmp_path / "link").symlink_to(bundle / "run.sh")
    hostile = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "PYTHONSTARTUP": "/nowhere"}
    done = start("bench", "--help", program=tmp_path / "link", HOME="", **hostile)
    assert done.returncode == 0, done.stderr
    (tmp_path / "home").mkdir()
    start("--version", HOME=str(tmp_path / "home"))
    assert [path.name for path in (tmp_path / "home").iterdir()] == [".cache"]
    assert not list(bundle.rglob("__pycache__"))


def test_says_what_python_it_needs(start, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for program in ("dirname", "readlink", "uname"):
        (tools / program).symlink_to(shutil.which(program))
    old = tools / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = start("doctor", path=str(tools))
    assert (
        done.returncode == 1
        and done.stderr.startswith("error: no Python that this bundle can use")
        and "3.13" in done.stderr
    )


@pytest.fixture(scope="module")
def vulkan(model):
    """Skips where no Vulkan driver can run the model."""
    from mlc_amd.runtime.devices.opening import open_device

    try:
        open_device(Artifact.open(model)).close()
    except UserError as error:
        pytest.skip(str(error))


@needs_python
def test_chats(start, vulkan):
    answer = start("chat", "--prompt", "hello", "--max-tokens", "8")
    assert answer.returncode == 0 and answer.stdout.strip(), answer.stderr


@needs_python
def test_selftest_starts(start):
    """With all that it imports; test_selftest.py tests what it does."""
    done = start("selftest", "--runs", "-1")
    assert done.returncode == 2 and done.stderr.startswith("error: --runs"), done.stderr


@pytest.mark.full
@needs_python
def test_tests_itself(start, vulkan, tmp_path):
    done = start("selftest", "--runs", "0", "-o", "found.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"] and done.stdout.splitlines()[-1].split() == ["all", "passed"]
    assert found["logits"]["steps"] and not any(kernel["problem"] for kernel in found["kernels"])


def test_measures_without_weights(start, vulkan, weightless):
    measured = start("bench", str(weightless), "-p", "16", "-n", "4", "-r", "1", "--output", "json")
    assert [test["test"] for test in json.loads(measured.stdout)] == ["pp16", "tg4"], measured.stderr


# ---- Steam


def exec_line(text: str) -> list[str]:
    """The arguments of a desktop entry's Exec, by the Desktop Entry Specification: string escapes, then quotes, then
    field codes."""
    value = next(line.removeprefix("Exec=") for line in text.splitlines() if line.startswith("Exec="))
    parts = re.findall(r'"((?:\\.|[^"\\])*)"|(\S+)', value.replace("\\\\", "\\"))
    return [re.sub(r"\\(.)", r"\1", quoted or plain).replace("%%", "%") for quoted, plain in parts]


@pytest.mark.parametrize("name", ["deck", "my model", """50% "off" $HOME `x` \\ a|b & 'c'"""])
def test_steam_entry_leads_to_the_bundle(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    for template in ("add-to-steam.sh", "mlc-amd.desktop"):
        shutil.copy(REPO / "dist" / "bundle" / template, folder)
    (folder / "run.sh").write_text('#!/bin/sh\necho answered "$@"\n')
    (folder / "run.sh").chmod(0o755)
    environment = {"PATH": SYSTEM, "HOME": str(tmp_path / "home")}
    done = subprocess.run([folder / "add-to-steam.sh"], env=environment, capture_output=True, text=True, check=True)
    assert "Add a Non-Steam Game" in done.stdout
    (entry,) = (tmp_path / "home" / ".local" / "share" / "applications").iterdir()
    command = exec_line(entry.read_text())
    assert command[-2:] == [str(folder / "add-to-steam.sh"), "chat"]
    started = subprocess.run(
        command[command.index("-e") + 1 :], env=environment, capture_output=True, text=True, check=True
    )
    assert started.stdout == "answered\n"


# ---- what is refused


def manifest_of(kind: str, *archs: str, **more) -> Artifact:
    return Artifact(Path("m"), {"target": {"kind": kind}, "libraries": dict.fromkeys(archs, "kernels"), **more})


@pytest.mark.parametrize(
    ("artifact", "to", "message"),
    [
        (manifest_of("cpu"), "steamdeck", "cpu, which does not use its GPU"),
        (manifest_of("rocm", "gfx1033"), "steamdeck", "rocm, which needs ROCm.*--arch steamdeck"),
        (manifest_of("vulkan", "rdna3", "nvidia"), "steamdeck", "rdna3, nvidia, which does not run on a Steam Deck"),
    ],
)
def test_artifacts_that_cannot_run_there(artifact, to, message):
    with pytest.raises(UserError, match=message):
        deploy.check(artifact, deploy.DESTINATIONS[to])


def test_artifacts_that_can():
    deploy.check(manifest_of("vulkan", "rdna3", "vangogh:dot=none"), deploy.DESTINATIONS["steamdeck"])
    for kind in ("rocm", "cpu"):
        deploy.check(manifest_of(kind, "gfx1100"), deploy.DESTINATIONS["linux"])


def test_names_that_lead_out_of_the_folder_are_refused(model, tmp_path):
    """Nothing is written anywhere."""
    changed = shutil.copytree(model, tmp_path / "model")
    manifest = resealing.content(changed)
    arch = next(iter(manifest["libraries"]))
    manifest["libraries"][arch] = "../outside.spv"
    resealing.reseal(changed, manifest)
    with pytest.raises(UserError, match="key libraries"):
        deploy.run(str(changed), to="linux", output=str(tmp_path / "bundle"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_name_in_files_of_a_bundle_is_a_line_of_text():
    assert deploy.title("a \x1b]0;title\x07\n[Desktop Action]\rb") == "a ]0;title [Desktop Action]b"


def test_outputs(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("dear")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name in ("letters", "file"):
        with pytest.raises(UserError, match="is not a bundle"):
            deploy.check_output(tmp_path / name)
    for name in ("a.zip", "a.tar.gz", "a.zst"):
        with pytest.raises(UserError, match=r"ends with \.tar\.zst"):
            deploy.check_output(tmp_path / name)
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / deploy.MARK).touch()
    for name in ("older", "empty", "new", "llama-3.2-1b"):
        deploy.check_output(tmp_path / name)


def test_the_command_names_its_destinations():
    command = [sys.executable, "-m", "mlc_amd.tools.start", "deploy", "x", "--to", "xbox"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == "error: --to must be steamdeck or linux, not 'xbox'\n"
