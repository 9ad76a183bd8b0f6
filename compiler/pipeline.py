"""The compile pipeline: GGUF model in, artifact folder out.

    model -> tokenizer -> Relax functions (models) -> fusion (passes) -> kernels selected (codegen) -> plan
          -> kernels compiled -> weights repacked and streamed to disk -> manifest

Memory stays small whatever the model's size: tensors are read, repacked and written in chunks of rows.
"""

import dataclasses
import importlib
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import tvm

from mlc_amd.compiler import memory, sampling, tokenizer
from mlc_amd.compiler import plan as planning
from mlc_amd.compiler import weights as packing
from mlc_amd.compiler.functions import FunctionSpec, with_drafts
from mlc_amd.compiler.models.build import build_module
from mlc_amd.compiler.passes import fuse
from mlc_amd.compiler.tuning.database import Lookup
from mlc_amd.compiler.weight_store import WeightStore
from mlc_amd.runtime.artifact import artifact
from mlc_amd.runtime.artifact.io_buffers import io_buffers
from mlc_amd.runtime.artifact.manifest import (
    Buffer,
    FormatTotals,
    KvTensor,
    ManifestBody,
    ManifestModel,
    check_described,
)
from mlc_amd.runtime.cache.kv_types import KV_TENSORS, KV_TYPE
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.host import available_threads
from mlc_amd.runtime.options import CompileOptions
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.layouts import padded

# module and class, imported on demand
TARGETS = {
    "cpu": ("cpu", "CpuTarget"),
    "rocm": ("rocm_target", "RocmTarget"),
    "vulkan": ("vulkan_target", "VulkanTarget"),
}
DEFAULT_CONTEXT = 4096  # tokens of KV cache by default


class Progress(Protocol):
    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


@dataclass
class Summary:
    """Summary of a compilation, for the user."""

    path: Path
    kernels: int
    kernel_bytes: int
    launches: dict[str, int]  # by function
    tuned: dict[str, int]  # kernels by where their plan comes from: default, shipped, user; one for each arch
    notes: list[str] = field(default_factory=list)  # tuned records that were ignored, and why
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


def compile_model(
    model,
    options: CompileOptions,
    out: Path,
    progress: Progress | None = None,
    store: WeightStore | None = None,
) -> Summary:
    """Compiles `model` (a GGUFModel or a synthetic one) into the folder `out`. store: where packed weights may be that
    need not be made again. UserError for everything that the user can fix."""
    progress = progress or (lambda stage, done, total: None)
    clock = _Clock()
    kv_type = options.kv_type or KV_TYPE
    backend = make_target(options.target, options.arch, kv_type)
    lookups = {arch.name: Lookup(arch, options.tuned) for arch in backend.archs}
    backend.plans = {name: lookup.find for name, lookup in lookups.items()}
    ctx = capacity(model.config, options.ctx)
    workers = available_threads()
    with artifact.new_artifact(out) as directory:
        tokenizer.export(model.metadata, directory)
        progress("import", 0, 1)
        lowered = lower(model, backend, ctx)
        functions, specs, plan = lowered.functions, lowered.specs, lowered.plan
        progress("import", 1, 1)
        clock.lap("import")
        compiled = backend.compile_kernels(lowered.module, directory, progress, workers)
        clock.lap("kernels")
        known = _write_weights(model, backend.layout, specs, directory, ctx, progress, workers, options.weights, store)
        model.check_unchanged()
        clock.lap("weights")
        progress("write", 0, 1)
        kernels = [
            entry | backend.facts(entry["name"]) | {"tuned": backend.origins(entry["name"])}
            for entry in kernel_table(plan)
        ]
        spans = backend.spans(model.config, ctx)
        manifest: ManifestBody = {
            "name": model.config.name or Path(model.path).stem,
            "source": {"file": Path(model.path).name, "id": artifact.source_id(model.path)},
            "model": cast(ManifestModel, dataclasses.asdict(model.config)),
            "target": backend.description,
            "context": ctx,
            "kv_type": kv_type,
            "sampling": sampling.defaults(model.metadata, ctx),
            "functions": {
                f.name: {
                    "rows": f.m,
                    "single": f.single,
                    "logits": f.logits,
                    "samples": f.samples,
                    "launches": plan.functions[f.name],
                }
                for f in functions
            },
            "kernels": kernels,
            "libraries": compiled["libraries"],
            "launches": compiled["launches"],
            "arena_bytes": plan.arena_bytes,
            "io": _io(model.config, functions, ctx, set(spans.values())),
            "kv": _kv(memory.kept(model.config, backend, ctx), spans),
            "page": PAGE,
            "formats": _format_counts(model),
            "weights": "file" if options.weights else "random",
            "tensors": packing.drawn(model, specs),
            "token_bytes": memory.token_bytes(model.config, backend, ctx),
            "weight_bytes": sum(spec.nbytes for planes in specs.values() for spec in planes),
        }
        artifact.write_interfaces(directory, manifest)
        artifact.write_manifest(directory, manifest, known)
        check_described(directory)
        kernel_bytes = sum(file.stat().st_size for file in directory.glob("kernels*"))
        progress("write", 1, 1)
    clock.lap("write")
    launches = {name: len(steps) for name, steps in plan.functions.items()}
    origins = Counter(origin["from"] for entry in kernels for origin in entry["tuned"].values())
    notes = [note for lookup in lookups.values() for note in dict.fromkeys(lookup.notes)]
    return Summary(Path(out), len(kernels), kernel_bytes, launches, dict(origins), notes, clock.laps)


