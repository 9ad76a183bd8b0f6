"""What bundles are made with: archives, folders that are whole or not there, wheels of several Pythons, their command
line."""

import importlib.util
import io
import runpy
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlc_amd.runtime.artifact.artifact import WEIGHTS, Artifact
from mlc_amd.runtime.artifact.manifest import MANIFEST
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools import cli
from mlc_amd.tools.bundles import archive, wheels
from mlc_amd.tools.bundles.archive import Entry
from mlc_amd.tools.commands import deploy

# ---- archives


def test_archives_are_the_same_and_unpack(tmp_path):
    zstandard = pytest.importorskip("zstandard") if sys.version_info < (3, 14) else None
    (tmp_path / "large").write_bytes(np.random.default_rng(0).bytes(20 << 20))
    entries = [
        Entry("run.sh", b"#!/bin/sh\n", True),
        Entry("a/b.txt", b"text" * 1000),
        Entry("model/large", tmp_path / "large"),
    ]
    for name in ("one.tar.zst", "two.tar.zst"):
        archive.write_archive(
            tmp_path / name, "one", entries, lambda entry: entry.path.startswith("model/"), lambda nbytes: None
        )
    packed = (tmp_path / "one.tar.zst").read_bytes()
    assert packed == (tmp_path / "two.tar.zst").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "one.tar.zst", "two.tar.zst"]
    if zstandard is None:
        from compression import zstd

        plain = zstd.decompress(packed)
    else:
        plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed), read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        members = {member.name: (member.mode, tar.extractfile(member).read()) for member in tar}
    assert members["one/run.sh"] == (0o755, b"#!/bin/sh\n") and members["one/a/b.txt"] == (0o644, b"text" * 1000)
    assert members["one/model/large"][1] == (tmp_path / "large").read_bytes()


def test_a_folder_is_whole_or_not_there(tmp_path):
    out = tmp_path / "bundle"
    archive.write_folder(out, [Entry("bundle.json", b"{}"), Entry("old", b"")], lambda nbytes: None)
    with pytest.raises(UserError, match="cannot write"):
        archive.write_folder(
            out, [Entry("bundle.json", b"{}"), Entry("new", tmp_path / "missing")], lambda nbytes: None
        )
    assert sorted(path.name for path in out.iterdir()) == ["bundle.json", "old"]
    archive.write_folder(out, [Entry("bundle.json", b"{}")], lambda nbytes: None)
    assert [path.name for path in out.iterdir()] == ["bundle.json"] and [path.name for path in tmp_path.iterdir()] == [
        "bundle"
    ]


# ---- wheels


def wheel(folder: Path, name: str, **files: str) -> Path:
    with zipfile.ZipFile(folder / name, "w") as file:
        for path, text in files.items():
            file.writestr(path, text)
    return folder / name


def test_wheels_of_several_pythons_lie_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setitem(wheels.VENDORED, "some-thing", wheels.Package("1.0", ("some/extra/*",), ("some/config.py",)))
    for version in ("311", "313"):
        files = {"some/__init__.py": "x", f"some/fast.cpython-{version}.so": version, "some/config.py": version}
        files |= {"some/tests/t.py": "", "some/extra/e.py": "", "some/types.pyi": ""}
        wheel(
            tmp_path, f"some_thing-1.0-cp{version}-cp{version}-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", **files
        )
    wheel(tmp_path, "some_thing-0.9-py3-none-any.whl")
    found = wheels.site_packages(["some-thing"], ["3.11", "3.13"], tmp_path)
    assert set(found) == {"some/__init__.py", "some/config.py", "some/fast.cpython-311.so", "some/fast.cpython-313.so"}
    with pytest.raises(UserError, match=r"no wheel of some-thing 1.0 for Python 3.12"):
        wheels.site_packages(["some-thing"], ["3.12"], tmp_path)
    wheel(tmp_path, "some_thing-1.0-cp312-cp312-manylinux2014_x86_64.whl", **{"some/__init__.py": "y"})
    with pytest.raises(RuntimeError, match="differs"):
        wheels.site_packages(["some-thing"], ["3.11", "3.12"], tmp_path)


