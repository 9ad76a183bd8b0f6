"""Lowers a model to calls of kernels. The kernels are not compiled yet.

In: a model, a Target and a capacity in tokens. Out: `Lowered`, from which the later steps compile the kernels, write
the weights and build the manifest.
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

DEFAULT_CONTEXT = 4096  # default capacity of the KV cache, tokens


@dataclass(frozen=True)
class Lowered:
    """A lowered model.

    context: capacity of the KV cache, in tokens. module: Relax functions that call kernels, and these kernels. kept:
    the tensors that live from step to step. weights: the contents of the weights' files. images: the functions of the
    image encoder; vision: its entry in the manifest, or None.
    """

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
    """Builds, fuses and plans the functions of `model` (a GGUFModel or a synthetic one). ctx: capacity of the KV cache
    in tokens; by default the model's context, at most DEFAULT_CONTEXT. Raises UserError if ctx is too large for the
    model or for the kernels."""
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
    """Returns (capacity of the KV cache in tokens, tensors that live from step to step). Raises UserError as `lower`
    does."""
    ctx = capacity(config, ctx)
    kept = memory.kept(config, target, ctx)
    memory.check_capacity(kept, ctx)
    return ctx, kept


def capacity(config, ctx: int | None) -> int:
    """The capacity of the KV cache in tokens, rounded up to a multiple of PAGE. Raises UserError if ctx is less than 1
    or more than the model's context."""
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
