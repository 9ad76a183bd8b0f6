"""Fuzzes the loading of artifacts: python -m tests.dev.fuzz.artifacts --target cpu --journal FILE.

A small model (--model: a name of base_models.py) is compiled once. Each case is a copy of it with a change: of bytes
("damage"), as disks do it, which must be refused or have no effect; or of a manifest, a header or a tokenizer whose
checksums are then made right again ("resealed"), which must be refused or load without harm: it may be a good model,
but another one ("accepted"). Accepted copies answer a prompt, greedily. On target rocm a stand-in for HIP checks that
every launch gets as much memory as its kernel was compiled for. Native code is never changed without its checksum
showing it.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlc_amd.runtime.artifact.artifact import WEIGHTS, Artifact
from mlc_amd.runtime.artifact.manifest import MANIFEST, is_draft
from mlc_amd.runtime.artifact.weight_block import byte_count
from mlc_amd.runtime.devices.opening import open_device
from mlc_amd.runtime.engine.encoder import Encoder
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.tools.commands import inspect
from tests.dev import hip_recorder
from tests.dev.fuzz import fuzzing, mutations, resealing
from tests.dev.fuzz.fuzzing import Case, Limits

ARCHS = {"cpu": "x86-64-v2", "vulkan": "generic", "rocm": "gfx1100"}
CONTEXT, PROMPT, TOKENS = "64", "a b c", 4
# Mesa's CPU driver compiles a model's shaders for seconds, and reserves more memory than it uses.
LIMITS = {"cpu": Limits(), "rocm": Limits(), "vulkan": Limits(seconds=30, memory=4 << 30)}
JSON_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Base:
    """The good artifact, and what it answers."""

    folder: Path
    target: str
    answer: Any

    def copy(self) -> Path:
        """A copy that may be changed: its files are links, so they are replaced, not written."""
        to = Path(tempfile.mkdtemp(dir=self.folder.parent))
        for file in self.folder.iterdir():
            os.link(file, to / file.name)
        return to


def compiled(place: Path, target: str, model: str) -> Path:
    """The artifact of a small model, compiled by another process."""
    folder = place / f"{target}-base"
    command = [sys.executable, "-m", "tests.dev.base_models", model, target, ARCHS[target], CONTEXT]
    subprocess.run([*command, str(folder)], check=True)
    return folder


# ---- what is asked of a copy


def engine(artifact: Artifact) -> Engine:
    """An engine that calls all kinds of functions of an artifact: those that guess, too, where it has them."""
    made = Engine(artifact, open_device(artifact, threads=1))
    if any(map(is_draft, artifact.manifest["functions"])):
        made.speculate(made.own_draft())
    return made


def encoded(artifact: Artifact) -> list[np.ndarray]:
    """What an encoder makes of two texts."""
    with Encoder(artifact, open_device(artifact, threads=1)) as encoder:
        found = encoder.encode(encoder.ids([[i % encoder.vocab for i in range(20)], [1]]))
        assert all(rows.shape[1] == encoder.features for rows in found)
        return found


def answer(folder: Path, target: str, declared: dict[str, list[int]]) -> Any:
    """Looks at an artifact, loads it and uses it. declared: rocm: bytes of the arguments of each symbol."""
    with contextlib.redirect_stdout(io.StringIO()):
        inspect.run(str(folder), plan=True, tensors=True, options=CompileOptions())
    artifact = Artifact.open(folder)
    try:
        if target == "rocm":
            return _launches(artifact, declared)
        if artifact.manifest["model"]["encoder"]:
            return [rows.tolist() for rows in encoded(artifact)]
        with engine(artifact) as used:
            text = "".join(piece.text for piece in used.generate(PROMPT, max_tokens=TOKENS, temperature=0.0))
            logits, chosen = used.prefill(used.tokenizer.encode(PROMPT)), []
            for _ in range(TOKENS):
                chosen.append(int(np.argmax(logits)))
                logits = used.decode(chosen[-1])
            return text, chosen
    finally:
        artifact.close()


def _launches(artifact: Artifact, declared: dict[str, list[int]]) -> list:
    """What the device launches when it loads the artifact."""
    from mlc_amd.runtime.devices.hip.device import HipDevice

    def kernel(symbol: str, sizes: list[int]):
        def run(_, *arrays):
            for i, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
                assert len(array) >= size, f"{symbol}: {len(array)} bytes after argument {i} instead of {size}"

        return len(sizes), run

    kernels = {symbol: kernel(symbol, sizes) for symbol, sizes in declared.items()}
    recorder = hip_recorder.Recorder(kernels, gpus=[{"gcnArchName": ARCHS["rocm"].encode()}])
    device = HipDevice(artifact, bindings=recorder)
    device.close()
    return recorder.launched


def declared_sizes(folder: Path) -> dict[str, list[int]]:
    """Bytes of the arguments of each launch, by symbol; empty without launches of target rocm. Of caches and states one
    page or cell: tables say which of them are used."""
    content = resealing.content(folder)
    params = {
        kernel["name"]: [
            byte_count(p["dtype"], p["shape"][p["role"] in ("cache", "states") :]) for p in kernel["params"]
        ]
        for kernel in content["kernels"]
    }
    found = {}
    for name, launched in content["launches"].get(ARCHS["rocm"], {}).items():
        sizes = [*params[name], *launched["scratch"]]
        found |= {step["symbol"]: [sizes[i] for i in step["args"]] for step in launched["steps"]}
    return found


# ---- changes


def replace(file: Path, data: bytes) -> None:
    file.unlink()
    file.write_bytes(data)


def damage(name: str, folder: Path, draw: random.Random) -> str:
    data, what = mutations.bytes_changed((folder / name).read_bytes(), draw)
    replace(folder / name, data)
    return what


def damage_header(folder: Path, draw: random.Random) -> str:
    """Of the weights; their size stays, and what is after the header."""
    data = (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    head, what = mutations.bytes_changed(data[:end], draw)
    replace(folder / WEIGHTS, head[:end].ljust(end) + data[end:])
    return what


def resealed_manifest(folder: Path, draw: random.Random) -> str:
    changed, what = mutations.json_changed(resealing.content(folder), draw)
    if isinstance(changed, dict):
        resealing.reseal(folder, changed)
    return what


def resealed_header(folder: Path, draw: random.Random) -> str:
    data = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    changed, what = mutations.json_changed(json.loads(data[8 : 8 + size]), draw)
    text = json.dumps(changed).encode()
    length = draw.choice([len(text)] * 8 + [0, 1, len(text) - 1, len(data), 1 << 32, (1 << 64) - 1])
    replace(folder / WEIGHTS, struct.pack("<Q", length) + text + data[8 + size :])
    resealing.reseal(folder, resealing.content(folder))
    return what


def resealed_tokenizer(folder: Path, draw: random.Random) -> str:
    name = draw.choice(JSON_FILES)
    value = json.loads((folder / name).read_text())
    changed, what = mutations.json_changed(value, draw)
    replace(folder / name, json.dumps(changed).encode())
    resealing.reseal(folder, resealing.content(folder))
    return f"{name} {what}"


def no_file(folder: Path, draw: random.Random) -> str:
    """Something else in a file's place."""
    name = draw.choice(sorted(file.name for file in folder.iterdir()))
    kind = draw.choice(("missing", "folder", "pipe", "empty", "loop", "huge"))
    (folder / name).unlink()
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "empty":
        (folder / name).touch()
    elif kind == "loop":
        (folder / name).symlink_to(name)
    elif kind == "huge":
        (folder / name).touch()
        os.truncate(folder / name, 10 << 30)
    if draw.random() < 0.5 and (folder / MANIFEST).is_file() and kind not in ("huge", "pipe"):
        resealing.reseal(folder, resealing.content(folder))
    return f"{name}: {kind}"


