"""The options that several commands share, except those of runtime/options.py and runtime/sampling/settings.py."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mlc_amd.runtime.options import MANY, Option
from mlc_amd.runtime.sampling.settings import SamplingChanges


class Without:
    """Metadata of a command's parameter that is a group: the options of the group that the command does not have."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Defaults:
    """Metadata of a command's parameter that is a group: by option, what a default of None means for the command."""

    def __init__(self, **texts: str) -> None:
        self.texts = texts


SamplingFlags = Annotated[SamplingChanges, Without("logit_bias", "presence_penalty", "frequency_penalty")]

Prompt = Annotated[
    str | None, Option('the text for the model; may also follow MODEL without a flag; "-" reads it from stdin')
]
File = Annotated[str | None, Option('take the text from this UTF-8 file; "-" is stdin')]
Images = Annotated[tuple[str, ...], Option("show the model this PNG, JPEG, WebP or GIF file; may be repeated")]
MaxTokens = Annotated[int | None, Option(
    "maximum number of tokens to generate", low=1, high=MANY, also=("--n-predict",), unset="-1",
)]  # fmt: skip
Stop = Annotated[tuple[str, ...], Option("end the text before this one; may be repeated")]
Quiet = Annotated[bool, Option("print results only: no greeting, notes, statistics or log of requests")]
Json = Annotated[bool, Option("print everything as one JSON object")]
Synthetic = Annotated[str | None, Option(
    "instead of a file, a model of that shape with random weights: PRESET:FORMAT, such as llama3-8b:q4_0",
)]  # fmt: skip
KeptWeights = Annotated[Literal["file", "none"], Option(
    "none leaves the weights out, for benchmarks: the result is small, and the model runs with random weights",
)]  # fmt: skip
Tracker = Annotated[str | None, Option("HOST:PORT of the tracker of tuning machines (of tune: for --runner rpc)")]
Key = Annotated[str | None, Option(
    "the kind of machine that measures, as gfx1100: the name by which tuning runs ask the tracker for it",
    default="for `mlc-amd tune`: the arch's name",
)]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How answers are generated and shown. thinking, on_full: see `Conversation`."""

    max_tokens: MaxTokens = None
    stop: Stop = ()
    thinking: Annotated[Literal["auto", "on", "off", "low", "medium", "high"], Option(
        "whether the model thinks before it answers, or how much, if its chat template has such a switch; auto leaves "
        "it to the template")] = "auto"  # fmt: skip
    show_thinking: Annotated[bool, Option(
        "print what the model thinks before it answers to stderr, dimmed on a terminal")] = False  # fmt: skip
    quiet: Quiet = False
    on_full: Annotated[Literal["error", "drop"], Option(
        "what to do when the conversation exceeds the context: report an error, or drop its oldest turns",
    )] = "error"  # fmt: skip
