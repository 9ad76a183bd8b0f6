"""The user's cache of compiled models: `$XDG_CACHE_HOME/mlc-amd` (`~/.cache/mlc-amd`).

    models/NAME-TARGET-ARCH-KEY/        an artifact
    models/NAME-TARGET-ARCH-KEY.json    its `Recipe`, and the state of the tuned records with which its plans were last
                                        compared. The modification time is the time of the artifact's last use
    weights/KEY/                        packed weights, to which artifacts have hard links (compiler/weight_store.py)

Other modules have their caches next to these. In: recipes. Out: where their artifacts are or will be compiled (`find`),
all artifacts (`entries`), and those that nobody needs (`to_prune`). `remove` does not remove an artifact that a running
process uses: the process holds a lock on its folder.
"""

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import metadata, resources
from pathlib import Path

import mlc_amd
from mlc_amd.runtime.artifact.artifact import WEIGHTS
from mlc_amd.runtime.artifact.manifest import MANIFEST
from mlc_amd.runtime.artifact.memory import CONTEXT_STEP
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.folders import alone, cache_directory, lock, scratch, sweep
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.runtime.options import CompileOptions


def models_directory() -> Path:
    return cache_directory() / "models"


def weights_directory() -> Path:
    return cache_directory() / "weights"


def file_name(text: str) -> str:
    """The text without characters that file names must not have, cut to leave room for a prefix and a suffix."""
    return re.sub(r"[^\w.-]", "-", text)[-160:]


@dataclass(frozen=True, kw_only=True)
class Recipe(CompileOptions):
    """What an artifact in the cache is made from: the path of a GGUF file or the spec of a synthetic model, and
    `resolved` options."""

    path: str | None
    synthetic: str | None

    @property
    def title(self) -> str:
        """The model's name for users."""
        return self.synthetic or Path(self.path or "").stem

    @property
    def folder(self) -> Path:
        return models_directory() / file_name(f"{self.title}-{self.target}-{self.arch}-{self.key}")

    @cached_property
    def key(self) -> str:
        """A key that changes whenever the compiled result might change: with the file, the options, this program and
        its compiler, and for "native" with the CPU. It does not change with tuned records (`_plans_hold`). Raises
        OSError if the file does not exist any more."""
        ctx = self.ctx and -(-self.ctx // CONTEXT_STEP) * CONTEXT_STEP
        parts: list[object] = [asdict(self) | {"path": "", "mmproj": "", "drafter": "", "ctx": ctx}]
        parts += [mlc_amd.__version__, metadata.version("apache-tvm"), _sources()]
        for path in filter(None, (self.path, self.mmproj, self.drafter)):
            status = Path(path).stat()
            parts += [str(Path(path).resolve()), status.st_size, status.st_mtime_ns]
        if self.arch == "native":
            parts += [platform.machine(), sorted(cpu_flags())]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]

    @cached_property
    def records(self) -> list[list]:
        """The state of the tuned records that a compilation may use, at the time of the first call."""
        return _tuned(self.target) if self.tuned != "none" else []


def find(recipe: Recipe) -> Path | None:
    """Returns the recipe's artifact, and marks it as used now. None if it is not compiled yet, or if tuning has found
    better plans since."""
    if not (recipe.folder / MANIFEST).exists() or not _plans_hold(recipe):
        return None
    record(recipe)
    return recipe.folder


