"""What the user calls a model -> an artifact or a running engine.

A model is an artifact folder, a GGUF file, the name of a hub's model (OWNER/REPO or OWNER/REPO:QUANT, downloaded on
first use), or nothing ($MLC_AMD_MODEL, else the bundled demo). GGUF files and synthetic models are compiled on first
use into the user's cache (model_cache.py), and found there later.
"""

from __future__ import annotations

import importlib.util
import json
import os
from contextlib import AbstractContextManager, closing
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlc_amd.runtime.artifact.artifact import CannotWrite, source_id
from mlc_amd.runtime.artifact.memory import CONTEXT_STEP
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.cache.kv_types import KV_TYPE, KvType
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import CompileOptions, Tuned
from mlc_amd.tools import target as targets
from mlc_amd.tools.hub import model_cache
from mlc_amd.tools.hub.model_cache import Recipe
from mlc_amd.tools.terminal import display

if TYPE_CHECKING:
    from mlc_amd.compiler.gguf.reader import GGUFModel
    from mlc_amd.compiler.pipeline import Summary
    from mlc_amd.compiler.weight_store import WeightStore
    from mlc_amd.runtime.engine.engine import Engine


def default_model() -> Path:
    """The model when none is given: the value of $MLC_AMD_MODEL (a bundle sets it), else the bundled demo."""
    named = os.environ.get("MLC_AMD_MODEL")
    return find(named) if named else Path(str(resources.files("mlc_amd.dist").joinpath("demo", "llama-q4_k_m.gguf")))


def find(model: str) -> Path:
    """Where the model of that name lies: that path, else, if it reads as a hub's model (OWNER/REPO[:QUANT]), its file
    in the hub's cache, downloaded on first use. UserError if the hub's model cannot be had; a path is not checked."""
    path = Path(model).expanduser()
    if path.exists() or not _has_compiler():  # only a compiler can do something with GGUF files
        return path
    from mlc_amd.tools.hub import hub, hub_files

    name = hub_files.parse(model)
    if name is None:
        return path
    try:
        return hub.find(name)
    except hub.Unavailable as error:
        raise UserError(f"{model}: no such file or folder here; {error}") from error


