"""The one form of requests and answers between the APIs and the engine.

Every API converts its requests to a `ChatRequest` or a `TextRequest`, and the events of the answer to its own form.
Values are checked where they are converted; what the engine refuses is a UserError (400).
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
    """JSON that matches the schema. strict: a schema that cannot be enforced as a whole is an error."""

    schema: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Pattern:
    """All of the answer matches a regular expression, or a grammar in GBNF or in llguidance's dialect of Lark."""

    kind: Literal["regex", "grammar"]
    text: str


AnswerFormat = ResponseFormat | Pattern
ANY_OBJECT = ResponseFormat(schema={"type": "object"})


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """What requests for chats and for texts have in common.

    model           its name, "" for the default one
    sampling        changes of the model's own sampling parameters
    max_tokens      None: as many as fit the context
    min_tokens      no end token is chosen before the answer has so many; generation.ENDLESS: at all
    stop, stop_ids  texts and tokens that end the answer; include_stop: they become part of it
    control_tokens  these have their texts in the answer
    n               answers to each prompt
    logprobs        None: none; k: of each token its own and those of the k most likely ones
    response_format what it must look like; None: any text
    context         tokens of a prompt and its answer together; None: as many as the model's context has
    progress        there are events that say how far prompts are
    client          whoever asks: the scheduler is fair between clients
    slot            the number that stands for its tokens, for what is done with them later
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
    """A conversation that the model shall answer.

    messages            in the form of chat templates: {"role", "content": str}, assistant messages with "tool_calls"
                        ({"id", "type": "function", "function": {"name", "arguments": object}}) and
                        "reasoning_content", tool messages with "tool_call_id"; see prompts.py. If the last one is the
                        assistant's, the answer continues its text (without a text, there is a new one)
    tools               OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}
    tool_choice         "auto", "none", "required", or the name of a function as {"name": ..}
    thinking            values of `chat_template.THINKING` by preference: the first that the template has a switch for
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
        """The tools, unless none may be called."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def is_begun(self) -> bool:
        """The last message is the beginning of the answer."""
        return self.messages[-1]["role"] == "assistant" and not self.messages[-1].get("tool_calls")

    @property
    def continues(self) -> bool:
        """The answer continues a text."""
        return self.is_begun and bool(self.messages[-1]["content"])


@dataclass(frozen=True)
class SeenText:
    """A text with `messages.IMAGE` in the place of each image."""

    text: str
    images: Sequence[ImageSource]


@dataclass(frozen=True)
class Gap:
    """A gap in a text, which the model shall fill. files: beside it; cut: what does not fit the context is left out."""

    before: str
    after: str
    files: tuple[OtherFile, ...] = ()
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class TextRequest(AnswerRequest):
    """Texts, lists of token ids and texts, texts with images, or gaps, that the model shall continue or fill. The
    answers to prompt i have the indices i * n .. i * n + n - 1. max_tokens may be 0. echo, of texts without images:
    each answer begins with its prompt. prompt_logprobs: None: none; k: of each token of the prompt its own and those of
    the k most likely ones in its place."""

    prompts: Sequence[str | SeenText | Sequence[int | str] | Gap]
    echo: bool = False
    prompt_logprobs: int | None = None


MOST_SLOTS = 64

# ---- events of an answer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text and bytes, its natural log probability (None: nothing predicts it), and the same of the most
    likely tokens. rank: of a token of a prompt in its place, 1: the most likely one."""

    id: int
    text: str
    bytes: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The prompt, once, before all else of an answer, if its text or its log probabilities are wanted."""

    text: str = ""
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer itself. logprobs: of the tokens that it comes from."""

    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Thinking:
    """A piece of what the model thinks before it answers."""

    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The model calls a function. number: of the call in this answer, from 0. id: for the result."""

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
    """Tokens. cached: of the prompt, found in the KV cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. ttft: from the engine's call to the first token; decode: from there to the last one."""

    ttft: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """An answer so far."""

    usage: Usage
    timings: Timings


FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the answer with this index. stop: the stop text that ended it, if it was one of the request's. last:
    the end token, if log probabilities are wanted."""

    reason: FinishReason
    usage: Usage
    timings: Timings
    index: int = 0
    stop: str | None = None
    last: TokenLogprob | None = None


Event = PromptEcho | Text | Thinking | ToolCallBegin | ToolCallArguments | PromptProgress | Finish


# ---- whole answers


def tool_call(id: str, name: str, arguments: object) -> dict[str, Any]:
    """A call as chat templates and OpenAI's API have it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed_arguments(given: Any) -> dict[str, Any]:
    """The arguments of a call, an object, its JSON text, or the text of that text, as an object. What was cut off, or
    is no object, is in the field "arguments"."""
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
    """text: of a call the JSON of its arguments; id, name: of a call."""

    kind: Literal["thinking", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call, as an object."""
        return parsed_arguments(self.text)


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """The blocks of one answer's events."""
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
    """(what was said, what was thought, the calls)."""
    text, thought = ("".join(block.text for block in blocks if block.kind == kind) for kind in ("text", "thinking"))
    return text, thought, [block for block in blocks if block.kind == "call"]


def finish_of(events: Iterable[Event]) -> Finish:
    """The end of one answer."""
    return next(event for event in events if isinstance(event, Finish))
