"""How tokens are chosen: the parameters that users set, checked (UserError for values out of range)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TypedDict, Unpack

from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.sampling.layout import CHANGES
from mlc_amd.runtime.sampling.philox import SEED_BITS

# Below this temperature the choice is greedy: float32 would overflow.
_COLDEST = 1e-5
# Of each parameter: its kind, the smallest and the largest value.
_LIMITS = {
    "temperature": (Real, 0, math.inf),
    "top_k": (Integral, 0, math.inf),
    "top_p": (Real, 0, 1),
    "min_p": (Real, 0, 1),
    "repetition_penalty": (Real, 0, math.inf),
    "repetition_window": (Integral, 0, math.inf),
    "presence_penalty": (Real, -1000, 1000),
    "frequency_penalty": (Real, -1000, 1000),
    "seed": (Integral, 0, (1 << SEED_BITS) - 1),
}
LARGEST_BIAS = 1e6
_KINDS = {Real: "a number", Integral: "a whole number"}


class SamplingChanges(TypedDict, total=False):
    """Parameters of `Sampling` as keyword arguments, each of which replaces a default."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens; every default means "off", which leaves the greedy choice.

    temperature: logits are divided by it before the draw; 0 (or less than 1e-5) = greedy.
    top_k: keep the k largest logits; 0 = all.
    top_p: keep the smallest set of most probable tokens whose probabilities reach this sum; 1 = all.
    min_p: keep tokens at least this fraction as probable as the most probable one; 0 = all.
    repetition_penalty: positive logits of recent tokens are divided by it, others multiplied (Keskar et al. 2019,
        CTRL); 1 = off.
    repetition_window: how many of the last tokens count as recent.
    presence_penalty: subtracted from the logits of recent tokens.
    frequency_penalty: subtracted for each occurrence of a token among the recent ones.
    logit_bias: token id to the number that is added to its logit.
    seed: start of the random numbers; None = a new one every time.

    Penalties and biases change the logits of 256 different tokens at most: those with a bias, then the latest.
    """

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
        for name, (kind, low, high) in _LIMITS.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if not isinstance(value, kind):
                raise UserError(f"{name} is {shorten(value)}: it must be {_KINDS[kind]}")
            if not low <= value <= high or value == math.inf:
                limits = f"between {low} and {high}" if high < math.inf else f"{low} or more"
                raise UserError(f"{name} is {shorten(value)}: it must be {limits}")
        if self.repetition_penalty == 0:
            raise UserError("repetition_penalty is 0: it must be greater than 0 (1 = off)")
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
        """A copy with other values of some parameters. UserError for an unknown name and a value out of range."""
        known = SamplingChanges.__annotations__
        if unknown := sorted(changes.keys() - known.keys()):
            raise UserError(f"there is no sampling parameter {unknown[0]}: choose from {', '.join(known)}")
        return replace(self, **changes)


def without_ends(sampling: Sampling, ends: Iterable[int]) -> Sampling:
    """The same with a bias that prevents the choice of these tokens as long as there are others."""
    return sampling.changed(logit_bias={**sampling.logit_bias, **dict.fromkeys(ends, -LARGEST_BIAS)})


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias is {shorten(bias)}: it must be a mapping of token ids to numbers")
    if len(bias) > CHANGES:
        raise UserError(f"logit_bias has {len(bias)} tokens: there can be {CHANGES}")
    for token, value in bias.items():
        if not isinstance(token, Integral) or not 0 <= int(token) < 1 << 30:
            raise UserError(f"logit_bias has {shorten(token)}: it must be a token id")
        if not isinstance(value, Real) or not abs(float(value)) <= LARGEST_BIAS:
            raise UserError(
                f"logit_bias of token {token} is {shorten(value)}: it must be a number between -{LARGEST_BIAS:.0f} "
                f"and {LARGEST_BIAS:.0f}"
            )
