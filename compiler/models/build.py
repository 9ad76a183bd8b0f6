"""Relax functions of a model: `build_module` lets the architecture's decoder emit each of them.

They return what runtime/steps.py's OUTPUTS names: the logits and, unless they score, a token for each row of these
and its log-probability.
"""

from dataclasses import dataclass

import tvm
from tvm import relax

from mlc_amd.compiler.models import ARCHITECTURES
from mlc_amd.compiler.models.graph import Graph
from mlc_amd.schedules.rows import output_rows


@dataclass(frozen=True)
class FunctionSpec:
    """One entry point of the compiled model.

    m: rows of a step. single: how many of them, at the front, may be of sequences of their own; the others are a chunk.
    answers: of which rows it gives the logits, see `schedules.rows`.
    """

    name: str
    m: int
    single: int
    answers: str

    @property
    def logits(self) -> int:
        """Rows of logits."""
        return output_rows(self.answers, self.m)

    @property
    def samples(self) -> bool:
        """Whether it chooses a token for each row of logits: all but those that score the rows of a chunk do."""
        return bool(self.single) or self.answers != "all"


def build_module(
    model, target, functions: list[FunctionSpec], ctx: int
) -> tuple[tvm.IRModule, dict[str, list[tuple[str, str]]]]:
    """The module with one Relax function each, and for each function the (kind, name) of its parameters (see
    `Graph.parameters`)."""
    bb = relax.BlockBuilder()
    parameters = {}
    for spec in functions:
        with bb.function(spec.name):
            g = Graph(model, target, spec, ctx, bb)
            with bb.dataflow():
                logits = ARCHITECTURES[model.config.architecture].decoder(g)
                found = [logits, *(g.sample(logits) if spec.samples else ())]
                outputs = tuple(bb.emit_output(value) for value in found)
            out = relax.Tuple(outputs) if spec.samples else outputs[0]
            bb.emit_func_output(out, params=[var for var, _ in g.parameters.values()])
        parameters[spec.name] = [(kind, name) for name, (_, kind) in g.parameters.items()]
    return bb.get(), parameters
