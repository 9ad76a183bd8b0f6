"""Turns a user's name of a model into an artifact or a running engine.

A model is an artifact folder, a GGUF file, a folder with one, the name of a hub's model (OWNER/REPO or
OWNER/REPO:QUANT, downloaded on first use), the name of a model that ollama has on this machine, or nothing
($MLC_AMD_MODEL, else the bundled demo). GGUF files and synthetic models are compiled on first use into the user's cache
(model_cache.py), and found there later.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from mlc_amd.runtime.artifact.artifact import CannotWrite, source_id
from mlc_amd.runtime.artifact.manifest import MANIFEST
from mlc_amd.runtime.artifact.memory import CONTEXT_STEP
from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.devices.division import placement
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.options import CompileOptions, LoadOptions, RopeOptions
from mlc_amd.tools import target as targets
from mlc_amd.tools.hub import encoders, model_cache
from mlc_amd.tools.hub.model_cache import Recipe
from mlc_amd.tools.terminal import display

if TYPE_CHECKING:
    from mlc_amd.compiler.gguf.reader import GGUFModel
    from mlc_amd.compiler.pipeline import Summary
    from mlc_amd.runtime.engine.encoder import Encoder
    from mlc_amd.runtime.engine.engine import Engine
    from mlc_amd.tools.hub.hub_files import Name

_LISTED = 6  # limit of the files that a message lists
_AS_IT_IS = RopeOptions()


def default_model() -> Path:
    """The model if none is given: the value of $MLC_AMD_MODEL (which bundles set), else the bundled demo."""
    named = os.environ.get("MLC_AMD_MODEL")
    return find(named) if named else Path(str(resources.files("mlc_amd.dist").joinpath("demo", "llama-q4_k_m.gguf")))


def find(model: str | os.PathLike[str], encoder: bool = False) -> Path:
    """The path of the model with this name: the path itself, or the file in this folder; else (`local`) a file of the
    hub's cache or of ollama; else the hub's, which is downloaded. encoder: whether to download its image encoder, too.
    Raises UserError if there is no such model."""
    if found := local(model):
        return found
    name = _hub_name(model)
    from mlc_amd.tools.hub import hub

    try:
        return hub.pull(name, encoder)
    except hub.Unavailable as error:
        raise UserError(f"{model}: no such file or folder here; {error}") from error


def check_name(model: str | os.PathLike[str]) -> None:
    """Raises UserError if this machine has no model of that name, and none can be on the hub, which is not queried."""
    if local(model) is None:
        _hub_name(model)


def _hub_name(model: str | os.PathLike[str]) -> Name:
    """The name of a model of the hub. Raises UserError if it is no such name, and in a bundle."""
    if _has_compiler():
        from mlc_amd.tools.hub import hub_files

        if name := hub_files.parse(str(model)):
            return name
    raise _missing(model)


def local(model: str | os.PathLike[str]) -> Path | None:
    """The path of the model on this machine; None if it is not here. Raises UserError for a folder without a model, or
    with several."""
    path = Path(os.path.expanduser(model))
    if not _has_compiler():  # only a compiler can use GGUF files
        # os.path.exists also returns False for a text that is too long for a path
        return path if os.path.exists(path) else None
    from mlc_amd.tools.hub import hub, hub_files, hub_ollama

    if os.path.exists(path):
        return path if not path.is_dir() or (path / MANIFEST).exists() else _only_file(path)
    name = hub_files.parse(str(model))
    return (name and hub.cached(name)) or hub_ollama.find(str(model))


def _only_file(folder: Path) -> Path:
    """The GGUF file (or the first part of a split one) in a folder that is no artifact; the folder itself if it has no
    model. Raises UserError if there are several, or a checkpoint of another format."""
    from mlc_amd.tools.hub import hub_files

    files = [path for path in folder.iterdir() if path.is_file()]
    found = hub_files.models(hub_files.File(path.name, path.stat().st_size) for path in files)
    if len(found) > 1:
        names = ", ".join(model.parts[min(model.parts)].path for model in found[:_LISTED])
        names += " .." * (len(found) > _LISTED)
        raise UserError(f"{folder} has several models: {names}; give the path of one of them")
    if found:
        return folder / found[0].parts[min(found[0].parts)].path
    if any(path.suffix in (".safetensors", ".bin", ".pth") for path in files):
        how = "convert it with llama.cpp's convert_hf_to_gguf.py, or take a repository with GGUF in its name"
        raise UserError(f"{folder} is a checkpoint without a GGUF file: {how}")
    return folder


def _missing(model: str | os.PathLike[str]) -> UserError:
    """The error for a name that fits nothing."""
    text = str(model)
    advice = "give a GGUF file or a folder made by `mlc-amd compile`"
    if "://" in text:
        advice = f"of web addresses only those of huggingface.co are understood: download the file, and {advice}"
    elif " " in text:
        advice += "; a text for the model follows it, or --prompt"
    elif _has_compiler() and not text.endswith(".gguf") and not text.startswith((".", "/", "~")):
        advice = "ollama has no such model here either; models of huggingface.co are called OWNER/REPO:QUANT"
    return UserError(f"{text}: no such file or folder; {advice}")


def is_artifact(path: Path) -> bool:
    """Whether a path is an artifact (a folder) or a GGUF file. Raises UserError if it does not exist."""
    if not path.exists():
        raise _missing(path)
    return path.is_dir()


def open_source(
    path: Path | None,
    synthetic: str | None,
    encoder: str | None = None,
    pooling: str = "auto",
    override_kv: Sequence[str] = (),
    rope: RopeOptions = _AS_IT_IS,
    drafter: str | os.PathLike[str] | None = None,
) -> AbstractContextManager[GGUFModel]:
    """Opens the GGUF file, or the synthetic model with this spec, for the compiler; closes it after the block. encoder:
    the file of its image encoder. pooling, override_kv, drafter: see CompileOptions."""
    check_compiler(synthetic or path)
    from mlc_amd.compiler.gguf.draft import DraftFile
    from mlc_amd.compiler.gguf.mmproj import VisionFile
    from mlc_amd.compiler.gguf.overrides import overrides
    from mlc_amd.compiler.gguf.reader import GGUFModel
    from mlc_amd.compiler.gguf.synthetic import synthetic as make
    from mlc_amd.compiler.models.rope import with_options

    assert synthetic or path is not None, "one of path and synthetic is given"
    pooling = pooling.removeprefix("auto")
    if synthetic:
        found = make(synthetic, keys=overrides(override_kv), pooling=pooling)
    else:
        found = GGUFModel.open(path or "", pooling, overrides(override_kv))
    try:
        if drafter:
            found.add_draft(DraftFile(Path(drafter).expanduser(), found.config))
        found.config = with_options(found.config, rope)
        if encoder:
            found.add_vision(VisionFile(encoder))
    except BaseException:
        found.close()
        raise
    return closing(found)


def compile_artifact(
    model: str | None, output: str | None, options: CompileOptions, synthetic: str | None = None, weights: bool = True
) -> Summary:
    """Compiles a GGUF file, or the `synthetic` model with this spec, into the folder `output`; None:
    dist/MODEL-TARGET-ARCH in the current directory."""
    if (model is None) == (synthetic is None):
        raise UsageError("give either a GGUF file or --synthetic PRESET:FORMAT")
    if output == "":
        raise UsageError("-o is empty: give the folder to write, or leave it out")
    path = find(model, not options.no_mmproj) if model else None
    if path and is_artifact(path):
        raise UserError(f"{path} is a folder: give a GGUF file")
    resolved = _with_encoder(path, options.resolved(*targets.resolve(options.target, options.arch)))
    out = Path(output).expanduser() if output else _default_output(path, synthetic, f"{resolved.target}-{options.arch}")
    return _compile(path, synthetic, resolved, out, keep=False, weights=weights)


def _default_output(path: Path | None, synthetic: str | None, settings: str) -> Path:
    """dist/MODEL-TARGET-ARCH. Raises UserError if it was made from another file with the same name."""
    out = Path("dist") / model_cache.file_name(f"{synthetic or (path and path.stem)}-{settings}")
    try:
        made_from = json.loads((out / "manifest.json").read_text())["source"]["id"]
    except (OSError, ValueError, KeyError, TypeError):  # there is no manifest, or it does not say
        return out
    if path and made_from not in (None, source_id(path)):
        raise UserError(f"{out} was made from another {path.name}; choose another output with -o")
    return out


def _with_encoder(path: Path | None, options: CompileOptions) -> CompileOptions:
    """The options with the paths of the model's image encoder and of its draft. `no_mmproj` is reset to its default, as
    the encoder's path (or None) is enough. Raises UserError if the draft's file does not exist."""
    drafter = None if options.drafter is None else Path(options.drafter).expanduser()
    if drafter and not drafter.is_file():
        raise UserError(f"--drafter {drafter}: there is no such file; check the path")
    changed = {"mmproj": encoders.choose(path, options), "no_mmproj": False}
    return replace(options, **changed, drafter=None if drafter is None else str(drafter))


def source_path(model: str | os.PathLike[str] | None, synthetic: str | None, encoder: bool = False) -> Path | None:
    """The path of a model, by default of the bundled one; None for a synthetic one. encoder: see `find`. Raises
    UserError if both are given."""
    if synthetic and model:
        raise UsageError("give a model or --synthetic, not both")
    return None if synthetic else find(model, encoder) if model else default_model()


def artifact_path(options: LoadOptions, synthetic: str | None = None, sees: bool = False) -> Path:
    """The artifact folder of the options' model (None: the demo), or of the `synthetic` one with this spec; compiled
    into the cache if necessary. sees: whether the model must have an image encoder. Raises UserError for an artifact
    that was compiled with other options. Before anything is compiled, raises UserError if a target for GPUs finds none,
    or if the image encoder is missing."""
    path = source_path(options.model, synthetic, not options.no_mmproj)
    if path and is_artifact(path):
        _check_compiled(path, options)
        return path
    check_compiler(synthetic or path)
    resolved = options.resolved(*targets.resolve(options.target, options.arch, options.device))
    placement(resolved.target, options.device, options.devices, options.tensor_split)
    resolved = _with_encoder(path, resolved)
    if sees and resolved.mmproj is None:
        raise UserError(f"{synthetic or path} comes without an image encoder; give its file with --mmproj FILE")
    recipe = Recipe(path=path and str(path), synthetic=synthetic, **asdict(resolved))
    if out := model_cache.find(recipe):
        return out
    model_cache.check_writable()
    wait = partial(display.message, f"waiting for another process, which compiles {recipe.title} ...")
    with model_cache.compiling(recipe, wait):
        if out := model_cache.find(recipe):
            return out
        try:
            if resolved.rope_changes:
                _change_rope(path, synthetic, resolved, recipe.folder)
            else:
                _compile(path, synthetic, resolved, recipe.folder)
        except CannotWrite as error:
            raise UserError(f"cannot write {error.path}: {error.reason}; {model_cache.ADVICE}") from error
        model_cache.record(recipe)
    return recipe.folder


def load_engine(
    options: LoadOptions, synthetic: str | None = None, kv: KvSize | None = None, sees: bool = False
) -> Engine:
    """An Engine for the options' model, or for the `synthetic` one with this spec. kv: see `Engine.load`. sees: whether
    the model must accept images."""
    _check_sizes(options)
    from mlc_amd.runtime.engine.engine import Engine
    from mlc_amd.runtime.speculation.draft_model import LOOKUP, OWN

    if options.draft not in (None, LOOKUP, OWN) and (file := _drafter(options.draft)):
        options = replace(options, draft=None, drafter=str(file))
    if options.drafter and options.draft is None:
        options = replace(options, draft=OWN)
    path = artifact_path(options, synthetic, sees)
    if options.draft not in (None, LOOKUP, OWN):
        draft = replace(options, model=options.draft, mmproj=None, no_mmproj=True)
        options = replace(options, draft=artifact_path(draft))
    return Engine.load(path, options, kv)


def _check_sizes(options: LoadOptions) -> None:
    """Checks sizes before anything is compiled. Raises UsageError."""
    KvSize.of(options.kv_tokens, options.kv_memory)
    _ = options.disk_bytes


def _drafter(draft: str | os.PathLike[str] | None) -> Path | None:
    """The file with this name, if it is a draft that is compiled together with its model."""
    path = find(draft or "") if _has_compiler() else None
    if path is None or is_artifact(path):
        return None
    from mlc_amd.compiler.gguf.draft import is_draft

    return path if is_draft(path) else None


def load_encoder(options: LoadOptions, synthetic: str | None = None) -> Encoder:
    """An Encoder for the options' model, or for the `synthetic` one with this spec."""
    path = artifact_path(options, synthetic)
    from mlc_amd.runtime.engine.encoder import Encoder

    return Encoder.load(path, options)


