"""Relax functions of a model: `build_module` lets the architecture's decoder emit each of them.

They return what runtime/engine/steps.py's OUTPUTS names: the logits and, unless they score, a token for each row of
these and its log-probability; where the model has a predicting layer, what that reads and hands on, too.
"""

from dataclasses import dataclass, replace

import tvm
from tvm import relax

from mlc_amd.compiler.models import ARCHITECTURES
from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.compiler.models.graph import DRAFTED, HIDDEN, Graph
from mlc_amd.compiler.models.predictor import predictor
from mlc_amd.runtime.engine.functions import CHAIN, FOLLOW
from mlc_amd.runtime.engine.steps import OUTPUTS
from mlc_amd.schedules.operators.rows import output_rows


@dataclass(frozen=True)
class FunctionSpec:
    """One entry point of the compiled model.

    m: rows of a step. single: how many of them, at the front, may be of sequences of their own; the others are a chunk.
    answers: of which rows it gives the logits, see `schedules.operators.rows`. drafts: it is the predicting layer's,
    not the decoder's, behind a step of the decoder, or, if chained, behind itself.
    """

    name: str
    m: int
    single: int
    answers: str
    drafts: bool = False
    chained: bool = False

    @property
    def logits(self) -> int:
        """Rows of logits."""
        return output_rows(self.answers, self.m)

    @property
    def samples(self) -> bool:
        """Whether it chooses a token for each row of logits: all but those that score the rows of a chunk do."""
        return bool(self.single) or self.answers != "all"

    def outputs(self, config: ModelConfig) -> tuple[tuple[str, str], ...]:
        """(kind, name) of what it returns, in order."""
        if not self.samples:
            return (("io", OUTPUTS[0]),)
        kept = DRAFTED if self.drafts else HIDDEN
        return (*(("io", name) for name in OUTPUTS), *([("kv", kept)] if config.predictor is not None else []))


def with_drafts(functions: list[FunctionSpec], config: ModelConfig) -> list[FunctionSpec]:
    """The functions of a model: if it has a predicting layer, those of that layer too. One follows each function of the
    decoder that chooses tokens; chained ones take single rows, of which one step has each number up to the most."""
    if config.predictor is None:
        return functions
    sampling = [f for f in functions if f.samples]
    most = max(f.single for f in sampling)
    steps = [f for f in sampling if f.single == f.m]
    if max(f.m for f in steps) < most:
        steps.append(next(f for f in sampling if f.single == most))
    return [
        *functions,
        *(replace(f, name=FOLLOW + f.name, drafts=True) for f in sampling),
        *(replace(f, name=CHAIN + f.name, drafts=True, chained=True) for f in steps),
    ]


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
                decoder = predictor if spec.drafts else ARCHITECTURES[model.config.architecture].decoder
                logits = decoder(g)
                found = [logits, *(g.sample(logits) if spec.samples else ())]
                if len(spec.outputs(model.config)) > len(found):
                    found.append(g.drafted if spec.drafts else g.hidden)
                outputs = tuple(bb.emit_output(value) for value in found)
            out = relax.Tuple(outputs) if spec.samples else outputs[0]
            bb.emit_func_output(out, params=[var for var, _ in g.parameters.values()])
        parameters[spec.name] = [(kind, name) for name, (_, kind) in g.parameters.items()]
    return bb.get(), parameters
