"""Downloads models of a hub: huggingface.co, or another server with the same API ($HF_ENDPOINT).

In: a name, OWNER/REPO or OWNER/REPO:QUANT (hub_files.py). Out: the path of a GGUF file, or of the first part of a split
one, in the cache that all programs of the hub share ($HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub).

huggingface_hub queries the server, reads the environment (HF_TOKEN, HF_HUB_OFFLINE, proxies) and defines the cache's
layout. Its own download starts again after a failure and compares no hash. So this module downloads files with its HTTP
function, to the name that the cache has for incomplete files, continues incomplete files, and compares them with the
hub's SHA-256. huggingface_hub is imported when a name is looked up in the network, so that local files need not wait
for it.
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

_SHA256 = re.compile(r"[0-9a-f]{64}")  # checked, because it becomes the name of a file
_CHUNK = 8 << 20  # bytes that are hashed in one piece
_PATIENCE = 1.0  # seconds of waiting for another process's download, before a message says so
_CLIENT: dict[str, Any] = {"library_name": "mlc-amd", "library_version": mlc_amd.__version__}


class Unavailable(UserError):
    """The hub has no such repository, or cannot be queried."""


class Unreachable(Unavailable):
    """The hub cannot be queried: there is no network, or HF_HUB_OFFLINE forbids it."""


def cached(name: Name) -> Path | None:
    """The model's file if the cache has the complete model; the hub may have a newer one. Without a QUANT, the models
    of the repository in the cache are considered."""
    for snapshot in _snapshots(_folder(name.repo)):
        found = candidates(name.quant, _whole(snapshot))
        if len(found) == 1:
            return snapshot / found[0].parts[0].path
    return None


def downloaded() -> list[tuple[Name, int]]:
    """The models in the cache, with their bytes."""
    found: dict[Name, int] = {}
    for folder in sorted(cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in _snapshots(folder):
            for model in _whole(snapshot):
                found.setdefault(Name(repo, model.quant), model.size)
    return list(found.items())


def _snapshots(folder: Path) -> list[Path]:
    """The snapshots of a repository: first that of its main branch, then the newest."""
    ref = folder / "refs" / "main"
    main = ref.read_text().strip() if ref.exists() else ""
    snapshots = (folder / SNAPSHOTS).glob("*")
    return sorted(snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def _whole(snapshot: Path) -> list[Model]:
    """The models in a snapshot of which all parts exist."""
    paths = [path for path in snapshot.rglob("*.gguf") if path.exists()]
    files = [File(path.relative_to(snapshot).as_posix(), path.stat().st_size) for path in paths]
    return [model for model in models(files) if not model.missing]


def pull(name: Name, encoder: bool = True) -> Path:
    """Downloads the hub's current model into the cache, unless it is there. Returns its file. encoder: whether to
    download the repository's image encoder, too, if there is one. If the hub cannot be queried, uses what the cache
    has.

    Raises Unavailable if the hub has no such repository, or cannot be queried. Raises UserError if the name fits no
    model or several, if parts of it are missing, access is denied, the disk is full, the connection broke (another call
    continues), or the hub's file is damaged.
    """
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
    """The models in a repository of the hub. Raises Unavailable, or UserError for other errors."""
    return models(_listed(repo))


def _listed(repo: str) -> list[File]:
    """The files in a repository of the hub. Raises errors like `listing`."""
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
    """The folder of the hub's cache on this machine."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder(repo: str) -> Path:
    """The folder of a repository in the cache. It has blobs/ by hash, snapshots/COMMIT/ with links to blobs, and
    refs/main with a commit."""
    return cache() / f"models--{repo.replace('/', '--')}"


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _check_space(repo: str, files: list[File]) -> None:
    """Raises UserError if the disk has no room for what is not downloaded yet."""
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
    """The path of a file in the cache, which is complete and verified. Downloads it if necessary."""
    from filelock import Timeout  # huggingface_hub locks with this package
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import WeakFileLock, disable_progress_bars, enable_progress_bars

    # Larger files can only be downloaded with the hub's own protocol (Xet). It verifies them, but they cannot be
    # continued.
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
            return Path(hf_hub_download(repo, file.path, **_CLIENT))  # makes the links to the blob
        except ValueError as error:  # a file that is too large for HTTP, and the package for Xet is missing
            raise UserError(f"{file.path} of {repo}: {_words(error)}") from error


def _download(repo: str, file: File, blob: Path) -> None:
    """Completes `blob`, of which an earlier call may have left a part. It must get the hash and size of `file`."""
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
    """A file that is appended to. Reports its length to `progress` after each write."""

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
    """The base class of the errors of huggingface_hub's HTTP library: httpx or its successor."""
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    return HTTPError


def _words(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turns errors of huggingface_hub and of the disk into UserErrors, with the original error as their cause."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would warn of each failed attempt
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