def load_any(options: LoadOptions) -> Engine | Encoder:
    """An Encoder if the options' model is one, otherwise an Engine."""
    _check_sizes(options)
    path = artifact_path(options)
    from mlc_amd.runtime.artifact.artifact import Artifact

    is_encoder = bool(Artifact.open(path).manifest["model"]["encoder"])
    return (load_encoder if is_encoder else load_engine)(replace(options, model=options.model or path))


def check_compiler(source: Path | str | None) -> None:
    """Raises UserError in a bundle (tools/commands/deploy.py), which has no compiler."""
    if not _has_compiler():
        what = "a bundle has no compiler; give a folder made by `mlc-amd compile`"
        raise UserError(f"cannot compile {source} here: {what}")


def _has_compiler() -> bool:
    return importlib.util.find_spec("mlc_amd.compiler") is not None


def _compile(
    path: Path | None,
    synthetic: str | None,
    options: CompileOptions,
    out: Path,
    keep: bool = True,
    weights: bool = True,
) -> Summary:
    """keep: whether packed weights are added to the user's cache. Otherwise, weights in the cache are verified."""
    title = f"compiling {synthetic or (path.name if path else '')} for {options.target} {options.arch}"
    encoder = None if options.mmproj is None else str(options.mmproj)
    changes = options.pooling, options.override_kv, options, options.drafter
    with open_source(path, synthetic, encoder, *changes) as source:
        # takes a second to import: imported only once the model is known to be readable
        from mlc_amd.compiler import pipeline
        from mlc_amd.compiler.weight_store import WeightStore

        pipeline.check(source, out, options)
        store = WeightStore(model_cache.weights_directory(), keep, verify=not keep)
        with display.compile_progress(title) as progress:
            return pipeline.compile_model(source, out, options, progress, weights, store)


