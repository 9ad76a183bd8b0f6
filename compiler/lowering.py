"""A model to calls of kernels, before the kernels are compiled.

In: a model, a Target and a capacity. Out: `Lowered`, which has all that the later steps need: kernels are compiled from
its module, weights written by its sources, and the manifest built of it.
"""

from dataclasses import dataclass
from typing import Any

import tvm

from mlc_amd.compiler import memory
from mlc_amd.compiler.codegen.target import Target
from mlc_amd.compiler.functions import FunctionSpec, with_drafts
from mlc_amd.compiler.models.build import build_module
from mlc_amd.compiler.models.vision.build import ImageSpec, described, image_functions
from mlc_amd.compiler.passes import fuse
from mlc_amd.compiler.plan import LaunchPlan, make_plan
from mlc_amd.compiler.weights import WeightSource, weight_sources
from mlc_amd.runtime.artifact.io_names import ENCODED
from mlc_amd.runtime.artifact.manifest import KvTensor, Vision
from mlc_amd.runtime.errors import UserError
from mlc_amd.schedules.operators.attention import PAGE

DEFAULT_CONTEXT = 4096  # tokens of KV cache by default


@dataclass(frozen=True)
class Lowered:
    """context: tokens of KV cache. module: calls of kernels. kept: what lives from step to step. weights: what the
    weights' files hold. images: the functions of the image encoder; vision: the manifest's entry of it."""

    model: Any
    target: Target
    context: int
    functions: list[FunctionSpec]
    module: tvm.IRModule
    kept: list[KvTensor]
    weights: list[WeightSource]
    plan: LaunchPlan
    images: list[ImageSpec]
    vision: Vision | None


def lower(model, target: Target, ctx: int | None = None) -> Lowered:
    """Builds, fuses and plans the functions of `model` (a GGUFModel or a synthetic one). ctx: tokens of KV cache, by
    default the model's context up to 4096. UserError if it is too large for the model or for kernels."""
    ctx, kept = sizes(model.config, target, ctx)
    functions = with_drafts(target.functions_of(model.config, ctx, model.gpus), model.config)
    images = image_functions(model.vision.config, ctx) if model.vision else []
    module, parameters = build_module(model, target, functions, ctx, images)
    module = target.select_kernels(fuse(module, target))
    weights = weight_sources(model, target, parameters, ctx)
    tensors = {source.name: [spec.name for spec in source.planes] for source in weights}
    outputs = {spec.name: spec.outputs(model.config) for spec in functions}
    outputs |= {spec.name: (("io", ENCODED),) for spec in images}
    plan = make_plan(module, parameters, tensors, outputs, target.joins)
    vision = described(model.vision, model.config.hidden, images, parameters) if images else None
    return Lowered(model, target, ctx, functions, module, kept, weights, plan, images, vision)


def sizes(config, target: Target, ctx: int | None) -> tuple[int, list[KvTensor]]:
    """Tokens of KV cache, and what lives from step to step. UserError as `lower`."""
    ctx = capacity(config, ctx)
    kept = memory.kept(config, target, ctx)
    memory.check_capacity(kept, ctx)
    return ctx, kept


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
