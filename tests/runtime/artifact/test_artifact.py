"""The artifact on disk: written completely or not at all, and a one-line message for each kind of damage."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from few_functions import few_functions
from safetensors import safe_open

from mlc_amd.compiler.codegen.cpu import compile_c, link_shared
from mlc_amd.compiler.gguf import GGUFModel, synthetic
from mlc_amd.compiler.pipeline import compile_model
from mlc_amd.runtime.artifact import artifact
from mlc_amd.runtime.artifact.artifact import Artifact, new_artifact
from mlc_amd.runtime.artifact.manifest import FORMAT_VERSION
from mlc_amd.runtime.artifact.weight_block import ALIGN, TensorSpec
from mlc_amd.runtime.artifact.weights_file import Weights, WeightsWriter
from mlc_amd.runtime.cache.cache_types import kv_bytes, kv_types
from mlc_amd.runtime.devices.cpu import Kernels
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions, RunOptions
from tests.dev.fuzz import resealing


@pytest.fixture
def broken(demo_artifact, tmp_path):
    """A copy of an artifact, to be damaged."""
    return shutil.copytree(demo_artifact, tmp_path / "model")


def test_contents(demo_artifact):
    opened = Artifact.open(demo_artifact, verify=True)
    assert set(opened.manifest["files"]) == {
        "kernels.so",
        "tables.safetensors",
        "weights.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert opened.manifest["weight_bytes"] == sum(
        opened.weights[name].nbytes for name in opened.weights.header if not name.startswith("__pad_")
    )
    assert kv_bytes(kv_types(opened.manifest)) == 6 * 2 * 4 * 2048 * 64 * 2


def test_weights_are_safetensors_and_aligned(demo_artifact):
    ours = Weights(demo_artifact / "weights.safetensors")
    with safe_open(demo_artifact / "weights.safetensors", "np") as theirs:
        for name in theirs.keys():  # noqa: SIM118 (not a dict)
            assert np.array_equal(theirs.get_tensor(name), ours[name])
            assert name.startswith("__pad_") or ours[name].ctypes.data % ALIGN == 0


def test_writer_puts_pieces_where_they_belong(tmp_path):
    writer = WeightsWriter(tmp_path / "w", [TensorSpec("a", "float16", (3,)), TensorSpec("b", "int32", (4, 2))])
    writer.write("b", 16, np.arange(4, 8, dtype=np.int32))
    writer.write("a", 0, np.array([1, 2, 3], np.float16))
    writer.write("b", 0, np.arange(4, dtype=np.int32))
    writer.close()
    weights = Weights(tmp_path / "w")
    assert weights["a"].tolist() == [1, 2, 3]
    assert weights["b"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


# ---- writing


def test_a_failed_compile_leaves_what_was_there(tmp_path):
    out = tmp_path / "model"
    with new_artifact(out) as directory:
        artifact.write_manifest(directory, {"name": "first"})
    with pytest.raises(RuntimeError), new_artifact(out) as directory:
        (directory / "half").write_text("x")
        raise RuntimeError
    assert json.loads((out / "manifest.json").read_text())["name"] == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path, earlier):
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "model"
    link.symlink_to(target)
    for name in ("first", "second") if earlier else ("second",):
        with new_artifact(link) as directory:
            artifact.write_manifest(directory, {"name": name})
    assert link.is_symlink() and json.loads((target / "manifest.json").read_text())["name"] == "second"
    assert [sorted(p.name for p in folder.iterdir()) for folder in (tmp_path, target.parent)] == [
        ["elsewhere", "link"], ["model"],
    ]  # fmt: skip


def test_a_link_to_itself_is_an_error(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(UserError, match="cannot write"), new_artifact(tmp_path / "link"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_other_folders_are_not_overwritten(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("dear")
    with pytest.raises(UserError, match="not a compiled model"), new_artifact(tmp_path / "letters"):
        pass
    assert (tmp_path / "letters" / "mother.txt").read_text() == "dear"


def test_only_files_of_an_earlier_compile_are_replaced(tmp_path, monkeypatch):
    out = tmp_path / "model"
    with new_artifact(out) as directory:
        artifact.write_manifest(directory, {"name": "first"})
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"also holds notes.txt, which no compilation wrote; move that away"):
        new_artifact(out).__enter__()
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    with new_artifact(out) as directory:
        artifact.write_manifest(directory, {"name": "second"})
    assert json.loads((out / "manifest.json").read_text())["name"] == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=r"\. is the current directory"):
        new_artifact(Path(".")).__enter__()


def test_a_killed_compile_leaves_nothing_for_long(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from mlc_amd.runtime.artifact.artifact import new_artifact\n"
        "with new_artifact(Path(sys.argv[1])) as d: (d / 'weights').write_text('x'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False).returncode == -9
    (hidden,) = tmp_path.iterdir()
    with new_artifact(tmp_path / "b") as directory:
        assert not hidden.exists()
        artifact.write_manifest(directory, {})
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_linker_without_space_says_so(tmp_path, monkeypatch):
    (tmp_path / "cc").write_text(
        "#!/bin/sh\necho '/usr/bin/ld: final link failed: No space left on device' >&2\n"
        "echo 'collect2: error: ld returned 1 exit status' >&2\nexit 1\n"
    )
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="No space left on device; free some space there or set TMPDIR"):
        compile_c("x.o")


def test_full_disk(tmp_path):
    """A limit on file size stands in for the full disk: the same error path, without mounting anything. The weights
    meet it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = CompileOptions(target="vulkan", arch="generic", ctx=64)
    with few_functions(), pytest.raises(UserError, match="cannot write") as caught:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            compile_model(synthetic("tiny:f16"), tmp_path / "model", options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# ---- reading


FORMAT = b'"format": %d'


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: shutil.rmtree(p), "no such compiled model"),
        (lambda p: (p / "manifest.json").unlink(), "not a compiled model"),
        (lambda p: (p / "manifest.json").write_text("{"), "is damaged"),
        (lambda p: ((p / "manifest.json").unlink(), (p / "manifest.json").mkdir()), "is not a file"),
        (lambda p: ((p / "manifest.json").unlink(), os.mkfifo(p / "manifest.json")), "is not a file"),
        (lambda p: (p / "manifest.json").write_text('{"format": 7}'), f"format 7, this version reads {FORMAT_VERSION}"),
        (
            lambda p: with_byte(p / "manifest.json", FORMAT % FORMAT_VERSION, FORMAT % (FORMAT_VERSION + 1)),
            "is damaged",
        ),
        (lambda p: with_byte(p / "manifest.json", b'"rows": 512', b'"rows": 513'), "is damaged or was changed"),
        (lambda p: (p / "kernels.so").unlink(), "kernels.so is missing"),
        (lambda p: (p / "kernels.so").write_bytes(b"\0" * (p / "kernels.so").stat().st_size), "corrupted"),
        (lambda p: os.truncate(p / "kernels.so", 100), "has 100 bytes instead of"),
        (lambda p: os.truncate(p / "weights.safetensors", 4096), "has 4096 bytes instead of"),
        (lambda p: (p / "tokenizer.json").write_text("{}"), "bytes instead of"),
    ],
)
def test_damage_is_named(broken, damage, message):
    damage(broken)
    with pytest.raises(UserError, match=message) as error:
        Engine.load(broken)
    assert "\n" not in str(error.value)


