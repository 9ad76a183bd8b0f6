"""Opens GGUF models: checks the whole header, and reads weights on demand.

In: the path of a GGUF file, or of any part of a split one (`name-00001-of-00003.gguf`). Out: `GGUFModel`: metadata,
`ModelConfig`, and `Tensor`s whose blocks are read on demand. Any defect of the file is reported as a
`UserError` of one line; an opened model has every tensor of its architecture, in the right shape and a supported
format, within the file.

The file is not mapped into memory: if it became shorter or its disk failed, the system would end the process at the
first access to a missing page. Reading instead copies at the speed of memory, which is several times that of repacking.
"""

import math
import os
import re
import stat
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

from mlc_amd.compiler.gguf.header import FETCH_AGAIN, HEADER_LIMIT, Header, TensorEntry, parse_header
from mlc_amd.compiler.gguf.parts import graph_tensors
from mlc_amd.compiler.gguf.tensor import Tensor, row_bytes
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.registry import expected_tensors, read_config
from mlc_amd.compiler.models.tensors import EXPERT_TABLE, is_vector, optional
from mlc_amd.runtime.closing import Closing
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.formats import FORMATS, by_gguf_type

NONE: Mapping[str, object] = MappingProxyType({})
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)  # llama.cpp's LLAMA_SPLIT_PREFIX format
_GUESSED = 1024  # a bit of general.file_type: the program that wrote the file had guessed the type
_HEADER_READS = (1 << 20, 1 << 23, HEADER_LIMIT)  # bytes read in turn until the header fits; small models fit the first


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without dimensions of 1, which some programs write and others leave out."""
    return tuple(size for size in shape if size != 1)


def check_tensors(config: ModelConfig, tensors: dict[str, Any], path: str) -> None:
    """Raises UserError (beginning with `path`) unless `tensors` are those of `expected_tensors`, with `optional` and
    unused ones in addition, and vectors are floats. Other tensors are an error too, as in llama.cpp: they belong to a
    variant, whose results would be wrong without them. Tensors get the expected dimensions of 1."""
    check_expected(dict(expected_tensors(config)), set(config.unused), tensors, path, config.architecture)


def check_expected(
    expected: Mapping[str, tuple[int, ...]], unused: set[str], tensors: dict[str, Any], path: str, architecture: str
) -> None:
    """`check_tensors`, for these names and shapes."""
    known = set(unused)
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"{path}: tensor {name} is missing; {FETCH_AGAIN}")
        beside = ((other, of) for other, of in optional(name, shape) if other not in known and other not in expected)
        for one, of in ((name, shape), *beside):
            if one in tensors:
                _check_tensor(tensors, one, of, path)
                known.add(one)
    extra = next((name for name in tensors if name not in known), None)
    if extra is not None:
        raise UserError(
            f"{path}: tensor {extra!r} is not part of a {architecture} model as supported here; "
            "use a model of the plain architecture"
        )


def _check_tensor(tensors: dict[str, Any], name: str, shape: tuple[int, ...], path: str) -> None:
    tensor = tensors[name]
    if tensor.shape != shape:
        if _plain(tensor.shape) != _plain(shape):
            raise UserError(
                f"{path}: tensor {name} has shape {tensor.shape}, expected {shape}; its metadata and tensors "
                "do not match: convert the model again"
            )
        tensors[name] = tensor.reshaped(shape)
    if is_vector(name, shape) and FORMATS[tensor.format].kind != "float":
        raise UserError(
            f"{path}: tensor {name} is {tensor.format}, but norms, biases and convolutions must be floats; "
            "quantize the model again"
        )


class GGUFModel(Closing):
    """A model ready to be compiled. A context manager; `close` (or leaving it) releases the file.

    path: the path that was opened, for messages; for a synthetic model its spec. files: all parts; none if synthetic.
    metadata: GGUF keys as plain Python values (of the first part of a split file).
    stored: the file's tensors by name, in file order. tensors: the tensors for the graph, in which parts replace merged
    ones, with those of the image encoder and of a draft. config: the typed hyperparameters. vision: the encoder's
    VisionFile or None; draft: the DraftFile or None. gpus, joins, sums: see `Model`; the model is not divided."""

    gpus = 1
    joins: frozenset[str] = frozenset()
    sums: frozenset[str] = frozenset()
    features = 0  # columns of the encoder's result for a row of an image

    def __init__(
        self,
        path: str,
        metadata: dict[str, object],
        tensors: dict[str, Tensor],
        config: ModelConfig,
        files: Sequence[Path] = (),
    ):
        self.path, self.metadata, self.config, self.files = path, metadata, config, tuple(files)
        self._opened: Sequence[_File] = ()
        self.vision: Any = None
        self.draft: Any = None
        self.stored, self.tensors = tensors, graph_tensors(config, tensors)

    @classmethod
    def open(cls, path: str | Path, pooling: str = "", overrides: Mapping[str, object] = NONE) -> "GGUFModel":
        """Opens and checks the file (all parts of a split one). pooling: see `read_config`. overrides: metadata that
        replace the file's. Raises UserError for anything that cannot be compiled."""
        files = _open_parts(str(path))
        entries = [(file, entry) for file in files for entry in file.header.tensors]
        if not entries:
            raise UserError(f"{path}: this file has no tensors, only a vocabulary; give a whole model")
        shapes = {entry.name: entry.shape for _, entry in entries}
        metadata = files[0].header.metadata | dict(overrides)
        config = read_config(metadata, shapes, str(path), pooling)
        tensors = {entry.name: file.tensor(entry) for file, entry in entries}
        if len(tensors) != len(entries):
            raise UserError(f"{path}: two parts of this split model hold the same tensor; {FETCH_AGAIN}")
        for file in files:
            file.check_overlap(tensors)
        check_tensors(config, tensors, str(path))

        model = cls(str(path), metadata, tensors, config, [Path(file.path) for file in files])
        model._opened = files
        return model

    def add_vision(self, vision) -> None:
        """Adds an image encoder, a VisionFile. The model closes it."""
        self.vision, self.files = vision, (*self.files, Path(vision.path))
        self.features = self.config.hidden * (1 + len(vision.config.deepstack))
        self.tensors = {**self.tensors, **vision.tensors}

    def add_draft(self, draft) -> None:
        """Adds a draft, a DraftFile that was opened for this model's configuration. The model closes it."""
        unused = tuple(f"blk.{i}." for i in range(len(self.config.decoder_layers), len(self.config.layers)))
        own = {name: tensor for name, tensor in self.tensors.items() if not name.startswith(unused)}
        self.draft, self.files, self.config = draft, (*self.files, Path(draft.path)), draft.config
        self.tensors = own | draft.tensors

    @property
    def size(self) -> int:
        """The bytes of all parts; 0 for a synthetic model."""
        return sum(file.size for file in self._opened)

    def close(self) -> None:
        """Releases the files. Blocks that were read stay valid; reading more raises ValueError. May be called again."""
        for file in (*self._opened, *filter(None, (self.vision, self.draft))):
            file.close()

    def check_unchanged(self) -> None:
        """Raises UserError if a file was changed after it was opened."""
        for file in (*self._opened, *filter(None, (self.vision, self.draft))):
            file.check_unchanged()


