"""The functions of a compiled model: which rows a step of each has, and what it returns.

In: a target's list of functions and the model's configuration. Out: `FunctionSpec`s.
"""

from dataclasses import dataclass, replace

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.runtime.artifact.io_names import DRAFTED, HIDDEN, OUTPUTS
from mlc_amd.runtime.artifact.manifest import BLOCK, CHAIN, FOLLOW
from mlc_amd.runtime.artifact.manifest_draft import MOST_BLOCK
from mlc_amd.schedules.operators.layouts import output_rows


@dataclass(frozen=True)
class FunctionSpec:
    """One entry point of the compiled model.

    m: rows of a step. single: how many of them, at the front, may be of sequences of their own; the others are a chunk.
    answers: of which rows it returns the logits, see `layouts.output_rows`. drafts: it guesses tokens, after a
    step of the decoder or, if chained, after itself, or a block of them. keys: it only writes the keys of a step's rows
    for that.
    """

    name: str
    m: int
    single: int
    answers: str
    drafts: bool = False
    chained: bool = False
    keys: bool = False

    @property
    def logits(self) -> int:
        """Rows of logits."""
        return output_rows(self.answers, self.m)

    @property
    def samples(self) -> bool:
        """Whether it chooses a token for each row of logits: all that have some, but for those that score a chunk."""
        return not self.keys and (bool(self.single) or self.answers != "all" or self.chained)

    def outputs(self, config: ModelConfig) -> tuple[tuple[str, str], ...]:
        """(kind, name) of what it returns, in order."""
        if self.keys:
            return ()
        if not self.samples:
            return (("io", OUTPUTS[0]),)
        rows = (DRAFTED,) * bool(config.drafted) if self.drafts else (f"{HIDDEN}{i}" for i in config.kept)
        return (*(("io", name) for name in OUTPUTS), *(("kv", name) for name in rows))


def with_drafts(functions: list[FunctionSpec], config: ModelConfig) -> list[FunctionSpec]:
    """The functions of a model with those that guess tokens, if something does. One follows each function of the
    decoder that chooses tokens; chained ones take single rows, of which one step has each number up to the most, or a
    block."""
    if config.predictor is None:
        return functions
    sampling = [f for f in functions if f.samples]
    if config.draft and config.draft.block:
        keys = (replace(f, name=FOLLOW + f.name, drafts=True, keys=True) for f in sampling)
        block = FunctionSpec(BLOCK, MOST_BLOCK, 0, "all", drafts=True, chained=True)
        return [*functions, *keys, block]
    most = max(f.single for f in sampling)
    steps = [f for f in sampling if f.single == f.m]
    if max(f.m for f in steps) < most:
        steps.append(next(f for f in sampling if f.single == most))
    return [
        *functions,
        *(replace(f, name=FOLLOW + f.name, drafts=True) for f in sampling),
        *(replace(f, name=CHAIN + f.name, drafts=True, chained=True) for f in steps),
    ]