def with_byte(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def test_damaged_weights_show_with_verify(broken):
    with open(broken / "weights.safetensors", "r+b") as f:
        f.seek(-1000, os.SEEK_END)
        f.write(b"\xff" * 10)
    Engine.load(broken)
    with pytest.raises(UserError, match=r"weights.safetensors is corrupted"):
        Engine.load(broken, RunOptions(verify=True))


def test_another_cpu(broken):
    changed = resealing.content(broken)
    changed["target"]["flags"].append("avx2048")
    resealing.reseal(broken, changed, interfaces=True)
    with pytest.raises(UserError, match=r"compiled for '.*', but this CPU lacks avx2048"):
        Engine.load(broken)


def test_another_device(demo_artifact):
    with pytest.raises(UserError, match="for target 'cpu', not 'hip'"):
        Engine.load(demo_artifact, RunOptions(device="hip"))


def test_kernels_are_loaded_by_content(tmp_path):
    """Not by path: the system's loader takes that for the library that it loaded from there."""
    library = tmp_path / "kernels.so"
    for answer in (1, 2):
        (tmp_path / "one.c").write_text(f"int answer(void) {{ return {answer}; }}")
        compile_c("-c", "-fPIC", "-o", str(tmp_path / "one.o"), str(tmp_path / "one.c"))
        link_shared([str(tmp_path / "one.o")], tmp_path / "new.so")
        (tmp_path / "new.so").replace(library)
        assert Kernels(library)._library.answer() == answer


# ---- compiling


@pytest.mark.parametrize(
    ("target", "arch", "ctx", "message"),
    [
        ("tpu", "native", None, "--target must be"),
        ("cpu", "gfx1100", None, "unknown CPU arch 'gfx1100'"),
        ("cpu", "native", 0, "--ctx is 0: it must be at least 1"),
        ("cpu", "native", 1 << 20, "more than the 2048 tokens"),
    ],
)
def test_bad_requests(tmp_path, target, arch, ctx, message):
    with pytest.raises(UserError, match=message):
        compile_model(synthetic("tiny:q4_0"), tmp_path / "model", CompileOptions(target=target, arch=arch, ctx=ctx))
    assert list(tmp_path.iterdir()) == []


def test_source_is_not_changed_by_running(demo_artifact, demo_gguf):
    before = artifact.sha256(demo_artifact / "weights.safetensors")
    Engine.load(demo_artifact).prefill([1, 2, 3])
    assert artifact.sha256(demo_artifact / "weights.safetensors") == before
    with GGUFModel.open(demo_gguf) as model:
        assert len(model.config.layers) == 6
