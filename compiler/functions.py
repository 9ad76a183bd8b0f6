"""The functions of a compiled model: the rows that a step of each function has, and what the function returns.

In: a target's list of functions and the model's configuration. Out: a list of `FunctionSpec`s.
"""

from dataclasses import dataclass, replace

from mlc_amd.compiler.models.config import ModelConfig
from mlc_amd.runtime.artifact.io_names import DRAFTED, HIDDEN, OUTPUTS
from mlc_amd.runtime.artifact.manifest import BLOCK, CHAIN, FOLLOW
from mlc_amd.runtime.artifact.manifest_draft import MOST_BLOCK
from mlc_amd.schedules.operators.layouts import output_rows


@dataclass(frozen=True)
class FunctionSpec:
    """One function (entry point) of the compiled model.

    m: rows of a step. single: the first `single` rows at most are single rows, each of a sequence of its own; the
    remaining rows are a chunk, consecutive tokens of one sequence. answers: the rows whose logits the function returns,
    see `layouts.output_rows`. drafts: the function guesses tokens. Such a function runs after a step of the decoder or,
    if `chained`, after a step of a drafting function; or it guesses a block of tokens. keys: the function only writes
    keys for the drafting model, those of a step's rows.
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
        """The number of rows of logits."""
        return output_rows(self.answers, self.m)

    @property
    def samples(self) -> bool:
        """Whether the function chooses a token for each row of logits. False for functions that score a chunk, and for
        those without logits."""
        return not self.keys and (bool(self.single) or self.answers != "all" or self.chained)

    def outputs(self, config: ModelConfig) -> tuple[tuple[str, str], ...]:
        """The (kind, name) of each tensor that the function returns, in order."""
        if self.keys:
            return ()
        if not self.samples:
            return (("io", OUTPUTS[0]),)
        rows = (DRAFTED,) * bool(config.drafted) if self.drafts else (f"{HIDDEN}{i}" for i in config.kept)
        return (*(("io", name) for name in OUTPUTS), *(("kv", name) for name in rows))


def with_drafts(functions: list[FunctionSpec], config: ModelConfig) -> list[FunctionSpec]:
    """Returns `functions`, and those that guess tokens if the model has a drafting model or layers.

    Each function of the decoder that chooses tokens is followed by a drafting function (FOLLOW). After that, drafting
    continues either with one function for a block of tokens (BLOCK), or with chained functions (CHAIN). These take
    single rows; there is one for each number of rows of a step, up to the largest.
    """
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