def record(recipe: Recipe) -> None:
    """Writes what the recipe's artifact was made from, that its plans are up to date with `recipe.records`, and that it
    is used now."""
    files = {name: (one := getattr(recipe, name)) and os.path.abspath(one) for name in ("path", "mmproj", "drafter")}
    made = replace(recipe, **files)
    note = _note(recipe.folder)
    temporary = note.with_name(f".{note.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"recipe": asdict(made), "records": recipe.records}))
        temporary.replace(note)
    except OSError:
        temporary.unlink(missing_ok=True)  # if the cache cannot be written, this is not an error


def _note(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _plans_hold(recipe: Recipe) -> bool:
    """Whether a compilation would choose the plans that the recipe's artifact has. If the records are those of the last
    use, it would. Otherwise plans are looked up, which takes a second; new records rarely change these kernels."""
    try:
        if json.loads(_note(recipe.folder).read_text())["records"] == recipe.records:
            return True
        kernels = json.loads((recipe.folder / MANIFEST).read_text())["kernels"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    from mlc_amd.compiler.codegen.target import make_target
    from mlc_amd.compiler.tuning.database import plans_hold

    return plans_hold(kernels, make_target(recipe.target, recipe.arch, recipe.cache_type).archs, recipe.tuned)


@contextmanager
def compiling(recipe: Recipe, wait: Callable[[], object]) -> Iterator[None]:
    """The block compiles the recipe, or finds that another process just has: only one process does this at a time.
    wait: called before this process has to wait."""
    with alone(models_directory(), f"{recipe.folder.name}.compiling", wait):
        yield


# ---- the artifacts in the cache


@dataclass(frozen=True)
class Entry:
    """An artifact in the cache. recipe: None if unknown. used: seconds since the epoch. nbytes: of its own files.
    shared: bytes of its weights, which other artifacts may share. inode: of the weights' file."""

    folder: Path
    recipe: Recipe | None
    used: float
    nbytes: int
    shared: int
    inode: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def outdated(self) -> bool:
        """Whether no command would use it any more: its file has changed or does not exist, another version or a CPU
        with other instructions made it, or tuning has found better plans since."""
        try:
            return self.recipe is None or self.recipe.folder.name != self.name or not _plans_hold(self.recipe)
        except (OSError, UserError):
            return True

    @property
    def in_use(self) -> bool:
        held = lock(self.folder, exclusive=True)
        if held:
            held.close()
        return held is None


def entries() -> list[Entry]:
    """All artifacts, the last used first. Removes what killed compilations have left."""
    for folder in (models_directory(), weights_directory()):
        sweep(folder)
    found = [_entry(manifest.parent) for manifest in models_directory().glob(f"[!.]*/{MANIFEST}")]
    return sorted(filter(None, found), key=lambda entry: -entry.used)


def _entry(folder: Path) -> Entry | None:
    """The entry of a folder; None if another process has removed it."""
    try:
        files = {file.name: file.stat() for file in folder.iterdir()}
        note = _note(folder)
        used = (note if note.exists() else folder).stat().st_mtime
    except OSError:
        return None
    weights = files.pop(WEIGHTS, None)
    own = sum(status.st_blocks * 512 for status in files.values())
    shared, inode = (weights.st_blocks * 512, weights.st_ino) if weights else (0, 0)
    try:
        recipe = Recipe(**json.loads(note.read_text())["recipe"])
    except (OSError, ValueError, LookupError, TypeError, UserError):
        recipe = None
    return Entry(folder, recipe, used, own, shared, inode)


def total(found: list[Entry]) -> int:
    """The bytes of these artifacts on disk. Shared weights count once."""
    return sum(entry.nbytes for entry in found) + sum({entry.inode: entry.shared for entry in found}.values())


# ---- removal


def remove(entry: Entry) -> bool:
    """Removes an artifact. If a process uses it, changes nothing and returns False."""
    held = lock(entry.folder, exclusive=True)
    if held is None:
        return False
    # renamed first, so that there is never a half of an artifact
    with scratch(entry.folder.parent, entry.name) as temporary:
        entry.folder.rename(temporary / entry.name)
    _note(entry.folder).unlink(missing_ok=True)
    held.close()
    return True


def unused_weights() -> Iterator[tuple[Path, int]]:
    """(folder, bytes) of packed weights that no artifact uses."""
    from mlc_amd.compiler.weight_store import stored

    for home, status in stored(weights_directory()):
        if status.st_nlink == 1:
            yield home, status.st_blocks * 512


def drop_unused_weights() -> int:
    """Removes packed weights that no artifact uses. Returns their bytes."""
    found = list(unused_weights())
    for home, _ in found:
        shutil.rmtree(home, ignore_errors=True)
    return sum(nbytes for _, nbytes in found)


def to_prune(found: list[Entry], now: float, older: float | None = None, limit: float | None = None) -> list[Entry]:
    """The artifacts to be removed: outdated ones; those not used for `older` seconds; and the least recently used of
    the others, until the rest takes at most `limit` bytes."""
    kept, removed = [], []
    for entry in found:
        old = older is not None and now - entry.used > older
        (removed if old or entry.outdated else kept).append(entry)
    while limit is not None and kept and total(kept) > limit:
        removed.append(kept.pop())
    return removed


# ---- the key


def _tuned(target: str) -> list[list]:
    """Size and time of the tuned records that a compilation for this target may use. The file names are repeated from
    compiler/tuning/database.py, because importing it imports TVM, which takes too long for a model that is already
    compiled."""
    found = []
    shipped = Path(str(resources.files("mlc_amd.dist"))) / "tuned"
    for file in sorted([*(cache_directory() / "tuned").glob("*/measurements.jsonl"), *shipped.glob("*.json")]):
        header = file.with_name("arch.json")
        try:
            other = header.exists() and json.loads(header.read_text()).get("api") != target
        except (OSError, ValueError):  # the database reports the error
            other = False
        if not other:
            status = file.stat()
            found.append([str(file), status.st_size, status.st_mtime_ns])
    return found


def _sources() -> str:
    """A digest of the files from which kernels are made. After a change to these files, cached kernels of older ones
    must not be used; after a new installation of the same files they are. Takes 5 ms."""
    digest = hashlib.sha256()
    for package, pattern in (("compiler", "*.py"), ("schedules", "*.py"), ("runtime.devices", "*.c")):
        root = Path(str(resources.files(f"mlc_amd.{package}")))
        for file in sorted(root.rglob(pattern)):
            digest.update(f"{package}/{file.relative_to(root)}".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def check_writable() -> None:
    """Raises UserError if the cache cannot be written."""
    place = models_directory()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the cache folder {place}: {error.strerror}; {ADVICE}") from error


ADVICE = "set XDG_CACHE_HOME to a writable folder with enough space, or use `mlc-amd compile -o` and run its result"
