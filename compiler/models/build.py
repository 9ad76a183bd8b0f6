"""Relax functions of a model: `build_module` lets the architecture's decoder emit each of them.

They return what runtime/artifact/io_names.py's OUTPUTS names: the logits and, unless they score, a token for each row
of these and its log-probability; where the model has a predicting layer, its input or output, too.
"""

from collections.abc import Sequence

import tvm
from tvm import relax

from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.models.encoder import encoder
from mlc_amd.compiler.models.graph import Graph
from mlc_amd.compiler.models.registry import architectures
from mlc_amd.compiler.models.transformer import predictor
from mlc_amd.compiler.models.vision.build import ImageSpec, build_encoders


def build_module(
    model, target, functions: list[FunctionSpec], ctx: int, images: Sequence[ImageSpec] = ()
) -> tuple[tvm.IRModule, dict[str, list[tuple[str, str]]]]:
    """The module with one Relax function each, and for each function the (kind, name) of its parameters (see
    `Graph.parameters`). images: the functions of the model's image encoder."""
    bb = relax.BlockBuilder()
    parameters = build_encoders(bb, model, target, images, ctx) if images else {}
    for spec in functions:
        with bb.function(spec.name):
            g = Graph(model, target, spec, ctx, bb)
            with bb.dataflow():
                decoder = predictor if spec.drafts else architectures()[model.config.architecture].decoder
                logits = encoder(g) if model.config.encoder else decoder(g)
                found = [logits, *(g.sample(logits) if spec.samples else ())]
                if spec.samples:
                    found += [g.drafted] if spec.drafts else [g.hidden[i] for i in model.config.kept]
                outputs = tuple(bb.emit_output(value) for value in found)
            out = relax.Tuple(outputs) if spec.samples else outputs[0]
            bb.emit_func_output(out, params=[var for var, _ in g.parameters.values()])
        parameters[spec.name] = [(kind, name) for name, (_, kind) in g.parameters.items()]
    return bb.get(), parameters
