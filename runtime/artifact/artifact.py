"""Writes and reads artifacts: folders with everything that the runtime needs. dist/README.md specifies the format.

    manifest.json         model, target, context, plan, KV cache, checksums
    kernels.so            compiled kernels (cpu)
    relay.bin             host machine code of the relay between GPUs that share a model by tensor
    weights.safetensors   packed weights, every tensor aligned to 64 bytes; devices map or read the file. It is the same
                          at every context, so artifacts may share it. An artifact without weights has only the vectors.
    tables.safetensors    tables by position
    tokenizer.json, tokenizer_config.json

A new artifact is written to a temporary folder next to the destination. The folder is renamed when it is complete, so
an interrupted or failed compilation leaves no files.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from mlc_amd.runtime.artifact import interface, manifest_check
from mlc_amd.runtime.artifact.manifest import ADVICE, MANIFEST, FileFacts, Manifest, ManifestBody, read, text
from mlc_amd.runtime.artifact.random_weights import RandomWeights
from mlc_amd.runtime.artifact.weight_block import JoinedBlocks, WeightBlock
from mlc_amd.runtime.artifact.weights_file import Weights, header_digest
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.exchange_layout import RELAY
from mlc_amd.runtime.folders import Lock, lock, scratch, unwritable
from mlc_amd.runtime.garbage import no_collection

WEIGHTS, TABLES = "weights.safetensors", "tables.safetensors"
# patterns of all files that an artifact may have
_FILES = (MANIFEST, WEIGHTS, TABLES, "kernels[.-]*", RELAY, "tokenizer.json", "tokenizer_config.json")


def source_id(path: str | Path) -> str:
    """The id of a source file in the manifest's `source`: a digest of its path, as file names may be equal."""
    return hashlib.sha256(os.fsencode(Path(path).resolve())).hexdigest()[:16]


