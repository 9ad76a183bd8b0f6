"""Builds all Relax functions of a model: `build_module` lets the architecture's decoder emit each of them.

A function returns the io buffers OUTPUTS of runtime/artifact/io_names.py: the logits; unless it scores, also a token
for each row of logits and its log-probability; and if the model has a draft, the inputs of the draft.
"""

from collections.abc import Sequence

import tvm
from tvm import relax

from mlc_amd.compiler.functions import FunctionSpec
from mlc_amd.compiler.models.drafts import graphs as draft_graphs
from mlc_amd.compiler.models.encoders.graph import encoder
from mlc_amd.compiler.models.graph import Graph
from mlc_amd.compiler.models.registry import architectures
from mlc_amd.compiler.models.transformer import predictor
from mlc_amd.compiler.models.vision.build import ImageSpec, build_encoders


def build_module(
    model, target, functions: list[FunctionSpec], ctx: int, images: Sequence[ImageSpec] = ()
) -> tuple[tvm.IRModule, dict[str, list[tuple[str, str]]]]:
    """(module with a Relax function for each of `functions` and `images`, {function: [(kind, name)] of its
    parameters}); for kinds see `Graph.parameters`. images: the functions of the model's image encoder."""
    bb = relax.BlockBuilder()
    parameters = build_encoders(bb, model, target, images, ctx) if images else {}
    for spec in functions:
        with bb.function(spec.name):
            g = Graph(model, target, spec, ctx, bb)
            with bb.dataflow():
                first, *others = (bb.emit_output(value) for value in _results(g))
            out = relax.Tuple((first, *others)) if others else first
            bb.emit_func_output(out, params=[var for var, _ in g.parameters.values()])
        parameters[spec.name] = [(kind, name) for name, (_, kind) in g.parameters.items()]
    return bb.get(), parameters


def _results(g: Graph) -> list[relax.Var]:
    """The results of the function."""
    spec, config = g.spec, g.model.config
    if spec.keys:
        return draft_graphs.keys(g)
    if spec.drafts:
        logits = draft_graphs.draft(g) if config.draft else predictor(g)
    else:
        logits = encoder(g) if config.encoder else architectures()[config.architecture].decoder(g)
    if not spec.samples:
        return [logits]
    if spec.drafts:
        return [logits, *g.sample(logits), *([g.drafted] if g.drafted is not None else [])]
    return [logits, *g.sample(logits), *(g.hidden[i] for i in config.kept)]
