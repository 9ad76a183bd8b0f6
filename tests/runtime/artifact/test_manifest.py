"""A manifest whose checksum is right and whose content is not: each part that disagrees with another one is refused,
with its key, before anything is loaded."""

import dataclasses
import shutil

import pytest

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.runtime.artifact import manifest as manifests
from mlc_amd.runtime.artifact.artifact import Artifact
from mlc_amd.runtime.artifact.manifest import FORMAT_VERSION
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools.commands import inspect
from tests.dev.fuzz import resealing

OUTSIDE = "../outside.so"


@pytest.fixture
def folder(demo_artifact, tmp_path):
    """A copy of the bundled model's artifact."""
    return shutil.copytree(demo_artifact, tmp_path / "model")


def at(manifest, *place):
    for key in place:
        manifest = manifest[key]
    return manifest


def put(value, *place):
    """A change that puts a value somewhere."""

    def change(manifest):
        at(manifest, *place[:-1])[place[-1]] = value

    return change


def cut(*place):
    """A change that removes a key."""

    def change(manifest):
        del at(manifest, *place[:-1])[place[-1]]

    return change


def add(count, *place):
    """A change of a number."""

    def change(manifest):
        at(manifest, *place[:-1])[place[-1]] += count

    return change


def both(*changes):
    def change(manifest):
        for one in changes:
            one(manifest)

    return change