# By kind: how often it comes, the change, and whether an accepted copy must answer as the good one does.
KINDS: dict[str, tuple[int, Callable[[Path, random.Random], str], bool]] = {
    "damaged manifest": (3, partial(damage, MANIFEST), True),
    "damaged header": (3, damage_header, True),
    "damaged tokenizer": (1, partial(damage, "tokenizer.json"), True),
    "damaged tokenizer config": (1, partial(damage, "tokenizer_config.json"), True),
    "no file": (1, no_file, True),
    "resealed manifest": (12, resealed_manifest, False),
    "resealed header": (4, resealed_header, False),
    "resealed tokenizer": (4, resealed_tokenizer, False),
}


def make(base: Base, draw: random.Random) -> Case:
    kind = draw.choices(list(KINDS), [weight for weight, _, _ in KINDS.values()])[0]
    _, change, same = KINDS[kind]
    folder = base.copy()
    try:
        what = change(folder, draw)
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError, UserError) as error:
        what = f"cannot be written: {type(error).__name__}"  # such as a surrogate, or what has no checksum any more
    return Case(f"{base.target}: {kind}", what, partial(_act, base, folder, same))


def control(base: Base) -> Case:
    return Case(f"{base.target}: control", "", partial(_act, base, base.copy(), True))


def _act(base: Base, folder: Path, same: bool) -> bool | None:
    try:
        found = answer(folder, base.target, declared_sizes(base.folder))
        return found == base.answer or (False if same else None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def base_of(place: Path, target: str, model: str) -> Base:
    """Compiles the model, and asks it, in processes of their own."""
    folder = compiled(place, target, model)
    return Base(folder, target, fuzzing.once(partial(answer, folder, target, declared_sizes(folder))))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--target", choices=ARCHS, default="cpu")
    parser.add_argument("--model", default="dense")
    given, others = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory(prefix="mlc-amd-fuzz-") as place:
        base = base_of(Path(place), given.target, given.model)
        return fuzzing.main(__doc__, partial(make, base), partial(control, base), LIMITS[given.target], others)


if __name__ == "__main__":
    sys.exit(main())
