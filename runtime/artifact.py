"""Artifacts: folders with everything that the runtime needs, written and read; the format is specified in
dist/README.md.

    manifest.json         model, target, context, plan, KV cache, checksums
    kernels.so            compiled kernels (cpu)
    weights.safetensors   packed weights, every tensor aligned to 64 bytes, mapped and never copied; only the vectors
                          in an artifact without weights. The same at every context: artifacts may share the file.
    tables.safetensors    tables by position
    tokenizer.json, tokenizer_config.json

A new artifact is written to a temporary folder beside the destination, which is renamed when it is complete: an
interrupted or failed compilation leaves nothing behind.
"""

import hashlib
import json
import mmap
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import Lock, lock, scratch

FORMAT_VERSION = 7
MANIFEST, WEIGHTS, TABLES = "manifest.json", "weights.safetensors", "tables.safetensors"
_FILES = (MANIFEST, WEIGHTS, TABLES, "kernels[.-]*", "tokenizer.json", "tokenizer_config.json")  # all that there may be
ALIGN = 64  # bytes: alignment for vector loads
PAD = "__pad_"  # prefix of the names of tensors that only fill gaps
# names in safetensors
DTYPES = {
    "uint8": "U8",
    "int8": "I8",
    "float16": "F16",
    "uint16": "U16",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
}
NUMPY = {name: np.dtype(dtype) for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the weights file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


# ---- weights


class WeightsWriter:
    """A safetensors file written out of order: the layout is fixed first, then pieces are written in any order.

    Safetensors allows no holes, so alignment gaps are tensors named `__pad_<n>`.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]):
        self.offsets, header, position = {}, {}, 0
        for spec in specs:
            if gap := -position % ALIGN:
                header[f"{PAD}{len(header)}"] = {
                    "dtype": "U8",
                    "shape": [gap],
                    "data_offsets": [position, position + gap],
                }
                position += gap
            header[spec.name] = {
                "dtype": DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.nbytes],
            }
            self.offsets[spec.name] = position
            position += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        self.start, self.total = 8 + len(text), position
        self.file = open(path, "w+b")  # noqa: SIM115 (closed by close())
        self.file.write(struct.pack("<Q", len(text)) + text)
        # Allocated now, so that a full disk is reported before minutes of work.
        if position:
            os.posix_fallocate(self.file.fileno(), self.start, position)

    def write(self, name: str, offset: int, data: np.ndarray) -> None:
        """Writes `data` at `offset` bytes into tensor `name`; may be called from several threads."""
        os.pwrite(
            self.file.fileno(),
            np.ascontiguousarray(data).data.cast("B"),
            self.start + self.offsets[name] + offset,
        )

    def close(self) -> None:
        self.file.close()


class WeightBlock(ABC):
    """All weights as one block of bytes, which devices map or copy.

    header: as in safetensors, {name: {"dtype", "shape", "data_offsets": [begin, end]}}, offsets into the block; every
    tensor begins at a multiple of 64 bytes.
    """

    def __init__(self, header: dict[str, dict]):
        self.header = header

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Tensor to (offset in the block, bytes)."""
        found = {
            name: (begin, end - begin) for name, entry in self.header.items() for begin, end in [entry["data_offsets"]]
        }
        return {name: place for name, place in found.items() if not name.startswith(PAD)}

    @property
    def total(self) -> int:
        """Bytes of the block."""
        return max((entry["data_offsets"][1] for entry in self.header.values()), default=0)

    @abstractmethod
    def chunks(self, nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
        """(offset, uint8 view) of pieces of at most `nbytes` bytes, in ascending order; gaps between tensors may be
        skipped.

        The views share memory: copy them at once, and do not write to them.
        """

    @abstractmethod
    def __getitem__(self, name: str) -> np.ndarray:
        """A tensor, for devices that work in this memory."""

    def _view(self, memory: mmap.mmap, start: int, name: str) -> np.ndarray:
        """A tensor in memory that has the block at `start`."""
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(memory, np.uint8, end - begin, start + begin)
        return raw.view(NUMPY[entry["dtype"]]).reshape(entry["shape"])

    def __contains__(self, name: str) -> bool:
        return name in self.header

    @property
    def nbytes(self) -> int:
        return sum(v["data_offsets"][1] - v["data_offsets"][0] for v in self.header.values())


class Weights(WeightBlock):
    """The mapped weights file: name to numpy array, without copies. Pages are private: the arrays are writable, the
    file is not changed."""

    def __init__(self, path: Path):
        try:
            with open(path, "rb") as f:
                (size,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(size)) if size < 1 << 28 else {}
                self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError, struct.error) as e:
            raise UserError(f"{path}: cannot read the weights ({e}); compile the model again") from e
        super().__init__({k: v for k, v in header.items() if k != "__metadata__"})
        self.start = 8 + size
        if not header or self.start + self.total > len(self.map):
            raise UserError(f"{path}: the weights file is truncated or damaged; compile the model again")

    def chunks(self, nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
        for at in range(0, self.total, nbytes):
            yield at, np.frombuffer(self.map, np.uint8, min(nbytes, self.total - at), self.start + at)
            # releases copied pages: an APU's GPU may need the memory
            page = (self.start + at) // mmap.PAGESIZE * mmap.PAGESIZE
            self.map.madvise(mmap.MADV_DONTNEED, page, min(nbytes, len(self.map) - page))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._view(self.map, self.start, name)


class Joined(WeightBlock):
    """Blocks one after the other."""

    def __init__(self, parts: Sequence[WeightBlock]):
        header, starts, end = {}, [], 0
        for part in parts:
            start = -(-end // ALIGN) * ALIGN
            starts.append(start)
            for name, entry in part.header.items():
                begin, stop = entry["data_offsets"]
                if not name.startswith(PAD):
                    header[name] = entry | {"data_offsets": [start + begin, start + stop]}
            end = start + part.total
        super().__init__(header)
        self._parts = list(zip(starts, parts, strict=True))

    def chunks(self, nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
        for start, part in self._parts:
            for at, piece in part.chunks(nbytes):
                yield start + at, piece

    def __getitem__(self, name: str) -> np.ndarray:
        return next(part for _, part in self._parts if name in part)[name]


# ---- the folder


def source_id(path: str | Path) -> str:
    """What tells a source file from others of the same name, in the manifest's `source`: a digest of where it lies."""
    return hashlib.sha256(str(Path(path).resolve()).encode()).hexdigest()[:16]


class CannotWrite(UserError):
    """An artifact cannot be written to `path`; `reason` is the system's."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"cannot write {path}: {reason}; free some space or choose another output with -o")
        self.path, self.reason = path, reason


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def new_artifact(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` if the `with` block succeeds, and is deleted otherwise. Only an older
    artifact is replaced; of a link, what it points to. CannotWrite where the folder or the disk does not take it."""
    _check_output(Path(path))
    path = Path(os.path.realpath(path))
    try:
        with scratch(path.parent, path.name) as temporary:
            yield temporary
            _replace(path, temporary)
    except OSError as e:
        raise CannotWrite(path, e.strerror or str(e)) from e


def _replace(path: Path, new: Path) -> None:
    """Renames `new` to `path`; what was there is deleted."""
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


def _check_output(path: Path) -> None:
    """UserError where an artifact must not be written: only what an earlier compilation made is replaced."""
    if not path.exists():
        return
    if not path.is_dir() or (not (path / MANIFEST).exists() and any(path.iterdir())):
        raise UserError(f"{path} exists and is not a compiled model; choose another output with -o")
    if Path.cwd().is_relative_to(path.resolve()):
        raise UserError(f"{path} is the current directory or one above it; choose a new folder with -o")
    others = sorted(file.name for file in path.iterdir() if not any(map(file.match, _FILES)))
    if others:
        raise UserError(
            f"{path} also holds {', '.join(others[:3])}{' ..' if len(others) > 3 else ''}, which no compilation made; "
            "move that away, or choose another output with -o"
        )


def write_manifest(directory: Path, manifest: dict, known: Mapping[str, dict] = MappingProxyType({})) -> None:
    """Adds size and checksum of every file in `directory`, then writes manifest.json. known: those that need not be
    computed, as in the manifest's `files`."""
    files = {
        file.name: known.get(file.name) or {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(directory.iterdir())
    }
    (directory / MANIFEST).write_text(manifest_text(manifest, files))


def manifest_text(manifest: dict, files: dict[str, dict]) -> str:
    """manifest.json of these files."""
    return json.dumps({"format": FORMAT_VERSION, **manifest, "files": files}, indent=1)


class Artifact:
    """A verified artifact on disk. `manifest` is the parsed manifest.json (see dist/README.md)."""

    def __init__(self, path: Path, manifest: dict, held: Lock | None = None):
        """held: the lock of the folder, which lasts until `close`: nobody removes it from the cache meanwhile."""
        self.path, self.manifest, self._lock = path, manifest, held
        self._weights: WeightBlock | None = None

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> "Artifact":
        """Verifies version, presence, sizes and checksums of all files; the checksum of the weights only with `verify`,
        because that reads all of them.

        UserError when the folder is no artifact, of another version, or damaged.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(f"{path}: no such compiled model; make one with: mlc-amd compile MODEL.gguf")
        held = lock(path)
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            version, files = manifest["format"], manifest["files"]
        except FileNotFoundError as e:
            raise UserError(
                f"{path} is not a compiled model (no {MANIFEST}); make one with: mlc-amd compile MODEL.gguf"
            ) from e
        except OSError as e:
            raise UserError(
                f"{path / MANIFEST} cannot be read ({e.strerror}); check its permissions and the disk"
            ) from e
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path / MANIFEST} is damaged ({e}); compile the model again") from e
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path} has artifact format {version}, this version reads {FORMAT_VERSION}; compile the model again"
            )
        for name, entry in files.items():
            file = path / name
            if not file.is_file():
                raise UserError(f"{path}: {name} is missing; compile the model again")
            if file.stat().st_size != entry["bytes"]:
                raise UserError(
                    f"{file} has {file.stat().st_size} bytes instead of {entry['bytes']}; compile the model again"
                )
            if (name != WEIGHTS or verify) and sha256(file) != entry["sha256"]:
                raise UserError(f"{file} is corrupted (checksum differs); compile the model again")
        return cls(path, manifest, held)

    @property
    def weights(self) -> WeightBlock:
        """The weights file, or random weights for an artifact without weights."""
        if self._weights is None:
            held: WeightBlock = Weights(self.path / WEIGHTS)
            if self.random_weights:
                from mlc_amd.runtime.random_weights import RandomWeights  # imports this module

                held = RandomWeights(held, self.manifest["tensors"])
            tables = [Weights(self.path / TABLES)] if (self.path / TABLES).exists() else []
            self._weights = Joined([held, *tables])
        return self._weights

    def close(self) -> None:
        """Lets go of the weights' mapping and of the folder."""
        self._weights = None
        if self._lock:
            self._lock.close()

    @property
    def random_weights(self) -> bool:
        """Whether the artifact has no weights: devices fill in random ones, for measurements."""
        return self.manifest.get("weights", "file") == "random"
