"""Builds the manifest of an artifact that is being compiled.

In: the lowered model and the results of `Target.compile_kernels`. Out: a `ManifestBody`, which
runtime/artifact/manifest.py declares.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mlc_amd.compiler import memory, sampling
from mlc_amd.compiler.gguf.reader import quantization
from mlc_amd.compiler.lowering import Lowered
from mlc_amd.compiler.models.images import features_type, has_places
from mlc_amd.compiler.plan import pieces
from mlc_amd.compiler.weights import random_tensors
from mlc_amd.runtime.artifact.artifact import source_id
from mlc_amd.runtime.artifact.io_buffers import io_buffers
from mlc_amd.runtime.artifact.manifest import (
    PIECE,
    RANK,
    Buffer,
    FormatTotals,
    ManifestBody,
    ManifestFunction,
    ManifestImages,
    ManifestKernel,
    ManifestModel,
)
from mlc_amd.runtime.cache.kv_types import KvType
from mlc_amd.runtime.errors import one_line
from mlc_amd.schedules.operators.attention import PAGE
from mlc_amd.schedules.operators.layouts import padded


def manifest_body(lowered: Lowered, compiled: Mapping[str, Any], weights: bool) -> ManifestBody:
    """The manifest. compiled: the result of `Target.compile_kernels`. weights: whether the artifact contains the weight
    matrices; if not, a device fills them at random."""
    model, target, ctx, plan = lowered.model, lowered.target, lowered.context, lowered.plan
    whole = model.whole if model.gpus > 1 else model
    path = Path(one_line(str(model.path)))  # JSON cannot represent bytes that are not UTF-8
    kernels = _kernels(lowered)
    body: ManifestBody = {
        "name": model.config.name or path.stem,
        "source": {"file": path.name, "id": source_id(model.path)},
        "model": cast(ManifestModel, dataclasses.asdict(whole.config)),
        "gpus": model.gpus,
        "target": target.description,
        "context": ctx,
        "kv_type": cast(KvType, target.kv),
        "sampling": sampling.defaults(model.metadata, ctx),
        "functions": _functions(lowered, kernels),
        "kernels": kernels,
        "libraries": compiled["libraries"],
        "launches": compiled["launches"],
        "arena_bytes": plan.arena_bytes,
        "io": _io(lowered),
        "kv": lowered.kept,
        "page": PAGE,
        "formats": (totals := format_totals(whole.tensors)),
        "quantization": quantization(model.metadata, totals),
        "weights": "file" if weights else "random",
        "tensors": random_tensors(model, lowered.weights),
        "token_bytes": memory.token_bytes(model.config, target, ctx, lowered.kept),
        "weight_bytes": sum(source.nbytes for source in lowered.weights),
    }
    if lowered.vision:
        body["vision"] = lowered.vision
    if model.gpus > 1:
        body["part_bytes"] = sum(source.nbytes for source in lowered.weights if RANK not in source.name)
    if "exchange" in compiled:
        body["exchange"] = compiled["exchange"]
    if model.features:
        body["images"] = _images(lowered)
    return body


def _images(lowered: Lowered) -> ManifestImages:
    model = lowered.model
    images = any(layer.attention.images for layer in model.config.decoder_layers if layer.attention)
    return {
        "columns": model.features,
        "features": cast(Any, features_type(model, lowered.target)),
        "attention": "image" if images else "causal",
        "positions": "grid" if has_places(model) else "sequence",
    }


def format_totals(tensors: Mapping[str, Any]) -> dict[str, FormatTotals]:
    """Number of tensors and bytes for each format. tensors: by name, with fields `format` and `nbytes`."""
    totals: dict[str, FormatTotals] = {}
    for tensor in tensors.values():
        entry = totals.setdefault(tensor.format, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.nbytes
    return totals


def _functions(lowered: Lowered, kernels: list[ManifestKernel]) -> dict[str, ManifestFunction]:
    decoders: dict[str, ManifestFunction] = {
        f.name: {
            "rows": f.m,
            "single": f.single,
            "logits": f.logits,
            "samples": f.samples,
            "launches": lowered.plan.functions[f.name],
        }
        for f in lowered.functions
    }
    costs, launches = {entry["name"]: entry["operations"]["call"] for entry in kernels}, lowered.plan.functions
    moved = {entry["name"]: entry["bytes"]["call"] for entry in kernels}
    step = sum(moved[launch["kernel"]] for launch in launches["decode"]) if lowered.images else 0
    encoders: dict[str, ManifestFunction] = {
        f"{f.name}{PIECE}{i}" if i else f.name: {
            "rows": f.m,
            "single": 0,
            "logits": f.tokens,
            "samples": False,
            "launches": [*piece],
        }
        for f in lowered.images
        for i, piece in enumerate(pieces(launches[f.name], costs, step))
    }
    return decoders | encoders


def _kernels(lowered: Lowered) -> list[ManifestKernel]:
    target = lowered.target
    entries = (
        {"name": name, "calls": calls} | target.facts(name) | {"tuned": target.origins(name)}
        for name, calls in lowered.plan.calls().items()
    )
    return [cast(ManifestKernel, entry) for entry in entries]


def _io(lowered: Lowered) -> dict[str, Buffer]:
    """The buffers between the host and the kernels."""
    functions, config = lowered.functions, lowered.model.config
    return io_buffers(
        rows=max(f.m for f in functions),
        logits=max(f.logits for f in functions),
        sampled=max((f.logits for f in functions if f.samples), default=0),
        columns=padded(config.columns),
        blocks=lowered.context // PAGE,
        spans={tensor["span"] for tensor in lowered.kept if "span" in tensor},
        drafts=config.predictor is not None,
        vision=lowered.vision,
        images=_images(lowered) if lowered.model.features else None,
    )
