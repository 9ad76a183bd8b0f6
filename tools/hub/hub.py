"""Models of a hub: huggingface.co, or another server of its API ($HF_ENDPOINT).

In: a name, OWNER/REPO or OWNER/REPO:QUANT (hub_files.py). Out: the path of a GGUF file, the first part of a split one,
in the cache that all programs of the hub share ($HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub).

huggingface_hub asks the server, reads the environment (HF_TOKEN, HF_HUB_OFFLINE, proxies) and lays out the cache. Its
own download begins anew after a failure and compares no hash, so files come through its HTTP function into the name
that the cache has for incomplete ones, continued from where they end, and are compared with the hub's SHA-256. It is
imported when a name is looked up in the network: a local file does not wait for it.
"""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import mlc_amd
from mlc_amd.runtime.errors import UserError
from mlc_amd.tools.hub.encoders import SNAPSHOTS, preferred
from mlc_amd.tools.hub.hub_files import File, Model, Name, candidates, choose, models
from mlc_amd.tools.terminal import display

_SHA256 = re.compile(r"[0-9a-f]{64}")  # it becomes a file's name
_CHUNK = 8 << 20  # bytes that are hashed at a time
_PATIENCE = 1.0  # seconds of waiting for another process's download, until that is told
_CLIENT: dict[str, Any] = {"library_name": "mlc-amd", "library_version": mlc_amd.__version__}


class Unavailable(UserError):
    """The hub has no such repository, or cannot be asked."""


class Unreachable(Unavailable):
    """The hub cannot be asked: there is no network, or HF_HUB_OFFLINE forbids it."""


def cached(name: Name) -> Path | None:
    """The model's file if the cache has all of it, whether or not the hub has a newer one. Without a QUANT, what the
    cache has of the repository counts."""
    for snapshot in _snapshots(_folder(name.repo)):
        found = candidates(name.quant, _whole(snapshot))
        if len(found) == 1:
            return snapshot / found[0].parts[0].path
    return None