class CannotWrite(UserError):
    """An artifact cannot be written to `path`. reason: the system's error message."""

    def __init__(self, path: Path, error: OSError):
        super().__init__(unwritable(path, error, "choose another output with -o"))
        self.path, self.reason = path, error.strerror or str(error)


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def new_artifact(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` if the `with` block succeeds, and is deleted otherwise. Only an older
    artifact may be replaced. If `path` is a link, its target is replaced. Raises CannotWrite for errors of the file
    system, and UserError as `check_output` does."""
    check_output(Path(path))
    path = Path(os.path.realpath(path))
    try:
        with scratch(path.parent, path.name) as temporary:
            yield temporary
            _replace(path, temporary)
    except OSError as e:
        raise CannotWrite(path, e) from e


def _replace(path: Path, new: Path) -> None:
    """Renames `new` to `path`. Deletes what `path` was before; restores it if the renaming fails."""
    if not path.exists():
        new.rename(path)
        return
    with scratch(path.parent, path.name) as temporary:
        old = path.rename(temporary / path.name)
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise


def check_output(path: Path) -> None:
    """Raises UserError if no artifact may be written to `path`. Only an earlier artifact without other files may be
    replaced, and not if the current directory is in it."""
    _check_name(path)
    if not path.exists():
        return
    if not path.is_dir() or (not (path / MANIFEST).exists() and any(path.iterdir())):
        raise UserError(f"{path} exists and is not a compiled model; choose another output with -o")
    if Path.cwd().is_relative_to(path.resolve()):
        raise UserError(f"{path} is the current directory or one above it; choose a new folder with -o")
    others = sorted(file.name for file in path.iterdir() if not any(map(file.match, _FILES)))
    if others:
        raise UserError(
            f"{path} also holds {', '.join(others[:3])}{' ..' if len(others) > 3 else ''}, which no compilation wrote; "
            "move that away, or choose another output with -o"
        )


def _check_name(path: Path) -> None:
    """Raises UserError for a path that is not UTF-8: libraries for an artifact's files do not accept it."""
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: the path of a compiled model must be UTF-8; choose another one") from None


def write_manifest(directory: Path, manifest: ManifestBody, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes manifest.json: `manifest`, and the facts of every file in `directory`. known: SHA-256 of files by name,
    which are then not read."""
    files = {file.name: facts(file, known.get(file.name)) for file in sorted(directory.iterdir())}
    (directory / MANIFEST).write_text(text(manifest, files))


def facts(file: Path, digest: str | None = None) -> FileFacts:
    """Size and checksums of a file. digest: its SHA-256, if known."""
    found: FileFacts = {"bytes": file.stat().st_size, "sha256": digest or sha256(file)}
    if header := _header(file):
        found["header"] = header
    return found


def _header(file: Path) -> str | None:
    """The checksum of the header of a safetensors file; None for other files."""
    return header_digest(file) if file.suffix == ".safetensors" else None


def write_interfaces(directory: Path, manifest: ManifestBody) -> None:
    """Appends to each library of kernels the digest of the kernels' interface."""
    plain = json.loads(json.dumps(manifest))
    for arch, library in plain["libraries"].items():
        interface.append(directory / library, interface.digest(plain, arch))


class Artifact:
    """An artifact on disk. After `open`, its parts have been checked against one another. manifest: the content of
    manifest.json (dist/README.md)."""

    def __init__(self, path: Path, manifest: Manifest, held: Lock | None = None):
        """held: the lock of the folder, kept until `close`. It prevents the removal of the folder from the cache."""
        self.path, self.manifest, self._lock = path, manifest, held
        self._weights: WeightBlock | None = None

    @classmethod
    @no_collection()  # a manifest has many objects and no cycles
    def open(cls, path: str | Path, verify: bool = False) -> "Artifact":
        """Opens an artifact. Checks the manifest, and the presence, sizes and checksums of all files. verify: also
        checks the checksum of the weights, which reads all of them. Raises UserError for a folder that is no artifact,
        has another version of the format, or is damaged."""
        path = Path(path)
        if path.is_file():
            made = f"a folder made by `mlc-amd compile {path.name}`" if path.suffix == ".gguf" else "such a folder"
            raise UserError(f"{path} is a file, and a compiled model is a folder; give {made}")
        if not path.is_dir():
            raise UserError(f"{path}: no such compiled model; make one with: mlc-amd compile MODEL.gguf")
        _check_name(path)
        held = lock(path)
        if not (path / MANIFEST).exists():
            raise UserError(
                f"{path} is not a compiled model (no {MANIFEST}); make one with: mlc-amd compile MODEL.gguf"
            )
        artifact = cls(path, read(path), held)
        artifact._check_files(verify)
        try:
            manifest_check.check(artifact.manifest, artifact.weights.header)
        except manifest_check.ManifestFault as fault:
            raise UserError(f"{path / MANIFEST} is damaged ({fault}); {ADVICE}") from None
        for arch, library in artifact.manifest["libraries"].items():
            if interface.of_file(path / library) != interface.digest(artifact.manifest, arch):
                raise UserError(f"{path / library} has other kernels than {MANIFEST} describes; {ADVICE}")
        return artifact

    def _check_files(self, verify: bool) -> None:
        files = self.manifest["files"]
        if WEIGHTS not in files:
            raise UserError(f"{self.path / MANIFEST} is damaged (key files: {WEIGHTS} is missing); {ADVICE}")
        for name, entry in files.items():
            file = self.path / name
            if not file.is_file():
                raise UserError(f"{self.path}: {name} is missing; {ADVICE}")
            if file.stat().st_size != entry["bytes"]:
                raise UserError(f"{file} has {file.stat().st_size} bytes instead of {entry['bytes']}; {ADVICE}")
            whole = name != WEIGHTS or verify
            if (whole and sha256(file) != entry["sha256"]) or entry.get("header") != _header(file):
                raise UserError(f"{file} is corrupted (checksum differs); {ADVICE}")

    @property
    def weights(self) -> WeightBlock:
        """The weights file, or random weights for an artifact without weights."""
        if self._weights is None:
            self._weights = self.open_weights()
        return self._weights

    def open_weights(self) -> WeightBlock:
        """Opens the weights once more. Returns what `weights` has."""
        held: WeightBlock = Weights(self.path / WEIGHTS)
        if self.random_weights:
            held = RandomWeights(held, self.manifest["tensors"])
        tables = [Weights(self.path / TABLES)] if TABLES in self.manifest["files"] else []
        return JoinedBlocks([held, *tables])

    def release_weights(self) -> None:
        """Closes the weights, after devices have copied them to their own memory. `weights` opens them again."""
        self._weights = None

    def close(self) -> None:
        """Releases the weights' mapping and the lock of the folder."""
        self.release_weights()
        if self._lock:
            self._lock.close()

    @property
    def random_weights(self) -> bool:
        """Whether the artifact has no weights. Devices then use random ones, for measurements."""
        return self.manifest["weights"] == "random"
