"""The settings of sampling that users can change. Raises UserError for values out of range."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from sys import float_info
from typing import Annotated, TypedDict, Unpack

from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.options import MANY, Option, described
from mlc_amd.runtime.sampling.layout import CHANGES
from mlc_amd.runtime.sampling.philox import SEED_BITS

# Below this temperature the choice is greedy: the scaled logits would overflow float32.
_COLDEST = 1e-5
_FILE = "the model file's, else off"  # the text of a default
LARGEST_BIAS = 1e6
_KINDS = {float: (Real, "a number"), int: (Integral, "a whole number"), int | None: (Integral, "a whole number")}


class SamplingChanges(TypedDict, total=False):
    """The parameters of `Sampling` as keyword arguments. Each one replaces a default."""

    temperature: Annotated[float, Option(
        "divides the logits before sampling; 0 always takes the most probable token",
        default=_FILE, low=0, high=MANY, also=("--temp",))]  # fmt: skip
    top_k: Annotated[int, Option(
        "sample from the k most probable tokens only; 0 disables", default=_FILE, low=0, high=MANY)]  # fmt: skip
    top_p: Annotated[float, Option(
        "sample from the smallest set of most probable tokens with at least this total probability; 1 disables",
        default=_FILE, low=0, high=1)]  # fmt: skip
    min_p: Annotated[float, Option(
        "ignore tokens less probable than this fraction of the most probable one; 0 disables",
        default=_FILE, low=0, high=1)]  # fmt: skip
    repetition_penalty: Annotated[float, Option(
        "above 1, lowers the probability of recent tokens: their logits are divided by it if positive, else "
        "multiplied (Keskar et al. 2019, CTRL); 1 disables",
        default=_FILE, above=0, high=MANY, also=("--repeat-penalty",))]  # fmt: skip
    repetition_window: Annotated[int, Option(
        "number of recent tokens that penalties apply to",
        default="the model file's, else 64", low=0, high=MANY, also=("--repeat-last-n",))]  # fmt: skip
    presence_penalty: Annotated[float, Option("subtracted from the logits of recent tokens", low=-1000, high=1000)]
    frequency_penalty: Annotated[float, Option(
        "subtracted for each time that a token is among the recent ones", low=-1000, high=1000)]  # fmt: skip
    logit_bias: Annotated[Mapping[int, float], Option("token id to what is added to its logit")]
    seed: Annotated[int | None, Option(
        "seed of the random numbers: the same one makes the same choices",
        default="a new one each time", low=0, high=(1 << SEED_BITS) - 1, unset="-1")]  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; see `SamplingChanges`. All defaults together mean the greedy choice. Penalties and biases
    change the logits of at most 256 different tokens: those with a bias, then the latest tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (kind, option) in described(SamplingChanges).items():
            value = getattr(self, name)
            if name == "logit_bias" or (name == "seed" and value is None):
                continue
            number, what = _KINDS[kind]
            if not isinstance(value, number) or not _fits(value):
                raise UserError(f"{name} is {shorten(value)}: it must be {what}")
            if problem := option.problem(name, value):
                raise UserError(problem)
        _check_bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is chosen, without a random number."""
        return self.temperature < _COLDEST or self.top_k == 1 or self.top_p == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether recent tokens change logits."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties and self.repetition_window > 0

    def changed(self, **changes: Unpack[SamplingChanges]) -> "Sampling":
        """A copy with changed parameters. Raises UserError for an unknown name or a value out of range."""
        known = SamplingChanges.__annotations__
        if unknown := sorted(changes.keys() - known.keys()):
            raise UserError(f"there is no sampling parameter {unknown[0]}: choose from {', '.join(known)}")
        return replace(self, **changes)


def without_ends(sampling: Sampling, ends: Iterable[int]) -> Sampling:
    """A copy with a bias that prevents the choice of the tokens `ends` as long as other tokens are possible."""
    return sampling.changed(logit_bias={**sampling.logit_bias, **dict.fromkeys(ends, -LARGEST_BIAS)})


def _fits(value: object) -> bool:
    """Whether a float can hold a whole number. True for other values."""
    return not isinstance(value, Integral) or abs(int(value)) <= float_info.max


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias is {shorten(bias)}: it must be a mapping of token ids to numbers")
    if len(bias) > CHANGES:
        raise UserError(f"logit_bias has {len(bias)} tokens: there can be {CHANGES}")
    for token, value in bias.items():
        if not isinstance(token, Integral) or not 0 <= int(token) < 1 << 30:
            raise UserError(f"logit_bias has {shorten(token)}: it must be a token id")
        if not (isinstance(value, Real) and _fits(value) and abs(float(value)) <= LARGEST_BIAS):
            raise UserError(
                f"logit_bias of token {token} is {shorten(value)}: it must be a number between -{LARGEST_BIAS:.0f} "
                f"and {LARGEST_BIAS:.0f}"
            )