def _change_rope(path: Path | None, synthetic: str | None, options: CompileOptions, out: Path) -> None:
    """Writes an artifact with changes of RoPE, from the artifact without them, which is compiled if necessary."""
    changes = options.pooling, options.override_kv, options, options.drafter
    with open_source(path, synthetic, None, *changes) as source:  # raises UserError before the compilation
        as_it_is = replace(options, **dict.fromkeys(options.rope_changes))
        plain = artifact_path(LoadOptions(model=path, **as_it_is.given, no_mmproj=options.mmproj is None), synthetic)
        from mlc_amd.compiler.other_tables import write_with_tables

        write_with_tables(plain, source, out)


def _check_compiled(path: Path, options: CompileOptions) -> None:
    """Raises UserError if an artifact was not compiled with the options that the user gives."""
    given = options.given
    if options.override_kv:
        raise UserError(f"--override-kv is for GGUF files: {path} is compiled; leave it out")
    if options.arch in targets.HERE:
        given.pop("arch", None)
    if options.ctx:
        given["ctx"] = -(-options.ctx // CONTEXT_STEP) * CONTEXT_STEP
    if not given:
        return
    if changed := options.rope_changes:
        flag = f"--{next(iter(changed)).replace('_', '-')}"
        raise UserError(f"{flag}: {path} is compiled, and has its tables of RoPE; give {flag} with the GGUF file")
    from mlc_amd.runtime.artifact.artifact import Artifact

    manifest = Artifact.open(path).manifest
    target, context = manifest["target"]["kind"], manifest["context"]
    made = {"target": [target], "arch": list(manifest["libraries"]), "ctx": [context]}
    if "pooling" in given:
        made["pooling"] = [(manifest["model"]["encoder"] or {"pooling": "auto"})["pooling"]]
    made["split"] = ["tensor" if manifest["gpus"] > 1 else "layer"]
    made["mmproj"], made["no_mmproj"] = [manifest.get("vision", {}).get("file")], ["vision" not in manifest]
    made["drafter"] = [(manifest["model"]["draft"] or {"file": None})["file"]]
    made = {name: [manifest[name]] for name in given if name in manifest} | made
    for name, value in given.items():
        if value not in made.get(name, [value]):
            flag, had = f"--{name.replace('_', '-')}", ", ".join(map(str, made[name]))
            advice = f"compile the GGUF file again, or leave {flag} out"
            raise UserError(f"{flag} {value}: {path} was compiled with {flag} {had}; {advice}")