ARGUMENTS = ("functions", "decode", "launches", 0, "args")
CHANGES = {
    # types
    "model": (put(3, "model"), "key model: expected object, got int"),
    "no model": (cut("model"), "missing required field model"),
    "rows": (put("1", "functions", "decode", "rows"), r"key functions\['decode'\].rows: expected int, got str"),
    "negative": (put(-1, "kv", 3, "shape", 1), r"key kv\[3\].shape\[1\]: expected int >= 1"),
    "huge": (put(10**30, "arena_bytes"), "key arena_bytes: expected int <= 1099511627776"),
    "true": (put(True, "context"), "key context: expected int, got bool"),
    "sampling": (put({"temperature": "hot"}, "sampling"), "key sampling.temperature: expected float"),
    "target": (put("abacus", "target", "kind"), "key target.kind: invalid enum value 'abacus'"),
    # files
    "outside": (put({"x": OUTSIDE}, "libraries"), r"key libraries\['x'\]: expected str matching"),
    "listed outside": (put({"bytes": 1, "sha256": "0" * 64}, "files", OUTSIDE), "key files: expected str matching"),
    "no files": (put({}, "files"), "key files"),
    "not listed": (cut("files", "tokenizer.json"), "key files: tokenizer.json is used and not listed"),
    "weights": (cut("files", "weights.safetensors"), "key files: weights.safetensors is missing"),
    # sizes
    "kv shape": (add(64, "kv", 0, "shape", 1), "kv 'k.0' is float16"),
    "kv type": (put("int8", "kv", 0, "dtype"), "kv 'k.0' is int8"),
    "pages": (add(1, "kv", 0, "shape", 0), r"key kv\[0\].shape: more than 32 pages"),
    "pages of one": (add(-1, "kv", 3, "shape", 0), r"key kv\[3\].shape: others of its span have 32 pages"),
    "span": (put(64, "kv", 0, "span"), r"key io\['pages.64'\]: it must be int32 \[64, 32\], not nothing"),
    "context": (put(4096, "context"), r"key io\['pages.0'\]: it must be int32 \[64, 64\], not int32 \[64, 32\]"),
    "vocabulary": (put(9000, "model", "vocab"), "key model.vocab: 9000 tokens do not go with 8192 logits"),
    "io": (put([1], "io", "tokens", "shape"), r"key io\['tokens'\]: it must be int32 \[512\], not int32 \[1\]"),
    "one function": (put(1024, "functions", "prefill_512", "rows"), r"key io\['rows'\]"),
    "arena": (put(64, "arena_bytes"), "beyond the arena's 64 bytes"),
    "offset": (put(8, *ARGUMENTS, 6, 1), "offset 8 is no multiple of 64"),
    "far": (put(1 << 39, *ARGUMENTS, 6, 1), "beyond the arena's"),
    "arena shape": (put([1, 1024], *ARGUMENTS, 6, 3), r"the kernel takes float32 \[1, 512\]"),
    "parameter": (put([1, 256], "kernels", 0, "params", 6, "shape"), r"the kernel takes float32 \[1, 256\]"),
    "weight": (put("blk.0.attn_norm.weight", *ARGUMENTS, 2, 1), "weight 'blk.0.attn_norm.weight' is float32"),
    "no weight": (put("x", *ARGUMENTS, 2, 1), "there is no weight 'x'"),
    "role": (put(["io", "tokens"], *ARGUMENTS, 2), "is no place for its role, weight"),
    "fewer": (cut(*ARGUMENTS, 6), "6 arguments instead of 7"),
    "no kernel": (put("x", "functions", "decode", "launches", 0, "kernel"), "there is no such kernel"),
    "planes": (put([1], "tensors", "token_embd.weight/Q4", "shape"), r"key tensors\['token_embd.weight/Q4'\]"),
    # pages of a cache are as many as a runtime allocates
    "output in a cache": (
        both(
            lambda manifest: manifest["kv"].append(manifest["kv"][0] | {"name": "x", "shape": [32, 512], "span": 0}),
            put("float32", "kv", -1, "dtype"),
            put(["kv", "x"], "functions", "prefill_512", "launches", 0, "args", 6),
        ),
        "kv 'x' has a span, its role is output",
    ),
    "no span": (cut("kv", 0, "span"), "kv 'k.0' lacks a span, its role is cache"),
    "two spans": (
        both(put(64, "kv", 0, "span"), put({"dtype": "int32", "shape": [64, 32]}, "io", "pages.64")),
        "'pages.64' is not the table of all its caches",
    ),
    "draw": (put(["bits", 3], "tensors", "token_embd.weight/Q4", "draw"), "with its parameters"),
    "weight bytes": (add(1, "weight_bytes"), "key weight_bytes"),
    # functions
    "no decode": (cut("functions", "decode"), "there is none for one row, 'decode'"),
    "single": (put(9, "functions", "decode", "single"), r"key functions\['decode'\]: 1 rows, 9 single ones"),
    "samples": (put(False, "functions", "decode", "samples"), r"key functions\['decode'\].samples"),
    # what the kernels were compiled for
    "both sides": (
        both(put([1, 64], "kernels", 0, "params", 6, "shape"), put([1, 64], *ARGUMENTS, 6, 3)),
        "has other kernels than manifest.json describes",
    ),
    "another place": (add(64, *ARGUMENTS, 6, 1), "has other kernels than manifest.json describes"),
    "a launch twice": (
        lambda manifest: manifest["functions"]["decode"]["launches"].insert(0, at(manifest, *ARGUMENTS[:4])),
        "has other kernels than manifest.json describes",
    ),
    "no such weight": (cut("tensors", "token_embd.weight/Q4"), "has other kernels than manifest.json describes"),
    "few tokens": (add(-1, "model", "vocab"), "has other kernels than manifest.json describes"),
    "flags": (put([], "target", "flags"), "has other kernels than manifest.json describes"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_disagrees_is_refused(folder, name):
    change, message = CHANGES[name]
    content = resealing.content(folder)
    change(content)
    resealing.reseal(folder, content)
    with pytest.raises(UserError, match=message) as error:
        Artifact.open(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_what_was_not_changed_is_opened(folder):
    resealing.reseal(folder, resealing.content(folder), interfaces=True)
    assert Artifact.open(folder, verify=True).manifest["context"] == 2048


def test_what_the_description_lacks_is_found(folder):
    """It would be lost when the manifest is read."""
    content = resealing.content(folder)
    manifests.check_described(folder)
    content["kernels"][3]["new"] = 1
    resealing.reseal(folder, content)
    with pytest.raises(ValueError, match=r"kernels\[3\].new"):
        manifests.check_described(folder)


def test_what_only_people_read_is_shown_or_refused(folder, capsys):
    """The checks of a manifest do not change it: kernels do not depend on it."""
    content = resealing.content(folder)
    content["model"]["layers"] = [{"mixer": [1]}, {"mixer": {"heads": []}}, {}]
    resealing.reseal(folder, content)
    inspect.run(str(folder), options=CompileOptions())
    assert "[1] in layers 0" in capsys.readouterr().out
    content["formats"]["q9"] = content["formats"].pop("q4_k")
    resealing.reseal(folder, content)
    with pytest.raises(UserError, match="unknown weight format 'q9'"):
        inspect.run(str(folder), options=CompileOptions())


def test_the_description_has_all_of_the_model():
    assert set(manifests.ManifestModel.__annotations__) == {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b'{"format": 13}', "is damaged or was changed"),
        (b'{"format": 6, "x": [1]}', f"artifact format 6, this version reads {FORMAT_VERSION}"),
        (b'{"format": "9"}', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (manifests.text({"context": float("nan")}, {}).encode(), "is damaged"),
    ],
)
def test_other_content(folder, data, message):
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        Artifact.open(folder)
    assert "\n" not in str(error.value)


def test_a_newer_format_is_told_from_damage(folder, monkeypatch):
    content = resealing.content(folder)
    monkeypatch.setattr(manifests, "FORMAT_VERSION", FORMAT_VERSION + 1)
    resealing.reseal(folder, content | {"new": 1})
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"artifact format {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}"):
        Artifact.open(folder)


def test_every_part_counts(folder):
    """Of damage that leaves JSON and types as they are."""
    path = folder / "manifest.json"
    data = path.read_bytes()
    for place in range(0, len(data), len(data) // 20):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(UserError, match="damaged"):
            Artifact.open(folder)