def test_the_wheel_that_pip_would_take(tmp_path, monkeypatch):
    monkeypatch.setitem(wheels.VENDORED, "thing", wheels.Package("1.0"))
    plain, threaded = "cp313-cp313-manylinux2014_x86_64", "cp313-cp313t-manylinux_2_28_x86_64"
    for name in ("cp311-abi3-manylinux2014_x86_64", "py3-none-any", plain, threaded):
        wheel(tmp_path, f"thing-1.0-{name}.whl", **{"thing.py": name})
    taken = {
        python: wheels.site_packages(["thing"], [python], tmp_path)["thing.py"].decode()
        for python in ("3.11", "3.12", "3.13")
    }
    abi3 = "cp311-abi3-manylinux2014_x86_64"
    assert taken == {"3.11": abi3, "3.12": abi3, "3.13": plain}


def test_damaged_wheel(tmp_path, monkeypatch):
    monkeypatch.setitem(wheels.VENDORED, "thing", wheels.Package("1.0"))
    (tmp_path / "thing-1.0-py3-none-any.whl").write_bytes(b"PK no")
    with pytest.raises(UserError, match="is damaged"):
        wheels.site_packages(["thing"], ["3.11"], tmp_path)


def test_no_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match=r"cannot download termcolor==3.3.0 \(.*; with a network, deploy once") as error:
        wheels.fetch(["termcolor"], ["3.11"], tmp_path)
    assert "\n" not in str(error.value)


def test_the_user_chooses_the_pythons():
    assert deploy.pythons_of("3.13, 3.11") == ("3.11", "3.13")
    for text, bad in (("3.9", "3.9"), ("3.12,python3", "python3"), ("", "")):
        with pytest.raises(UserError, match=rf"--python {bad}: bundles can be made for 3.11, 3.12, "):
            deploy.pythons_of(text)


# ---- the command line of a bundle


@pytest.fixture
def bundled(monkeypatch):
    """As in a bundle: no compiler, no commands that need it, nothing of TVM."""
    absent = {f"mlc_amd.tools.commands.{name}" for name in ("compile", "tune", "deploy")} | {
        "mlc_amd.compiler",
        "tvm_ffi",
    }
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in absent else find(name, *more))
    monkeypatch.setenv("MLC_AMD_PROGRAM", "run.sh")


def test_help_and_advice_name_the_commands_as_they_are_typed_there(bundled, capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: run.sh COMMAND" in shown and "`run.sh chat`" in shown and "`mlc-amd" not in shown
    assert cli.main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: run.sh bench") and "`run.sh doctor`" in " ".join(shown.split())
    assert cli.main(["chat", "/no/such/model"]) == 1
    assert "made by `mlc-amd compile`" in capsys.readouterr().err  # on another machine


def test_a_bundle_chats_where_no_command_is_named(monkeypatch):
    for variable in ("MLC_AMD_MODEL", "MLC_AMD_PROGRAM"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    start = runpy.run_path(str(Path(__file__).parents[2] / "dist" / "bundle" / "start.py"), run_name="start")
    for words in ([], ["--prompt", "hello"], ["-n", "8"], ["--debug"], ["--debug", "--prompt", "hello"]):
        assert start["command"](words) == ["chat", *words]
    for words in (["doctor"], ["--help"], ["-h"], ["--version"], ["--debug", "bench", "-n", "8"]):
        assert start["command"](words) == words


def test_a_bundle_cannot_run_an_artifact_for_the_cpu(bundled):
    artifact = Artifact(Path("m"), {"target": {"kind": "cpu"}, "tensors": {}})
    with pytest.raises(UserError, match=r"target 'cpu', which needs the package apache-tvm-ffi"):
        open_device(artifact)


def test_a_model_for_several_gpus_has_the_code_that_moves_words_between_them(tmp_path):
    names = ("kernels.spv", "tokenizer.json", "tokenizer_config.json", WEIGHTS, "relay.bin")
    manifest = {"libraries": {"rdna3": "kernels.spv"}, "files": {name: {} for name in (*names, "listing.s.gz")}}
    for exchange, expected in (({"relay": "relay.bin"}, {*names}), ({}, {*names} - {"relay.bin"})):
        model = SimpleNamespace(manifest=manifest | {"exchange": exchange}, path=tmp_path, random_weights=False)
        found = deploy.model_files(model, weightless=False)
        assert found.keys() == expected | {MANIFEST} and found[MANIFEST]