def downloaded() -> list[tuple[Name, int]]:
    """The models that the cache has, with their bytes."""
    found: dict[Name, int] = {}
    for folder in sorted(cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in _snapshots(folder):
            for model in _whole(snapshot):
                found.setdefault(Name(repo, model.quant), model.size)
    return list(found.items())


def _snapshots(folder: Path) -> list[Path]:
    """A repository's snapshots, that of its main branch first, then the newest."""
    ref = folder / "refs" / "main"
    main = ref.read_text().strip() if ref.exists() else ""
    snapshots = (folder / SNAPSHOTS).glob("*")
    return sorted(snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def _whole(snapshot: Path) -> list[Model]:
    """The models of which all parts are there."""
    paths = [path for path in snapshot.rglob("*.gguf") if path.exists()]
    files = [File(path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in paths]
    return [model for model in models(files) if not model.missing]


def pull(name: Name, encoder: bool = True) -> Path:
    """Downloads the hub's current model into the cache, as far as it is not there, and returns its file. encoder: also
    the image encoder of the repository, where there is one. Where the hub cannot be asked, what the cache has is taken.
    Unavailable where the hub has no such repository, or cannot be asked; UserError if the name fits no model or
    several, parts of it are missing, access is denied, the disk is full, the connection broke (another call continues),
    or the hub's file is damaged."""
    try:
        files = _listed(name.repo)
    except Unreachable as error:
        if (path := cached(name)) is None:
            raise
        display.message(f"{error}; {path.name} is taken from the cache")
        return path
    model = choose(name, models(files))
    if model.missing:
        lacks = f"of the {model.count} parts of {model.title}, it lacks {', '.join(str(n + 1) for n in model.missing)}"
        raise UserError(f"{name.repo} is incomplete: {lacks}; choose another model or repository")
    parts = [model.parts[number] for number in range(model.count)]
    if encoder:
        folder, known = PurePosixPath(parts[0].path).parent, {file.path: file for file in files}
        places = (folder, PurePosixPath("."))
        found = [path for place in places for path in preferred(known) if PurePosixPath(path).parent == place]
        parts += [known[path] for path in found[:1]]
    _check_space(name.repo, parts)
    paths = [_fetch(name.repo, file) for file in parts]
    return paths[0]


def listing(repo: str) -> list[Model]:
    """The models that the hub has in that repository. Raises Unavailable, or UserError for other answers."""
    return models(_listed(repo))


def _listed(repo: str) -> list[File]:
    """The files of that repository. Raises as `listing`."""
    from huggingface_hub import HfApi, constants

    try:
        with _explained(repo):
            info = HfApi(**_CLIENT).model_info(repo, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{constants.ENDPOINT} does not answer as a hub does: check HF_ENDPOINT and proxies") from error
    found = []
    for one in info.siblings or ():
        digest = one.lfs.sha256 if one.lfs and _SHA256.fullmatch(one.lfs.sha256) else None
        found += [File(one.rfilename, one.size or 0, digest)] if one.rfilename.isprintable() else []
    return found


def cache() -> Path:
    """The hub's cache on this machine."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder(repo: str) -> Path:
    """A repository's part of the cache: blobs/ by hash, snapshots/COMMIT/ with links to them, refs/main with a
    commit."""
    return cache() / f"models--{repo.replace('/', '--')}"


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _check_space(repo: str, files: list[File]) -> None:
    """UserError if the disk has no room for what is still to come."""
    to_come = 0
    for file in files:
        if file.sha256 and not (blob := _folder(repo) / "blobs" / file.sha256).exists():
            to_come += file.size - (_partial(blob).stat().st_size if _partial(blob).exists() else 0)
    place = next(path for path in (cache(), *cache().absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if to_come > free:
        raise UserError(
            f"{cache()}: the disk has {display.size(free)} free, the model needs {display.size(to_come)} more; "
            "free some space, or set HF_HUB_CACHE to a folder on another disk"
        )


def _fetch(repo: str, file: File) -> Path:
    """One file in the cache, complete and verified."""
    from filelock import Timeout  # of what huggingface_hub locks with
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import WeakFileLock, disable_progress_bars, enable_progress_bars

    # Larger files come through the hub's own protocol (Xet) alone, which verifies them, but cannot be continued.
    ours = file.sha256 is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    folder = _folder(repo)
    with _explained(repo):
        if ours and not (blob := folder / "blobs" / str(file.sha256)).exists():
            lock = cache() / ".locks" / folder.name / f"{file.sha256}.lock"  # where huggingface_hub locks this file
            blob.parent.mkdir(parents=True, exist_ok=True)
            lock.parent.mkdir(parents=True, exist_ok=True)
            disable_progress_bars()
            with ExitStack() as held:
                try:
                    held.enter_context(WeakFileLock(lock, timeout=_PATIENCE))
                except Timeout:
                    display.message(f"waiting for another process, which downloads {file.path}")
                    held.enter_context(WeakFileLock(lock))
                if not blob.exists():
                    _download(repo, file, blob)
        elif not ours and sys.stderr.isatty():
            enable_progress_bars()
        try:
            return Path(hf_hub_download(repo, file.path, **_CLIENT))  # links what is there
        except ValueError as error:  # a file that is too large for HTTP, where Xet's package is missing
            raise UserError(f"{file.path} of {repo}: {_words(error)}") from error


def _download(repo: str, file: File, blob: Path) -> None:
    """Completes `blob`, whose hash and size are those of `file`, from what an earlier call may have left of it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    partial, title = _partial(blob), f"downloading {file.path} ({display.size(file.size)}) from {repo}"
    with display.transfer_progress(title) as progress:
        with _Counted(partial, lambda done: progress("download", done, file.size)) as out:
            if out.tell() > file.size:
                out.truncate(0)
                out.seek(0)
            try:
                if out.tell() < file.size:
                    url, headers = hf_hub_url(repo, file.path), build_hf_headers(**_CLIENT)
                    http_get(url, out, resume_size=out.tell(), headers=headers)
            except HfHubHTTPError:
                raise
            except _http_error() as error:
                out.flush()
                raise UserError(
                    f"the connection broke at {display.size(out.tell())} of {display.size(file.size)} of {file.path} "
                    f"({_words(error)}): the same command continues there"
                ) from error
        size = partial.stat().st_size
        damage = f"{size} bytes, not {file.size}" if size != file.size else ""
        if not damage and _sha256(partial, lambda done: progress("verify", done, file.size)) != file.sha256:
            damage = "another SHA-256 than announced"
        if damage:
            partial.unlink()
            raise UserError(
                f"{file.path} of {repo} arrived with {damage}, and is deleted: try again, and tell the repository's "
                "owner if it stays so"
            )
    partial.replace(blob)


class _Counted(io.BufferedWriter):
    """A file that is appended to, and tells `progress` its length after each write."""

    def __init__(self, path: Path, progress: Callable[[int], None]):
        super().__init__(io.FileIO(path, "a"))
        self._progress = progress

    def write(self, data, /) -> int:
        count = super().write(data)
        self._progress(self.tell())
        return count


def _sha256(path: Path, progress: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            progress(file.tell())
    return digest.hexdigest()


def _http_error() -> type[Exception]:
    """The base class of errors of the HTTP library that huggingface_hub is built on: httpx or its successor."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    return HTTPError


def _words(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turns the errors of huggingface_hub and of the disk into UserErrors, with these as their cause."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it warns of each attempt that fails
    endpoint = constants.ENDPOINT
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise Unreachable(f"HF_HUB_OFFLINE is set, and {endpoint} not asked for {repo}") from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{repo} is gated: accept its terms at {endpoint}/{repo}, and set HF_TOKEN to a token of your account "
            f"({endpoint}/settings/tokens)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise Unavailable(f"{endpoint} has no model {repo}; if it is private, set HF_TOKEN") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise UserError(f"{endpoint} answers {status} for {repo}: {_STATUS.get(status, _words(error))}") from error
    except (_http_error(), errors.LocalEntryNotFoundError) as error:
        reason = _words(error.__cause__ or error)
        raise Unreachable(f"cannot reach {endpoint} for {repo} ({reason})") from error
    except OSError as error:
        raise UserError(
            f"{cache()}: {error.strerror or error}; free some space there, or set HF_HUB_CACHE to a folder with room "
            "that you may write to"
        ) from error


_STATUS = {
    401: "it does not know the token in HF_TOKEN (or that of `hf auth login`)",
    403: "the token in HF_TOKEN does not allow it",
    404: "the file is not there any more; try again",
    429: "too many requests: wait a few minutes, or set HF_TOKEN",
    **dict.fromkeys((500, 502, 503, 504), "it has a problem: try again later"),
}
