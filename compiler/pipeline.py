"""The compile pipeline. In: a GGUF model. Out: an artifact folder.

    model -> tokenizer -> Relax functions (models) -> fusion (passes) -> kernels selected (codegen) -> plan
          -> kernels compiled -> weights repacked and streamed to disk -> manifest

Memory use does not grow with the model's size: tensors are read, repacked and written in chunks of rows.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tvm_ffi

from mlc_amd.compiler import tokenizer
from mlc_amd.compiler import weights as packing
from mlc_amd.compiler.codegen.kernel_workers import Workers
from mlc_amd.compiler.codegen.target import make_target
from mlc_amd.compiler.lowering import Lowered, lower, sizes
from mlc_amd.compiler.manifest import manifest_body
from mlc_amd.compiler.models.shards import ShardedModel
from mlc_amd.compiler.tuning.database import Lookup
from mlc_amd.compiler.weight_store import WeightStore
from mlc_amd.runtime.artifact import artifact
from mlc_amd.runtime.artifact.manifest import check_described
from mlc_amd.runtime.errors import UsageError, UserError
from mlc_amd.runtime.garbage import no_collection
from mlc_amd.runtime.host import available_threads
from mlc_amd.runtime.options import CompileOptions

StageProgress = Callable[[str, int, int], None]  # (stage, done, total)

for error in (KeyboardInterrupt, UserError, UsageError):  # TVM turns errors that are not registered into RuntimeErrors
    tvm_ffi.register_error(error)


@dataclass
class Summary:
    """Summary of a compilation, to be shown to the user."""

    path: Path
    kernels: int
    kernel_bytes: int
    launches: dict[str, int]  # by function
    tuned: dict[str, int]  # number of kernels by the source of their plan (default, shipped, user), summed over archs
    notes: list[str] = field(default_factory=list)  # tuned records that were ignored, and why
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


def check(model, out: Path, options: CompileOptions) -> None:
    """Raises UserError for what `compile_model` refuses, as far as this is known without compiling."""
    artifact.check_output(out)
    check_divided(model, options.parts, options.target)
    sizes(model.config, make_target(options.target, options.arch, options.cache_type), options.ctx)


def check_divided(model, gpus: int, target: str) -> None:
    """Raises UserError if the model cannot be shared by tensor between `gpus` GPUs."""
    if gpus == 1:
        return
    if target == "cpu":
        raise UsageError("only GPUs share a model by tensor: give --target rocm or vulkan")
    if model.config.draft:
        raise UserError(
            "--split tensor is for models without an eagle3, dflash or gemma4-assistant draft: leave one out"
        )
    if model.config.encoder:
        raise UserError("--split tensor is for models that generate text: an embedding model runs on one GPU")


def divided(model, gpus: int):
    """The model as `gpus` GPUs share it by tensor. For one GPU: the model itself."""
    return ShardedModel(model, gpus) if gpus > 1 else model


def compile_model(
    model,
    out: Path,
    options: CompileOptions,
    progress: StageProgress | None = None,
    weights: bool = True,
    store: WeightStore | None = None,
) -> Summary:
    """Compiles `model` (a GGUFModel or a synthetic one) into the folder `out`.

    options.target: a name in TARGETS of codegen/target.py. progress: called with (stage, done, total). weights: whether
    to write the weight matrices; without them, a device fills the matrices at random. store: a store of packed weights;
    weights in it are not packed again. Raises UserError for everything that the user can fix.
    """
    progress = progress or (lambda stage, done, total: None)
    clock = _Clock()
    target = make_target(options.target, options.arch, options.cache_type)
    lookups = {arch.name: Lookup(arch, options.tuned) for arch in target.archs}
    model = divided(model, options.parts)
    target.plans = {name: lookup.find for name, lookup in lookups.items()}
    with artifact.new_artifact(out) as directory, Workers(available_threads()) as workers:
        if target.kind != "cpu":
            workers.start()
        tokenizer.export(model.metadata, directory)
        progress("import", 0, 1)
        with no_collection():  # all objects of a graph stay alive: collecting garbage would take a fifth of the time
            lowered = lower(model, target, options.ctx)
        progress("import", 1, 1)
        clock.lap("import")
        compiled = target.compile_kernels(lowered.module, directory, progress, workers, lowered.plan.joint)
        clock.lap("kernels")
        known = _write_weights(lowered, directory, progress, weights, store)
        model.check_unchanged()
        clock.lap("weights")
        progress("write", 0, 1)
        manifest = manifest_body(lowered, compiled, weights)
        artifact.write_interfaces(directory, manifest)
        artifact.write_manifest(directory, manifest, known)
        check_described(directory)
        kernel_bytes = sum(file.stat().st_size for file in directory.glob("kernels*"))
        progress("write", 1, 1)
    clock.lap("write")
    launches = {name: len(steps) for name, steps in lowered.plan.functions.items()}
    origins = Counter(origin["from"] for entry in manifest["kernels"] for origin in entry["tuned"].values())
    notes = [note for lookup in lookups.values() for note in dict.fromkeys(lookup.notes)]
    return Summary(Path(out), len(manifest["kernels"]), kernel_bytes, launches, dict(origins), notes, clock.laps)


class _Clock:
    def __init__(self):
        self.laps, self.last = {}, time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage], self.last = now - self.last, now


def _write_weights(
    lowered: Lowered, directory: Path, progress: StageProgress, matrices: bool, store: WeightStore | None
) -> dict[str, str]:
    """Writes the weights and the tables by position into `directory`. matrices: whether to write the weight matrices
    too; they come from the store if it has them. Returns {file: SHA-256} for the files whose digest is known."""
    model, layout, workers = lowered.model, lowered.target.layout, available_threads()
    if tables := [source for source in lowered.weights if source.kind == "table"]:
        packing.write(model, layout, tables, directory / artifact.TABLES, progress, workers)
    kinds = ("vector", "ones", "matrix") if matrices else ("vector", "ones")
    sources = [source for source in lowered.weights if source.kind in kinds]
    place, key = directory / artifact.WEIGHTS, ""
    if store and matrices:
        key = packing.key(model, layout, sources)
        if facts := store.take(key, place):
            return {artifact.WEIGHTS: facts["sha256"]}
    packing.write(model, layout, sources, place, progress, workers)
    return {artifact.WEIGHTS: store.put(key, place)["sha256"]} if store and matrices else {}