def make_target(target: str, arch: str, kv_type: str = KV_TYPE):
    """The Target of a name in TARGETS, for an arch as in --arch and a type of the KV cache. UserError for unknown
    ones."""
    if target not in TARGETS:
        raise UserError(f"unknown target '{target}'; known: {', '.join(TARGETS)}")
    if kv_type not in KV_TENSORS:
        raise UserError(f"unknown type '{kv_type}' of the KV cache; known: {', '.join(KV_TENSORS)}")
    module_name, class_name = TARGETS[target]
    return getattr(importlib.import_module(f"mlc_amd.compiler.codegen.{module_name}"), class_name)(arch, kv_type)


@dataclass(frozen=True)
class Lowered:
    """A model as calls of kernels, before the kernels are compiled.

    parameters: (kind, name) of each parameter, by function. specs: source tensor to the tensors of the weights file.
    plan: launches.
    """

    functions: list[FunctionSpec]
    module: tvm.IRModule
    parameters: dict[str, list]
    specs: packing.Specs
    plan: planning.Plan


def lower(model, backend, ctx: int) -> Lowered:
    """Builds, fuses and plans the functions of `model` with kernels of `backend`, a Target. ctx: of `capacity`;
    UserError if it is too large for kernels."""
    memory.check_capacity(model.config, backend, ctx)
    functions = with_drafts(backend.functions(ctx), model.config)
    module, parameters = build_module(model, backend, functions, ctx)
    module = backend.select_kernels(fuse(module, backend))
    specs = packing.specs(model, backend, parameters, ctx)
    plan = planning.make_plan(
        module,
        parameters,
        {name: [spec.name for spec in planes] for name, planes in specs.items()},
        {spec.name: spec.outputs(model.config) for spec in functions},
    )
    return Lowered(functions, module, parameters, specs, plan)


class _Clock:
    def __init__(self):
        self.laps, self.last = {}, time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage], self.last = now - self.last, now


def capacity(config, ctx: int | None) -> int:
    """Tokens of KV cache, rounded up to what the attention kernels step by."""
    if ctx is None:
        ctx = min(config.context, DEFAULT_CONTEXT)
    if ctx < 1:
        raise UserError(f"--ctx must be at least 1, not {ctx}")
    if ctx > config.context:
        raise UserError(
            f"--ctx {ctx} is more than the {config.context} tokens this model was made for; use {config.context} or "
            "less"
        )
    return -(-ctx // PAGE) * PAGE


def _io(config, functions: list[FunctionSpec], ctx: int, spans: set[int]) -> dict[str, Buffer]:
    """The buffers between host and plan, as in the manifest."""
    return io_buffers(
        rows=max(f.m for f in functions),
        logits=max(f.logits for f in functions),
        sampled=max(f.logits for f in functions if f.samples),
        columns=padded(config.vocab),
        blocks=ctx // PAGE,
        spans=spans,
        drafts=config.predictor is not None,
    )


def _kv(kept: memory.Types, spans: dict[str, int]) -> list[KvTensor]:
    """What lives from step to step, as in the manifest."""
    found: list[KvTensor] = []
    for name, (shape, dtype) in kept.items():
        found.append({"name": name, "dtype": dtype, "shape": list(shape)})
        if name in spans:
            found[-1]["span"] = spans[name]
    return found


def kernel_table(plan) -> list[dict]:
    """Each kernel with the number of its calls per function."""
    table: dict[str, dict] = {}
    for function, launches in plan.functions.items():
        for launch in launches:
            entry = table.setdefault(launch["kernel"], {"name": launch["kernel"], "calls": {}})
            entry["calls"][function] = entry["calls"].get(function, 0) + 1
    return list(table.values())


def _format_counts(model) -> dict[str, FormatTotals]:
    counts: dict[str, FormatTotals] = {}
    for tensor in model.tensors.values():
        entry = counts.setdefault(tensor.format, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return counts


def _write_weights(
    model, layout: str, specs, directory: Path, ctx: int, progress: Progress, workers: int, matrices: bool, store
) -> dict[str, str]:
    """Writes the weights and the tables by position into `directory`. matrices: whether the matrices, too; they then
    come from the store if it has them. Returns the SHA-256 of files that is known already."""
    same, tables = packing.by_context(model, specs)
    if tables:
        packing.write(model, layout, tables, directory / artifact.TABLES, ctx, progress, workers)
    if not matrices:
        same = {name: planes for name, planes in same.items() if not packing.is_matrix(planes)}
        store = None
    place = directory / artifact.WEIGHTS
    key = packing.key(model, layout, same) if store else ""
    if store and (facts := store.take(key, place)):
        return {artifact.WEIGHTS: facts["sha256"]}
    packing.write(model, layout, same, place, ctx, progress, workers)
    return {artifact.WEIGHTS: store.put(key, place)["sha256"]} if store else {}