def read_metadata(path: str | Path) -> dict[str, object]:
    """The metadata of any valid GGUF file (also vocabulary-only files and unsupported architectures): plain Python
    values by key."""
    file = _File(str(path))
    file.close()
    return file.header.metadata


def quantization(metadata: Mapping[str, object], totals: Mapping[str, Any]) -> str:
    """The name of the file's quantization, such as Q4_K_M. If the metadata do not say: the tensor type with the most
    bytes. totals: {tensor type: {"bytes"}}."""
    kind = metadata.get("general.file_type")
    if isinstance(kind, int) and not isinstance(kind, bool) and kind & ~_GUESSED in set(gguf.LlamaFileType):
        return gguf.LlamaFileType(kind & ~_GUESSED).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    if not totals:
        return "none"
    most = max(totals, key=lambda name: totals[name]["bytes"])
    others = totals.keys() - {most, "f32"}  # vectors are f32 in all files
    return f"mostly {most.upper()}" if others else most.upper()


def read_header(path: str | Path) -> tuple[dict[str, object], list[TensorEntry], int]:
    """(metadata, tensor directory, bytes) of any valid GGUF file, of all parts of a split one, whatever its
    architecture."""
    files = _open_parts(str(path))
    for file in files:
        file.close()
    entries = [entry for file in files for entry in file.header.tensors]
    return files[0].header.metadata, entries, sum(file.size for file in files)


