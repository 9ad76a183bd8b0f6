"""The user's cache of compiled models: what shapes an artifact is part of its key, artifacts share weights, and what
nobody needs can be removed."""

import gc
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from few_functions import few_functions

from mlc_amd.compiler import pipeline, weights
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.gguf import synthetic, write_gguf
from mlc_amd.compiler.tuning.database import Database, Record
from mlc_amd.compiler.weight_store import WeightStore
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.cache.page_files import PageFiles
from mlc_amd.runtime.devices.hip import gpu
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions, LoadOptions
from mlc_amd.schedules.operators import from_json
from mlc_amd.schedules.space import space
from mlc_amd.tools import cli
from mlc_amd.tools.hub import model_cache, models, page_cache

SPEC = "tiny:q4_0"


@pytest.fixture
def builds(monkeypatch, tmp_path) -> list[tuple[str, str]]:
    """(target, arch) of each compilation; nothing is really compiled. The cache is empty at first."""
    made = []

    def compile_model(source, out, options, progress, weights, store):
        made.append((options.target, options.arch))
        out.mkdir(parents=True)
        (out / "manifest.json").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pipeline, "compile_model", compile_model)
    return made


@pytest.mark.parametrize("arch", ["native", "auto"])
def test_rocm_follows_the_gpu(builds, monkeypatch, arch):
    monkeypatch.setattr(gpu, "kfd_gpus", lambda: [{"arch": "gfx1100"}])
    first = models.artifact_path(LoadOptions(target="rocm", arch=arch), SPEC)
    assert models.artifact_path(LoadOptions(target="rocm", arch=arch), SPEC) == first
    monkeypatch.setattr(gpu, "kfd_gpus", lambda: [{"arch": "gfx1201"}])
    assert models.artifact_path(LoadOptions(target="rocm", arch=arch), SPEC) != first
    assert builds == [("rocm", "gfx1100"), ("rocm", "gfx1201")]


@pytest.mark.parametrize("arch", ["native", "auto"])
def test_cpu_follows_the_flags(builds, monkeypatch, arch):
    monkeypatch.setattr(model_cache, "cpu_flags", lambda: frozenset({"avx2"}))
    first = models.artifact_path(LoadOptions(target="cpu", arch=arch), SPEC)
    monkeypatch.setattr(model_cache, "cpu_flags", lambda: frozenset({"avx2", "avx512_vnni"}))
    assert models.artifact_path(LoadOptions(target="cpu", arch=arch), SPEC) != first
    assert builds == [("cpu", "native")] * 2


# ---- weights that artifacts share


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Path:
    """A folder for a user's files, which each test finds empty: artifacts know the path of their GGUF file."""
    return tmp_path_factory.mktemp("user")


@pytest.fixture
def cache(monkeypatch, user) -> Path:
    """An empty cache."""
    shutil.rmtree(user)
    user.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(user / "cache"))
    return user / "cache" / "mlc-amd"


@pytest.fixture
def gguf(cache, user) -> Path:
    with synthetic("tiny:f16") as model:
        write_gguf(model, user / "tiny.gguf")
    return user / "tiny.gguf"


def compiled(gguf: Path, ctx: int) -> Path:
    # kernels that this process compiled before are taken from memory: codegen/object_cache.py
    return models.artifact_path(LoadOptions(model=str(gguf), target="cpu", ctx=ctx))


def weights_of(artifact: Path) -> os.stat_result:
    return (artifact / "weights.safetensors").stat()


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """Where the user's folder with `two` is kept, once a test made it."""
    return tmp_path_factory.mktemp("kept") / "user"


@pytest.fixture
def two(cache, gguf, user, kept) -> list[Path]:
    """Artifacts of one file that differ in their context."""
    if kept.exists():
        shutil.rmtree(user)
        subprocess.run(["cp", "-a", kept, user], check=True)  # with times and links
    found = [compiled(gguf, 64), compiled(gguf, 128)]
    if not kept.exists():
        subprocess.run(["cp", "-a", user, kept], check=True)
    return found


def test_weights_take_their_space_once(two, cache, gguf, tmp_path, monkeypatch):
    first, second = map(weights_of, two)
    assert two[0] != two[1] and first.st_ino == second.st_ino and first.st_nlink == 3  # and the store's
    for path in two:
        Artifact.open(path, verify=True)
    # nor are they packed again for a folder of the user's
    monkeypatch.setattr(weights, "repack", None)
    out = models.compile_artifact(str(gguf), str(tmp_path / "mine"), CompileOptions(target="cpu", ctx=192)).path
    assert weights_of(out).st_ino == first.st_ino and Artifact.open(out, verify=True)
    tables = [Artifact.open(path).weights["rope.table"] for path in (*two, out)]
    assert [len(table) for table in tables] == [64, 128, 192] and (tables[0] == tables[2][:64]).all()


