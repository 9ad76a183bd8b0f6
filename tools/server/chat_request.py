"""The common form of requests and answers between the APIs and the engine.

Every API converts its requests to a `ChatRequest` or a `TextRequest`, and the events of the answer to its own form. The
APIs check values when they convert them. If the engine rejects a value, it raises UserError (400).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlc_amd.runtime.engine.generation import PromptProgress
from mlc_amd.runtime.sampling.settings import SamplingChanges
from mlc_amd.runtime.text.fill_in_middle import OtherFile
from mlc_amd.tools.server.fields import parse_json
from mlc_amd.tools.server.images import ImageSource

# ---- requests


@dataclass(frozen=True, kw_only=True)
class ResponseFormat:
    """The answer is JSON that matches the schema. strict: whether it is an error if the schema cannot be enforced
    completely."""

    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Pattern:
    """The whole answer matches a regular expression, or a grammar in GBNF or in llguidance's dialect of Lark."""

    kind: Literal["regex", "grammar"]
    text: str


AnswerFormat = ResponseFormat | Pattern
ANY_OBJECT = ResponseFormat(schema={"type": "object"})


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """The fields that requests for chats and for texts share.

    model           its name, "" for the default one
    sampling        changes of the model's own sampling parameters
    max_tokens      limit of an answer; None: as many as fit the context
    min_tokens      before so many tokens no end token is chosen; generation.ENDLESS: never
    stop, stop_ids  texts and tokens that end the answer; include_stop: whether they are part of it
    control_tokens  whether control tokens have their texts in the answer
    n               number of answers to each prompt
    logprobs        None: none; k: log probabilities of each token and of the k most likely tokens
    response_format form of the answer; None: any text
    context         limit of a prompt and its answer together; None: the model's context
    progress        whether there are events that report the progress of prompts
    client          identifies the client; the scheduler is fair between clients
    slot            number by which later requests refer to the tokens of this one
    """

    model: str = ""
    sampling: SamplingChanges = field(default_factory=SamplingChanges)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    include_stop: bool = False
    control_tokens: bool = False
    n: int = 1
    logprobs: int | None = None
    response_format: AnswerFormat | None = None
    context: int | None = None
    progress: bool = False
    client: Hashable = None
    slot: int = 0


@dataclass(frozen=True, kw_only=True)
class ChatRequest(AnswerRequest):
    """A conversation that the model answers.

    messages            in the form of chat templates: {"role", "content": str}, assistant messages with "tool_calls"
                        ({"id", "type": "function", "function": {"name", "arguments": object}}) and
                        "reasoning_content", tool messages with "tool_call_id"; see prompts.py. If the last message is
                        the assistant's, the answer continues its text; if it has no text, there is a new answer
    tools               OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}
    tool_choice         "auto", "none", "required", or a function as {"name": ..}
    thinking            values of `chat_template.THINKING`; the first for which the template has a switch is used
    template_variables  further variables of the chat template
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, str] = "auto"
    parallel_tool_calls: bool = True
    thinking: tuple[str, ...] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def callable_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools; none if the model must not call any."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def is_begun(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return self.messages[-1]["role"] == "assistant" and not self.messages[-1].get("tool_calls")

    @property
    def continues(self) -> bool:
        """Whether the answer continues a text."""
        return self.is_begun and bool(self.messages[-1]["content"])


@dataclass(frozen=True)
class SeenText:
    """A text with `messages.IMAGE` in the place of each image, and the images."""

    text: str
    images: Sequence[ImageSource]


@dataclass(frozen=True)
class Gap:
    """A gap in a text, which the model fills. files: other files. cut: whether what does not fit the context is left
    out."""

    before: str
    after: str
    files: tuple[OtherFile, ...] = ()
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class TextRequest(AnswerRequest):
    """Prompts that the model continues or fills: texts, lists of token ids and texts, texts with images, or gaps. The
    answers to prompt i have the indices i * n .. i * n + n - 1. max_tokens may be 0. echo: whether each answer begins
    with its prompt, which must have no images. prompt_logprobs: None: none; k: log probabilities of each token of the
    prompt and of the k most likely tokens in its place."""

    prompts: Sequence[str | SeenText | Sequence[int | str] | Gap]
    echo: bool = False
    prompt_logprobs: int | None = None


MOST_SLOTS = 64

# ---- the events of an answer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text and bytes, its natural log probability (None if nothing predicts it), and the most likely
    tokens with theirs. rank: for tokens of a prompt: 1 for the most likely token in this place."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The prompt. It is the first event of an answer, if its text or log probabilities are wanted."""

    text: str = ""
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text. logprobs: of the tokens from which it comes."""

    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of the model's thinking before the answer."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The model calls a function. number: of the call in this answer, from 0. id: the result refers to it."""

    id: str
    name: str
    number: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    text: str
    number: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens. cached: tokens of the prompt that were in the KV cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. ttft: from the call of the engine to the first token. decode: from the first to the last token."""

    ttft: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of an answer in progress."""

    usage: Usage
    timings: Timings


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the answer `index`. stop: the request's stop text that ended it, if one did. last: the end token, if
    log probabilities are wanted."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    index: int = 0
    stop: str | None = None
    last: TokenLogprob | None = None


Event = PromptEcho | Text | Thinking | ToolCallBegin | ToolCallArguments | PromptProgress | Finish


# ---- whole answers


def tool_call(id: str, name: str, arguments: object) -> dict[str, Any]:
    """A call in the form of chat templates and OpenAI's API."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed_arguments(given: Any) -> dict[str, Any]:
    """The arguments of a call as an object. given: an object, its JSON text, or the JSON text of this text. Incomplete
    text, or a value that is no object, becomes the field "arguments"."""
    value = given
    for _ in range(3):
        if isinstance(value, str) and value:
            try:
                value = parse_json(value)
            except ValueError:
                break
    if value in (None, ""):
        return {}
    return dict(value) if isinstance(value, Mapping) else {"arguments": given}


@dataclass
class Block:
    """text: for a call, the JSON text of its arguments. id, name: only for a call."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as an object."""
        return parsed_arguments(self.text)


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """The blocks of one answer, from its events."""
    found: list[Block] = []
    calls: dict[int, Block] = {}
    for event in events:
        if isinstance(event, ToolCallBegin):
            calls[event.number] = Block("call", id=event.id, name=event.name)
            found.append(calls[event.number])
        elif isinstance(event, ToolCallArguments):
            calls[event.number].text += event.text
        elif isinstance(event, Text | Thinking):
            kind = "text" if isinstance(event, Text) else "thinking"
            if not found or found[-1].kind != kind:
                found.append(Block(kind))
            found[-1].text += event.text
            if isinstance(event, Text):
                found[-1].logprobs += event.logprobs
    return found


def parts_of(blocks: Sequence[Block]) -> tuple[str, str, list[Block]]:
    """(text, thinking, calls) of the blocks."""
    text, thought = ("".join(block.text for block in blocks if block.kind == kind) for kind in ("text", "thinking"))
    return text, thought, [block for block in blocks if block.kind == "call"]


def finish_of(events: Iterable[Event]) -> Finish:
    """The end of one answer."""
    return next(event for event in events if isinstance(event, Finish))