def open_file(path: str) -> "_File":
    """An open file with its header, whatever its architecture."""
    return _File(path)


class _File:
    """One open file and its header."""

    def __init__(self, path: str):
        self.path, self._file = path, _open(path)
        self.close = weakref.finalize(self, os.close, self._file)
        self._status = os.fstat(self._file)
        self.size = self._status.st_size
        self.header: Header = self._parse()

    def check_unchanged(self) -> None:
        now = os.fstat(self._file)
        if (now.st_size, now.st_mtime_ns) != (self.size, self._status.st_mtime_ns):
            raise UserError(f"{self.path}: the file changed while it was read; wait until it is complete")

    def _parse(self) -> Header:
        """The header. Only the beginning of the file is read: a little first, then more if necessary."""
        for length in _HEADER_READS:
            data = self.read(0, min(length, self.size))
            try:
                return parse_header(memoryview(data), self.path)
            except UserError:
                if length >= min(self.size, HEADER_LIMIT):
                    raise
        raise AssertionError("the last length is the limit")

    def read(self, start: int, count: int) -> bytes:
        """`count` bytes from `start` on. Raises UserError if the file has become shorter, or cannot be read."""
        if not self.close.alive:
            raise ValueError(f"{self.path} is closed")
        try:
            data = os.pread(self._file, count, start)
            while len(data) < count and (more := os.pread(self._file, count - len(data), start + len(data))):
                data += more  # Linux reads at most 2 GiB in a call
        except OSError as error:
            raise _cannot_read(self.path, error) from None
        if len(data) < count:
            raise UserError(
                f"{self.path}: the file ends at byte {start + len(data)}, although it had {self.size} bytes when it "
                "was opened; wait until it is complete"
            )
        return data

    def tensor(self, entry: TensorEntry, flat: bool = False) -> Tensor:
        """The tensor of a directory entry. Raises UserError if its type is not supported, or its blocks are not inside
        the file. flat: as a matrix, also if a row has several dimensions."""
        # Tables of experts are int32; `_rows` converts them to float32, which has as many bytes.
        integers = entry.gguf_type == gguf.GGMLQuantizationType.I32 and entry.name.endswith(EXPERT_TABLE)
        supported = FORMATS["f32"] if integers else by_gguf_type(entry.gguf_type)
        if supported is None:
            try:
                kind = gguf.GGMLQuantizationType(entry.gguf_type).name
            except ValueError:
                kind = f"number {entry.gguf_type}"
            raise UserError(
                f"{self.path}: tensor {entry.name!r} has type {kind}, supported are {', '.join(FORMATS)}; "
                "use another quantization of this model"
            )
        # Leading dimensions of 1 are insignificant: GGUF's ne = (columns, rows, 1, 1).
        shape: tuple[int, ...] = entry.shape
        while len(shape) > 2 and shape[0] == 1:
            shape = shape[1:]
        if flat and len(shape) > 2:
            shape = shape[0], math.prod(shape[1:])
        columns = shape[-1] if shape else 1
        if len(shape) > 3:
            shape = (*_plain(shape[:-1]), columns)
        if len(shape) > 3:
            raise UserError(
                f"{self.path}: tensor {entry.name!r} has {len(shape)} dimensions, at most 3 are supported; "
                "convert the model again"
            )
        if columns % supported.block:
            raise UserError(
                f"{self.path}: tensor {entry.name!r} has {columns} columns, not a multiple of {supported.name}'s "
                f"block of {supported.block}; {FETCH_AGAIN}"
            )
        size = row_bytes(supported.name, columns)
        tensor = Tensor(
            entry.name, supported.name, shape, lambda start, stop: self._rows(entry.offset, size, start, stop, integers)
        )
        if entry.offset + tensor.nbytes > self.size:
            raise UserError(
                f"{self.path}: the file ends at byte {self.size}, but tensor {entry.name!r} would end at "
                f"{entry.offset + tensor.nbytes}; {FETCH_AGAIN}"
            )
        return tensor

    def check_overlap(self, tensors: dict[str, Tensor]) -> None:
        previous, end = "", 0
        for entry in sorted(self.header.tensors, key=lambda e: e.offset):
            if entry.offset < end:
                raise UserError(f"{self.path}: tensors {previous!r} and {entry.name!r} overlap; {FETCH_AGAIN}")
            previous, end = entry.name, entry.offset + tensors[entry.name].nbytes

    def _rows(self, offset: int, size: int, start: int, stop: int, integers: bool) -> np.ndarray:
        data = self.read(offset + start * size, (stop - start) * size)
        if integers:
            return np.frombuffer(data, "<i4").astype("<f4").view(np.uint8).reshape(stop - start, size)
        return np.frombuffer(data, np.uint8).reshape(stop - start, size)


