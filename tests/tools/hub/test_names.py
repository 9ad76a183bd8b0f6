"""What people call models, on this machine and elsewhere: it is found, or one line says what it is and what helps."""

import json
import re
import struct
from pathlib import Path

import pytest

from mlc_amd.compiler.gguf import synthetic, write_gguf
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import LoadOptions
from mlc_amd.tools import cli
from mlc_amd.tools.hub import models

DIGEST = "ab" * 32


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("names") / "tiny.gguf"
    with synthetic("tiny:f16") as model:
        write_gguf(model, path)
    return path


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """A home without models, and no network."""
    for name, value in (("HOME", tmp_path), ("XDG_CACHE_HOME", tmp_path / "cache"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)


def ollama(home: Path, place: str, *layers: str, blob: bool = True) -> Path:
    """A model of ollama's, with these kinds of layers; returns its blob."""
    manifest = home / ".ollama" / "models" / "manifests" / place
    manifest.parent.mkdir(parents=True)
    kinds = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{DIGEST}"} for kind in layers]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": kinds}))
    found = home / ".ollama" / "models" / "blobs" / f"sha256-{DIGEST}"
    found.parent.mkdir()
    if blob:
        found.touch()
    return found


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("llama3", "registry.ollama.ai/library/llama3/latest"),
        ("llama3:8b", "registry.ollama.ai/library/llama3/8b"),
        ("someone/coder:7b-q4_K_M", "registry.ollama.ai/someone/coder/7b-q4_K_M"),
        ("hf.co/bartowski/Qwen3-8B-GGUF:Q4_K_M", "hf.co/bartowski/Qwen3-8B-GGUF/Q4_K_M"),
    ],
)
def test_a_model_of_ollama_is_found_by_its_name(tmp_path, monkeypatch, name, place):
    blob = ollama(tmp_path, place, "template", "model", "params")
    assert models.find(name) == models.find(str(blob)) == blob
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "other"))
    with pytest.raises(UserError, match="no such file or folder"):
        models.find(name)


@pytest.mark.parametrize(
    ("layers", "blob", "message"),
    [
        (("model", "adapter"), True, "has an adapter"),
        (("tensor", "tensor"), True, "has no GGUF file"),
        (("model",), False, "is missing; `ollama pull llama3` downloads it"),
    ],
)
def test_what_ollama_has_besides_whole_models_is_refused(tmp_path, layers, blob, message):
    ollama(tmp_path, "registry.ollama.ai/library/llama3/latest", *layers, blob=blob)
    with pytest.raises(UserError, match=message):
        models.find("llama3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3:8b", "ollama has no such model here either; .* OWNER/REPO:QUANT"),
        ("../../x:y", "no such file or folder; give a GGUF file"),
        ("https://example.com/a.gguf", "of web addresses only those of huggingface.co"),
        ("What is a list?", "a text for the model follows it"),
        ("~nobody-here/x.gguf", "no such file or folder; give a GGUF file"),
        ("missing.gguf", "missing.gguf: no such file or folder; give a GGUF file"),
    ],
)
def test_names_of_nothing_say_what_helps(name, message):
    with pytest.raises(UserError, match=message):
        models.find(name)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["a-Q4_0.gguf", "mmproj-F16.gguf", "README.md"], "a-Q4_0.gguf"),
        (["a-00002-of-00002.gguf", "a-00001-of-00002.gguf"], "a-00001-of-00002.gguf"),
        (["manifest.json", "x.gguf"], ""),
        (["notes.txt"], ""),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], UserError("several models: a-Q4_0.gguf, a-Q8_0.gguf; give the path")),
        (["config.json", "model.safetensors"], UserError("is a checkpoint .*convert_hf_to_gguf.py")),
    ],
)
def test_a_folder_stands_for_its_only_model(tmp_path, files, found):
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in files:
        (folder / file).touch()
    if isinstance(found, str):
        assert models.find(str(folder)) == folder / found
    else:
        with pytest.raises(UserError, match=str(found)):
            models.find(str(folder))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
SAFETENSORS = struct.pack("<Q", 64) + b'{"__metadata__":{}}'
PAGE = b"\n<!doctype html><html><head><title>x</title>"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LFS, "Git LFS pointer, not the file itself; run `git lfs pull`"),
        (PAGE, "web page .*/resolve/"),
        (SAFETENSORS, "safetensors file, not GGUF; .*convert_hf_to_gguf.py"),
        (b"PK\x03\x04" + bytes(60), "PyTorch checkpoint .*convert_hf_to_gguf.py"),
        (b"tjgg" + bytes(60), "format before GGUF"),
        (b"\x1f\x8b\x08" + bytes(60), "is compressed; unpack it"),
        (b'{"architectures": []}', "is JSON, not GGUF"),
        (b"FROM llama3\n", "Modelfile"),
        (bytes(64), "download is not complete"),
        (b"", "the file is empty"),
        (b"hello world", "not a GGUF file .it starts with b'hell'"),
        (None, "truncated or damaged: download"),
    ],
)
def test_other_files_are_told_apart(tmp_path, capsys, gguf, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf.read_bytes()[:-1000] if content is None else content)
    for command in ("compile", "chat"):
        assert cli.main([command, str(path)]) == 1
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        assert re.search(message, shown.err), shown.err


def test_ollamas_commands_list_show_and_remove(tmp_path, capsys, gguf):
    def run(*words: str) -> str:
        assert cli.main(list(words)) == 0
        return capsys.readouterr().out

    assert run("list") == run("ls") == run("cache", "ls") and "no models" in run("list")
    assert run("ps") == "no model is in use\n" and run("version") == run("--version") == run("chat", "--version")
    assert run("show", str(gguf)) == run("inspect", str(gguf))
    assert run("run", "--help") == run("chat", "--help") == run("help", "run")
    for name in ("tiny", str(gguf)):
        made = models.artifact_path(LoadOptions(model=str(gguf), target="vulkan", arch="generic", ctx=64))
        assert made.name in run("ls")
        assert f"removed {made.name}" in run("rm", name) and not made.exists()