def test_other_weights_are_not_shared(two, gguf):
    with synthetic("tiny:f16", seed=1) as model:
        write_gguf(model, gguf)
    changed = compiled(gguf, 64)
    assert weights_of(changed).st_ino != weights_of(two[0]).st_ino
    with synthetic("tiny:f16") as model:
        cpu, gpu = (weights.key(model, layout, []) for layout in ("tile16", "rows"))
    assert cpu != gpu


def test_damaged_weights_are_packed_again_for_a_folder(two, gguf, tmp_path):
    with open(two[0] / "weights.safetensors", "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"\xff" * 10)
    out = models.compile_artifact(str(gguf), str(tmp_path / "mine"), CompileOptions(target="cpu", ctx=64)).path
    assert Artifact.open(out, verify=True) and weights_of(out).st_nlink == 1


def test_a_file_system_without_links_gets_copies(cache, gguf, tmp_path, monkeypatch):
    store, place = WeightStore(tmp_path / "store"), tmp_path / "weights.safetensors"
    place.write_bytes(b"packed")
    facts = store.put("key", place)
    monkeypatch.setattr(os, "link", lambda *_: os.stat("/nowhere/at/all"))
    assert store.take("key", tmp_path / "copy") == facts and (tmp_path / "copy").stat().st_nlink == 1
    assert store.take("other", tmp_path / "copy") is None


def test_files_of_one_name_do_not_replace_each_other(gguf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(gguf.parent)
    command = ["--target", "cpu", "--ctx", "100", "--weights", "none"]
    assert cli.main(["compile", gguf.name, *command]) == 0
    assert "--ctx 100 is rounded up to 128" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    other = shutil.copy(gguf, tmp_path / "other")
    assert cli.main(["compile", str(other), *command]) == 1
    assert "dist/tiny-cpu-native was made from another tiny.gguf" in capsys.readouterr().err
    assert cli.main(["compile", gguf.name, *command]) == 0


def test_a_cache_without_space_has_advice_of_its_own(cache, gguf):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))  # stands in for a full disk
    try:
        with pytest.raises(UserError, match=r"cannot write .*set XDG_CACHE_HOME to a writable folder"):
            compiled(gguf, 64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [file for file in cache.rglob("*") if file.is_file()] == []


# ---- the command


def test_list_and_removal(two, cache, capsys):
    capsys.readouterr()
    assert cli.main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert all(path.name in shown for path in two) and "shared by 2" in shown and "2 models" in shown
    assert cli.main(["cache", "ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["recipe"]["ctx"] for one in listed] == [128, 64] and len({one["weights_inode"] for one in listed}) == 1
    assert not any(one["outdated"] or one["in_use"] for one in listed)
    assert cli.main(["cache", "rm", two[0].name]) == 0
    assert "0 B freed" not in capsys.readouterr().out and not two[0].exists() and weights_of(two[1]).st_nlink == 2
    assert cli.main(["cache", "rm", "tiny-*"]) == 0
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_kv_caches_go_with_their_models(two, cache, capsys):
    for number, (path, name) in enumerate([(two[0], "first"), (two[1], "second"), (cache / "gone", "third")]):
        files = PageFiles(bytes([number]) * 16, {"name": name, "path": str(path.resolve())}, 1 << 30)
        files.write(bytes(16), np.zeros(5000, np.uint8))

    def left() -> list[str]:
        return sorted(one.name for one in page_cache.stored())

    capsys.readouterr()
    assert cli.main(["cache"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name} (8.00 KiB, last used" in shown for name in left())
    assert cli.main(["cache", "ls", "--json"]) == 0
    assert {one["pages_bytes"] for one in json.loads(capsys.readouterr().out)} == {8192}
    assert cli.main(["cache", "prune", "--dry-run"]) == 0 and left() == ["first", "second", "third"]
    assert cli.main(["cache", "prune"]) == 0 and left() == ["first", "second"]
    assert cli.main(["cache", "rm", two[0].name]) == 0 and left() == ["second"]
    for file in page_cache.stored()[0].files:
        os.utime(file.path, (0, 0))
    assert cli.main(["cache", "prune", "--older", "365d"]) == 0 and left() == []


def test_prune_keeps_what_was_used_last(two, gguf, cache, capsys):
    assert cli.main(["cache", "prune"]) == 0
    assert all(path.exists() for path in two)
    assert compiled(gguf, 64) == two[0]  # used again
    assert cli.main(["cache", "prune", "--max-size", "0", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert shown.index(two[1].name) < shown.index(two[0].name)  # the least recently used first
    note = two[1].with_name(f"{two[1].name}.json")
    os.utime(note, (0, 0))
    assert cli.main(["cache", "prune", "--older", "365d"]) == 0
    assert two[0].exists() and not two[1].exists() and not note.exists()


def test_prune_removes_what_no_command_finds(two, gguf, cache):
    gguf.unlink()
    assert cli.main(["cache", "prune"]) == 0
    assert [file for file in cache.rglob("*") if file.is_file()] == []


def test_what_a_process_uses_stays(two, cache, capsys):
    code = (
        "import sys; from mlc_amd.runtime.artifact.artifact import Artifact\n"
        "held = Artifact.open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(two[0])], **pipes) as user:
        assert user.stdout.readline() == b"open\n"
        assert cli.main(["cache", "rm", "--all"]) == 0
        shown = capsys.readouterr()
        assert f"{two[0].name} is in use: it stays" in shown.err and f"removed {two[1].name}" in shown.out
        assert cli.main(["cache", "prune", "--max-size", "0"]) == 0
        assert Artifact.open(two[0], verify=True)
        user.kill()
    gc.collect()
    assert cli.main(["cache", "prune", "--max-size", "0"]) == 0
    assert not two[0].exists()


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (("rm",), "NAME of a model"),
        (("rm", "no-such"), "no model in the cache is called no-such"),
        (("ls", "--older", "1d"), "--older is for `mlc-amd cache prune`"),
        (("prune", "--older", "soon"), "--older 'soon': give a number and a unit, as 30d"),
        (("prune", "--max-size", "3X"), "as 20G"),
        (("clean",), "ls, ps, rm or prune"),
    ],
)
def test_errors(cache, capsys, tokens, text):
    assert cli.main(["cache", *tokens]) in (1, 2)
    shown = capsys.readouterr()
    assert shown.out == "" and text in shown.err and shown.err.count("\n") == 1


# ---- what does not change a model


def test_a_new_installation_finds_what_the_last_one_compiled(builds, monkeypatch, tmp_path):
    """Its sources have other times, and the same contents."""
    places, real = {}, model_cache.resources.files
    for package in ("compiler", "schedules", "runtime.devices"):
        places[f"mlc_amd.{package}"] = shutil.copytree(str(real(f"mlc_amd.{package}")), tmp_path / package)
    monkeypatch.setattr(model_cache.resources, "files", lambda name: places.get(name) or real(name))
    first = models.artifact_path(LoadOptions(target="cpu"), SPEC)
    changed = places["mlc_amd.compiler"] / "pipeline.py"
    os.utime(changed, (0, 0))
    assert models.artifact_path(LoadOptions(target="cpu"), SPEC) == first and len(builds) == 1
    changed.write_text(changed.read_text() + "\n")
    assert models.artifact_path(LoadOptions(target="cpu"), SPEC) != first and len(builds) == 2


def test_only_records_that_change_its_plans_compile_a_model_again(cache, monkeypatch):
    made, real = [], pipeline.compile_model

    def compile_model(*args):
        made.append(args)
        with few_functions():
            return real(*args)

    monkeypatch.setattr(pipeline, "compile_model", compile_model)
    options = LoadOptions(target="vulkan", arch="rdna3", ctx=64)
    first = models.artifact_path(options, SPEC)
    kernels = json.loads((first / "manifest.json").read_text())["kernels"]
    (arch,) = make_target("vulkan", "rdna3").archs
    workloads = (from_json({"op": kernel["operator"], "args": kernel["args"]}) for kernel in kernels if kernel["args"])
    workload, found = next((one, found) for one in workloads if (found := space(one, arch)))
    other = next(plan for plan in found.plans if plan != found.default)
    with Database(arch) as database:  # tuning that found nothing
        database.add(workload, Record(1e-5, plan=asdict(found.default), default=True))
    assert models.artifact_path(options, SPEC) == first and len(made) == 1
    (entry,) = model_cache.entries()
    assert not entry.outdated
    with Database(arch) as database:
        database.add(workload, Record(5e-6, plan=asdict(other), checked="device", passed=True))
    (entry,) = model_cache.entries()
    assert entry.outdated
    assert models.artifact_path(options, SPEC) == first and len(made) == 2
    plans = [
        kernel["tuned"]["rdna3"]["from"] for kernel in json.loads((first / "manifest.json").read_text())["kernels"]
    ]
    assert "user" in plans and models.artifact_path(options, SPEC) == first and len(made) == 2


def test_two_processes_compile_a_model_once(cache):
    spec, command = ("--synthetic", "tiny:f16"), [sys.executable, "-m", "mlc_amd.tools.start", "bench"]
    line = [*command, *spec, "--target", "cpu", "--ctx", "64"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    flags = ["-p", "8", "-n", "2", "-r", "1"]
    both = [subprocess.Popen([*line, *flags], env=environment, **pipes) for _ in range(2)]
    errors = [process.communicate(timeout=600)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert sum("compiling" in text for text in errors) == 1
    assert sum("waiting for another process" in text for text in errors) == 1
    assert not list((cache / "models").glob(".*"))