def _open(path: str) -> int:
    """The file's descriptor, for reading. Raises UserError if it is not a readable file."""
    try:
        status = Path(path).stat()
        if stat.S_ISDIR(status.st_mode):
            raise UserError(f"{path}: this is a directory; give the path of the .gguf file in it")
        if not stat.S_ISREG(status.st_mode):  # before opening: a pipe would block
            raise UserError(f"{path}: this is not a regular file; give the path of a .gguf file")
        if not status.st_size:
            raise UserError(f"{path}: the file is empty; {FETCH_AGAIN}")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; check the path") from None
    except PermissionError:
        raise UserError(f"{path}: permission to read the file is denied; change its permissions") from None
    except OSError as error:
        raise _cannot_read(path, error) from None
    except ValueError:
        raise UserError(f"{path!r}: the file cannot be read (a NUL in its name); check the path") from None


def _cannot_read(path: str, error: OSError) -> UserError:
    return UserError(f"{path}: the file cannot be read ({error.strerror}); check the path and the disk")


def _open_parts(path: str) -> list[_File]:
    """The file, or all parts of the split model to which it belongs, in order."""
    file = _File(path)
    count = file.header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return [file]
    match = _SPLIT_NAME.fullmatch(path)
    if not match or int(match[3]) != count:
        raise UserError(
            f"{path}: this is a part of a model split in {count}, but its name does not end in "
            f"-0000N-of-{count:05d}.gguf; give all parts their original names"
        )
    parts = []
    for number in range(1, count + 1):
        name = f"{match[1]}-{number:05d}-of-{count:05d}.gguf"
        if not Path(name).exists():
            raise UserError(
                f"{path}: part {number} of {count} of this split model is missing; put {Path(name).name} beside it"
            )
        part = file if name == path else _File(name)
        if part.header.metadata.get("split.count") != count or part.header.metadata.get("split.no") != number - 1:
            raise UserError(f"{name}: this is not part {number} of {count} as its name says; {FETCH_AGAIN}")
        parts.append(part)
    total = parts[0].header.metadata.get("split.tensors.count")
    have = sum(len(part.header.tensors) for part in parts)
    if total != have:
        raise UserError(
            f"{path}: the parts of this split model hold {have} tensors, not the {total} announced; {FETCH_AGAIN}"
        )
    return parts
