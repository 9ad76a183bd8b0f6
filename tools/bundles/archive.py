"""Writes a set of files into a folder, or into a reproducible .tar.zst.

In: entries, in order. Out: the folder or the file; it is complete, or does not exist.
"""

import io
import shutil
import tarfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import unwritable

# compression levels, with about 20 and 300 MB/s; level 19 saves another tenth, but takes seven times as long
HARD, FAST = 12, 1
TIME = 315_619_200  # 1980-01-02, the time of every file: tar warns of dates in 1970
PIECE = 8 << 20


@dataclass(frozen=True)
class Entry:
    """A file to write. It has a path (with /), content (bytes, or a file), and may be executable."""

    path: str
    content: bytes | Path
    executable: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @property
    def mode(self) -> int:
        return 0o755 if self.executable else 0o644

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else open(self.content, "rb")


class _Counted:
    """A file for reading. Calls `wrote` with the number of bytes of each read."""

    def __init__(self, file: BinaryIO, wrote: Callable[[int], None]):
        self._file, self._wrote = file, wrote

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(size)
        self._wrote(len(data))
        return data


def compressor() -> Callable[[int], Any]:
    """A function: level -> an object whose compress(data) and flush() make one frame. Raises UserError if there is no
    zstd library."""
    try:
        from compression import zstd  # pyright: ignore[reportMissingImports]  (Python 3.14)
    except ImportError:
        try:
            import zstandard
        except ImportError as e:
            advice = "install it with: pip install zstandard, or give -o a folder"
            raise UserError(f".tar.zst needs the package zstandard; {advice}") from e
        return lambda level: zstandard.ZstdCompressor(level=level).compressobj()
    return lambda level: zstd.ZstdCompressor(level=level)


class _Frames(io.RawIOBase):
    """A file for tarfile that compresses what is written. Setting a level begins a new frame."""

    def __init__(self, file, make: Callable[[int], Any]):
        self._file, self._make, self._position = file, make, 0
        self._frame: Any = None

    def level(self, level: int) -> None:
        self.finish()
        self._frame = self._make(level)

    def finish(self) -> None:
        if self._frame is not None:
            self._file.write(self._frame.flush())
            self._frame = None

    def tell(self) -> int:
        return self._position

    def write(self, data) -> int:
        assert self._frame is not None, "level() begins a frame"
        for at in range(0, len(data), PIECE):
            self._file.write(self._frame.compress(bytes(data[at : at + PIECE])))
        self._position += len(data)
        return len(data)


def write_folder(path: Path, entries: Iterable[Entry], wrote: Callable[[int], None]) -> None:
    """Writes `entries` into the folder `path`, which is replaced. wrote: called with the number of bytes read since its
    last call."""
    with _renamed(path) as temporary:
        temporary.mkdir()
        for entry in entries:
            file = temporary / entry.path
            file.parent.mkdir(parents=True, exist_ok=True)
            with entry.open() as source, open(file, "wb") as target:
                shutil.copyfileobj(_Counted(source, wrote), target, PIECE)
            file.chmod(entry.mode)


def write_archive(
    path: Path, folder: str, entries: Iterable[Entry], fast: Callable[[Entry], bool], wrote: Callable[[int], None]
) -> None:
    """Writes `entries`, as files in `folder`, into the .tar.zst `path`. fast(entry): whether its content can hardly be
    compressed. wrote: see `write_folder`."""
    make = compressor()
    with _renamed(path) as temporary, open(temporary, "wb") as file:
        frames, level = _Frames(file, make), 0
        with tarfile.TarFile(fileobj=frames, mode="w", format=tarfile.GNU_FORMAT, copybufsize=PIECE) as tar:
            for entry in entries:
                if (wanted := FAST if fast(entry) else HARD) != level:
                    frames.level(level := wanted)
                member = tarfile.TarInfo(f"{folder}/{entry.path}")
                member.size, member.mtime, member.mode = entry.nbytes, TIME, entry.mode
                with entry.open() as source:
                    tar.addfile(member, _Counted(source, wrote))
        frames.finish()


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """A temporary path next to `path`, for a file or a folder. It is renamed to `path` if the `with` block succeeds,
    and deleted otherwise."""
    temporary, old = (path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{end}") for end in ("tmp", "old"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        if path.exists():
            path.rename(old)
        temporary.rename(path)
    except OSError as e:
        raise UserError(unwritable(path, e, "choose another output with -o")) from e
    finally:
        for place in (temporary, old):
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)