def is_artifact(path: Path) -> bool:
    """Folders are taken for artifacts, files for GGUF; UserError when there is neither."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give a GGUF file or a folder made by `mlc-amd compile`")
    return path.is_dir()


def open_source(path: Path | None, synthetic: str | None) -> AbstractContextManager[GGUFModel]:
    """The GGUF file, or the synthetic model of that spec, to be compiled; closed at the end of the `with` block."""
    check_compiler(synthetic or path)
    from mlc_amd.compiler.gguf.reader import GGUFModel
    from mlc_amd.compiler.gguf.synthetic import synthetic as make

    if synthetic:
        return closing(make(synthetic))
    assert path is not None, "one of path and synthetic is given"
    return closing(GGUFModel.open(path))


def compile_artifact(
    model: str | None,
    output: str | None = None,
    *,
    synthetic: str | None = None,
    target: str = "auto",
    arch: str = "native",
    ctx: int | None = None,
    weights: bool = True,
    tuned: Tuned = "auto",
    kv_type: KvType | None = None,
) -> Summary:
    """Compiles a GGUF file, or the `synthetic` model of that spec, into the folder `output` (None:
    dist/MODEL-TARGET-ARCH in the current directory)."""
    if (model is None) == (synthetic is None):
        raise UsageError("give either a GGUF file or --synthetic PRESET:FORMAT")
    if output == "":
        raise UsageError("-o is empty: give the folder to write, or leave it out")
    path = find(model) if model else None
    if path and is_artifact(path):
        raise UserError(f"{path} is a folder: give a GGUF file")
    resolved, arch_here = targets.resolve(target, arch)
    out = Path(output).expanduser() if output else _default_output(path, synthetic, f"{resolved}-{arch}")
    store = _store(keep=False, verify=True)
    return _compile(path, synthetic, resolved, arch_here, ctx, out, store, kv_type, weights=weights, tuned=tuned)


def _default_output(path: Path | None, synthetic: str | None, settings: str) -> Path:
    """dist/MODEL-TARGET-ARCH. UserError where that was made from another file of the same name."""
    out = Path("dist") / model_cache.file_name(f"{synthetic or (path and path.stem)}-{settings}")
    made_from = _made_from(out)
    if path and made_from not in (None, source_id(path)):
        raise UserError(f"{out} was made from another {path.name}; choose another output with -o")
    return out


def _made_from(artifact: Path) -> str | None:
    """`source_id` of the file that an artifact was made from; None where there is none, or it does not say."""
    try:
        return json.loads((artifact / "manifest.json").read_text())["source"]["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def source_path(model: str | None, synthetic: str | None) -> Path | None:
    """Where a model lies, by default the bundled one; None for a synthetic one. UserError for both."""
    if synthetic and model:
        raise UsageError("give a model or --synthetic, not both")
    return None if synthetic else find(model) if model else default_model()


def artifact_path(
    model: str | None,
    *,
    target: str = "auto",
    arch: str = "native",
    ctx: int | None = None,
    synthetic: str | None = None,
    device: str | None = None,
    tuned: Tuned = "auto",
    kv_type: KvType | None = None,
) -> Path:
    """The artifact folder for `model` (None: the demo) or for a `synthetic` spec, compiled into the cache if necessary.

    target, arch, ctx, tuned and kv_type are arguments of that compilation; device is the GPU that targets rocm and
    vulkan take for "native". An artifact is already compiled, so asking for another target, arch, context or type of
    the KV cache is a UserError.
    """
    path = source_path(model, synthetic)
    if path and is_artifact(path):
        _check_settings(path, target, arch, ctx, kv_type)
        return path
    check_compiler(synthetic or path)
    resolved = targets.resolve(target, arch, device)
    recipe = Recipe(path and str(path), synthetic, *resolved, ctx, tuned, kv_type or KV_TYPE)
    if out := model_cache.find(recipe):
        return out
    model_cache.check_writable()
    try:
        _compile(path, synthetic, recipe.target, recipe.arch, ctx, recipe.folder, _store(), kv_type, tuned=tuned)
    except CannotWrite as error:
        raise UserError(f"cannot write {error.path}: {error.reason}; {model_cache.ADVICE}") from error
    model_cache.record(recipe)
    return recipe.folder


def load_engine(
    model: str | None,
    *,
    threads: int | None = None,
    device: str | None = None,
    verify: bool = False,
    target: str = "auto",
    arch: str = "native",
    ctx: int | None = None,
    synthetic: str | None = None,
    tuned: Tuned = "auto",
    n_cpu_moe: int = 0,
    kv_tokens: int | None = None,
    kv_memory: int | str | None = None,
    kv_type: KvType | None = None,
    draft: str | None = None,
) -> Engine:
    """An Engine for `model`.

    threads: of the cpu device (None: all cores); device: which GPU, for targets rocm and vulkan (open_device); verify:
    check the weights' checksum too; n_cpu_moe: layers whose experts stay in host memory; kv_tokens and
    kv_memory: how large the cache is (`Engine.load`); draft: "lookup", "mtp", or the name of a draft model; the rest
    are arguments of `artifact_path`."""
    if threads is not None and threads < 1:
        raise UsageError(f"--threads is {threads}: it must be at least 1")
    KvSize.of(kv_tokens, kv_memory)  # UsageError before anything is compiled
    compilation: dict[str, Any] = {"target": target, "arch": arch, "ctx": ctx, "tuned": tuned, "kv_type": kv_type}
    path = artifact_path(model, device=device, synthetic=synthetic, **compilation)
    from mlc_amd.runtime.engine.engine import Engine
    from mlc_amd.runtime.speculation.drafters import LOOKUP, OWN

    if draft not in (None, LOOKUP, OWN):
        draft = str(artifact_path(draft, device=device, **compilation))
    size = {"kv_tokens": kv_tokens, "kv_memory": kv_memory}
    return Engine.load(path, device=device, threads=threads, verify=verify, n_cpu_moe=n_cpu_moe, draft=draft, **size)


def sampling_changes(**flags: Any) -> dict[str, Any]:
    """The sampling parameters that the user gives, for `dataclasses.replace` of the model's defaults; None means not
    given. UsageError for a value out of range, before a model is loaded."""
    from mlc_amd.runtime.sampling.settings import Sampling

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        Sampling(**given)
    except UserError as error:
        raise UsageError(str(error)) from error
    return given


def check_compiler(source: Path | str | None) -> None:
    """UserError in a bundle (tools/commands/deploy.py), which has no compiler."""
    if not _has_compiler():
        raise UserError(
            f"cannot compile {source} here: a bundle has no compiler; give a folder made by `mlc-amd compile`"
        )


def _has_compiler() -> bool:
    return importlib.util.find_spec("mlc_amd.compiler") is not None


def _store(keep: bool = True, verify: bool = False) -> WeightStore:
    """Packed weights in the user's cache."""
    from mlc_amd.compiler.weight_store import WeightStore

    return WeightStore(model_cache.weights_directory(), keep, verify)


def _compile(
    path: Path | None,
    synthetic: str | None,
    target: str,
    arch: str,
    ctx: int | None,
    out: Path,
    store: WeightStore,
    kv_type: KvType | None,
    *,
    weights: bool = True,
    tuned: Tuned = "auto",
) -> Summary:
    title = f"compiling {synthetic or (path.name if path else '')} for {target} {arch}"
    with open_source(path, synthetic) as source, display.compile_progress(title) as progress:
        from mlc_amd.compiler.pipeline import compile_model  # takes a second to import: only once the model is readable

        options = CompileOptions(target, arch, ctx, kv_type, tuned, weights)
        return compile_model(source, options, out, progress, store)


def _check_settings(path: Path, target: str, arch: str, ctx: int | None, kv_type: KvType | None) -> None:
    """UserError where an artifact was not compiled with the settings that the user gives."""
    given = {
        "--target": None if target == targets.AUTO else target,
        "--arch": None if arch in targets.HERE else arch,
        "--ctx": ctx and -(-ctx // CONTEXT_STEP) * CONTEXT_STEP,
        "--kv-type": kv_type,
    }
    if not any(given.values()):
        return
    from mlc_amd.runtime.artifact.artifact import Artifact

    manifest = Artifact.open(path).manifest
    kind = manifest["target"]["kind"]
    made = {
        "--target": [kind],
        "--arch": list(manifest["libraries"]),
        "--ctx": [manifest["context"]],
        "--kv-type": [manifest["kv_type"]],
    }
    for flag, has in made.items():
        if given[flag] is not None and given[flag] not in has:
            raise UserError(
                f"{flag} {given[flag]}: {path} was compiled for {_COMPILED[flag]} {', '.join(map(str, has))}; compile "
                f"the GGUF file again with {flag} {given[flag]}, or leave {flag} out"
            )


# what messages call a setting
_COMPILED = {"--target": "target", "--arch": "arch", "--ctx": "a context of", "--kv-type": "a KV cache of type"}
