"""Decoders as Relax functions: one file per architecture, named as GGUF's `general.architecture`."""

from dataclasses import dataclass

import tvm
from tvm import relax

from mlc_amd.compiler.models import llama, qwen2, qwen3
from mlc_amd.compiler.models.graph import Graph
from mlc_amd.runtime.errors import UserError

DECODERS = {"llama": llama.decoder, "qwen2": qwen2.decoder, "qwen3": qwen3.decoder}


@dataclass(frozen=True)
class FunctionSpec:
    """One entry point of the compiled model: how many tokens a call takes, and whose logits it gives."""

    name: str
    m: int
    all_logits: bool = False


def build_module(
    model, target, functions: list[FunctionSpec], ctx: int
) -> tuple[tvm.IRModule, dict[str, list[tuple[str, str]]]]:
    """The module with one Relax function each, and for each function the (kind, name) of its parameters (see
    `Graph.parameters`)."""
    if model.config.architecture not in DECODERS:
        raise UserError(f"architecture '{model.config.architecture}' is not supported; known: {', '.join(DECODERS)}")
    bb = relax.BlockBuilder()
    parameters = {}
    for spec in functions:
        with bb.function(spec.name):
            g = Graph(model, target, spec.m, ctx, spec.all_logits, bb)
            with bb.dataflow():
                out = bb.emit_output(DECODERS[model.config.architecture](g))
            bb.emit_func_output(out, params=[var for var, _ in g.parameters.values()])
        parameters[spec.name] = [(kind, name) for name, (_, kind) in g.parameters.items()]
    return bb.get(), parameters
