"""What the user calls a model -> an artifact or a running engine.

A model is an artifact's folder, a GGUF file, or nothing ($MLC_AMD_MODEL, else the bundled demo). GGUF files and
synthetic models are compiled on first use into `$XDG_CACHE_HOME/mlc-amd` (`~/.cache/mlc-amd`), under a key of
everything that shapes the result, so a second start finds them there.
"""

import hashlib
import importlib.util
import json
import os
import platform
import re
from contextlib import AbstractContextManager, closing
from importlib import metadata, resources
from pathlib import Path

from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import cpu_flags
from mlc_amd.tools import display


def default_model() -> Path:
    """The model when none is given: what $MLC_AMD_MODEL names (a bundle sets it), else the small one that comes with
    the package."""
    named = os.environ.get("MLC_AMD_MODEL")
    return Path(named) if named else Path(str(resources.files("mlc_amd.dist").joinpath("demo", "llama-q4_k_m.gguf")))


def cache_directory() -> Path:
    """Where compiled models are kept for the next time."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlc-amd"


def is_artifact(path: Path) -> bool:
    """Folders are taken for artifacts, files for GGUF; UserError when there is neither."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a GGUF file or a folder made by `mlc-amd compile`")
    return path.is_dir()


def open_source(path: Path | None, synthetic: str | None) -> AbstractContextManager:
    """The GGUF file, or the synthetic model of that spec, to be compiled; closes at the end of the `with` block."""
    check_compiler(synthetic or path)
    from mlc_amd.compiler.gguf.reader import GGUFModel
    from mlc_amd.compiler.gguf.synthetic import synthetic as make

    return closing(make(synthetic) if synthetic else GGUFModel.open(path))


def artifact_path(
    model: str | None,
    *,
    target: str = "cpu",
    arch: str = "native",
    ctx: int | None = None,
    synthetic: str | None = None,
    device: str | None = None,
    tuned: str = "auto",
) -> Path:
    """The artifact's folder for `model` (None: the demo) or for a `synthetic` spec, compiled into the cache when it is
    not there yet.

    target, arch, ctx, tuned shape that compilation; device is the GPU that target vulkan takes for "native". For a
    folder they are already decided, so asking for another context is a UserError.
    """
    if synthetic and model:
        raise UserError("give a model or --synthetic, not both")
    path = None if synthetic else Path(model).expanduser() if model else default_model()
    if path and is_artifact(path):
        _check_context(path, ctx)
        return path
    check_compiler(synthetic or path)
    if target == "vulkan" and arch in ("native", "auto"):
        from mlc_amd.runtime.devices.vulkan.gpu import profile_here  # asks the driver: not before it is needed

        arch = profile_here(device)
    name = re.sub(r"[^\w.-]", "-", synthetic or path.stem)
    place = cache_directory() / f"{name}-{target}-{arch}-{_key(path, synthetic, target, arch, ctx, tuned)}"
    if (place / "manifest.json").exists():
        return place
    title = f"compiling {synthetic or path.name} for {target} {arch}"
    with open_source(path, synthetic) as source, display.compile_progress(title) as progress:
        from mlc_amd.compiler.pipeline import compile_model  # a second: not before the model is known to be fine

        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            advice = "set XDG_CACHE_HOME to a folder of yours, or use `mlc-amd compile -o` and run its result"
            raise UserError(f"cannot make the cache folder {place.parent}: {error.strerror}; {advice}") from error
        compile_model(source, target, arch, ctx, place, progress, tuned=tuned)
    return place


def load_engine(
    model: str | None, *, threads: int | None = None, device: str | None = None, verify: bool = False, **compilation
):
    """An Engine for `model`. threads: of the cpu device (None: all cores); device: which GPU, for target vulkan
    (open_device); verify: check the weights' checksum too; `compilation`: the arguments of `artifact_path`."""
    if threads is not None and threads < 1:
        raise UserError(f"--threads is {threads}: it must be at least 1")
    path = artifact_path(model, device=device, **compilation)
    from mlc_amd.runtime.engine import Engine

    return Engine.load(path, device=device, threads=threads, verify=verify)


def check_compiler(source: Path | str) -> None:
    """UserError in a bundle (tools/deploy.py), which has no compiler."""
    if importlib.util.find_spec("mlc_amd.compiler") is None:
        raise UserError(
            f"cannot compile {source} here: a bundle has no compiler; give a folder made by `mlc-amd compile`"
        )


def _check_context(path: Path, ctx: int | None) -> None:
    from mlc_amd.runtime.artifact import Artifact

    if ctx is not None and (has := Artifact.open(path).manifest["context"]) != ctx:
        raise UserError(
            f"--ctx {ctx}: {path} was compiled for a context of {has}; compile it again with --ctx {ctx}, or leave "
            "--ctx out"
        )


def _key(path: Path | None, synthetic: str | None, target: str, arch: str, ctx: int | None, tuned: str) -> str:
    """Changes whenever the compiled result might: the file, the settings, this program and its compiler, what was
    tuned, and for "native" the CPU."""
    parts: list[object] = [
        synthetic,
        target,
        arch,
        ctx,
        metadata.version("mlc-amd"),
        metadata.version("apache-tvm"),
        _sources(),
    ]
    parts += [tuned, _tuned(target) if tuned != "none" else []]
    if path:
        status = path.stat()
        parts += [str(path.resolve()), status.st_size, status.st_mtime_ns]
    if arch == "native":
        parts += [platform.machine(), sorted(cpu_flags())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _tuned(target: str) -> list[tuple[str, int, int]]:
    """Size and time of the tuned records that a compilation for this target may use. The names of files stand in
    compiler/tuning/database.py, which imports TVM: too slow for a model that is there already."""
    found = []
    shipped = Path(str(resources.files("mlc_amd.dist"))) / "tuned"
    for file in sorted([*(cache_directory() / "tuned").glob("*/measurements.jsonl"), *shipped.glob("*.json")]):
        header = file.with_name("arch.json")
        try:
            other = header.exists() and json.loads(header.read_text()).get("api") != target
        except (OSError, ValueError):  # the database will say what is wrong with it
            other = False
        if not other:
            status = file.stat()
            found.append((str(file), status.st_size, status.st_mtime_ns))
    return found


def _sources() -> list[tuple[str, int, int]]:
    """Size and time of the files that kernels are made from: whoever works on them must not meet yesterday's kernels in
    the cache."""
    found = []
    for package, pattern in (
        ("mlc_amd.compiler", "*.py"),
        ("mlc_amd.schedules", "*.py"),
        ("mlc_amd.runtime.devices", "*.c"),
    ):
        root = Path(str(resources.files(package)))
        for file in sorted(root.rglob(pattern)):
            status = file.stat()
            found.append((str(file.relative_to(root)), status.st_size, status.st_mtime_ns))
    return found
