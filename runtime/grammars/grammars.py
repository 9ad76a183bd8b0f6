"""JSON schemas, regular expressions, grammars and calls of tools as constraints on the tokens of answers.

In: a tokenizer, the size of the logits; a schema, an expression, a grammar or tools; the text of the prompt, which
shows whether the answer begins with thinking. Out: `Grammar` (constraints.py); called once for each answer, it returns
a `Constraint`. Raises UserError for invalid input.

llguidance compiles the grammars (extra `serve`). A grammar applies to the answer itself; the thinking before it
(reasoning.py) is free. Compiling takes 10 ms to 5 s; the first grammar takes some seconds more, for tables of the
vocabulary. Call the methods in a separate thread if others must not wait. All methods are thread-safe.

Schemas: JSON Schema of draft 2020-12 and earlier. Keywords that llguidance does not enforce raise UserError: `not`,
`if`/`then`/`else`, `dependentSchemas`, `dependentRequired`, `uniqueItems`, `contains`, `propertyNames`,
`unevaluatedProperties`, references to other documents, formats other than date-time, time, date, duration, email,
hostname, ipv4, ipv6, uuid and uri, look-around in patterns, `oneOf` with overlapping options, `minProperties` and
`maxProperties` together with optional properties, more than about 2000 optional properties, and nesting deeper than
about 60 objects. Properties have the order of the schema. Other properties are only allowed with `additionalProperties`
(lark.py); then the same name may occur twice.
"""

import functools
import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mlc_amd.runtime.calls.call_formats import CallFormat, HarmonyCalls
from mlc_amd.runtime.calls.tools import Tool
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.extras import require
from mlc_amd.runtime.grammars import gbnf
from mlc_amd.runtime.grammars.call_grammars import call_grammar
from mlc_amd.runtime.grammars.constraints import Grammar, shown
from mlc_amd.runtime.grammars.grammar_trial import TOO_MUCH, ByteVocabulary, GrammarTrial, limits
from mlc_amd.runtime.grammars.lark import ControlTokens, Rules, check_references
from mlc_amd.runtime.text import reasoning
from mlc_amd.runtime.text.tokenizer import Tokenizer

# Sets of tokens for which llguidance stores parts of masks, for places where all of a set may follow: white space,
# characters of a JSON string. Its default lacks {1,4} and {1,7}; with them, masks for a string's last characters take
# half the time (152,000 tokens, p90).
_SLICES = [r"[\x20\x0A\x0D\x09]+"]
_SLICES += [r'[^"\\\x00-\x1F\x7F]' + count for count in ("{1,4}", "{1,7}", "{1,10}", "{1,30}", "+")]
_CACHED = 32  # number of compiled grammars that are kept; most take less than 1 MB, some up to 100 MB
_CHECKED = 1024  # number of results of trials that are kept
_FORCED = 1024  # number of encoded texts (that must follow) that are kept
_MAX_CHARACTERS = 1 << 20  # limit of a grammar
_ANY = {"type": "object"}
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:(?!:=))", re.MULTILINE)  # matches Lark, but not GBNF
_NEXT = "<|end|><|start|>assistant"  # Harmony: between the text of a message and the header of the next one
_SCHEMA, _GRAMMAR = "the JSON schema", "the grammar"  # names in error messages
# "^" at the beginning and "$" at the end of a regular expression; not an escaped "$".
_ANCHORS = re.compile(r"\A\^|(?<!\\)((?:\\\\)*)\$\Z")

ToolChoice = Literal["auto", "required", "none"] | Mapping[str, str]


class Grammars:
    """The grammars of one model. vocab: the size of its logits, not smaller than the tokenizer's vocabulary. thinking:
    the marks of its thinking; None: determined by the vocabulary. prompt (in all methods): the rendered text that the
    answer follows; None: there is no thinking, as in completions and inside answers. Raises UserError if llguidance is
    not installed."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, thinking: reasoning.ReasoningFormat | None = None) -> None:
        require("llguidance")
        self._tokenizer, self._vocab = tokenizer, vocab
        self._thinking = thinking or reasoning.detect(tokenizer.has_token)
        ids = range(tokenizer.vocab_size)
        self._control = ControlTokens({tokenizer.token_text(i): i for i in ids if tokenizer.is_special(i)})
        self._ends = sorted(tokenizer.end_ids)
        if not self._ends:
            raise UserError("this model has no token that ends an answer, which grammars need")
        self._trial = GrammarTrial(vocab, self._ends, self._control.ids)
        self._lock = threading.Lock()
        self._tables: Any = None
        self._encode = functools.lru_cache(_FORCED)(tokenizer.encode_inner)
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()
        self._problems: OrderedDict[bytes, str] = OrderedDict()

    def close(self) -> None:
        """Ends the process of trials. It is started again when needed."""
        self._trial.close()

    # ---- the kinds of constraints

    def json_schema(self, schema: Mapping[str, Any], prompt: str | None = None, lenient: bool = False) -> Grammar:
        """The answer is JSON that matches the schema. lenient: ignores keywords that cannot be enforced."""
        rules = Rules(self._control)
        return self._grammar(rules, f"{rules.SPACE} {_json(rules, schema, lenient)}", prompt, _SCHEMA)

    def regex(self, text: str, prompt: str | None = None) -> Grammar:
        """The whole answer matches the expression (syntax: Rust's regex crate). Ignores "^" and "$" around it."""
        import llguidance

        rules = Rules(self._control)
        _check_text(text, "the regular expression")
        terminal = llguidance.regex_to_lark(_ANCHORS.sub(r"\1", text), "")
        return self._grammar(rules, rules.rule(f"/{terminal}/" if terminal else '""'), prompt, "the regular expression")

    def grammar(self, text: str, prompt: str | None = None) -> Grammar:
        """The answer matches the rule `root` of a grammar in GBNF (llama.cpp's), or the rule `start` of one in Lark."""
        _check_text(text, _GRAMMAR)
        if _LARK.search(text):
            return self.lark(text, prompt)
        return self._grammar(Rules(self._control), "@answer", prompt, "the grammar in GBNF", gbnf.to_lark(text))

    def lark(self, text: str, prompt: str | None = None) -> Grammar:
        """The answer matches the rule `start` of a grammar in llguidance's dialect of Lark."""
        return self._grammar(Rules(self._control), "@answer", prompt, _GRAMMAR, text)

    def tool_calls(
        self,
        found: CallFormat,
        tools: Sequence[Tool],
        choice: ToolChoice = "auto",
        parallel: bool = True,
        prompt: str | None = None,
        answer: Mapping[str, Any] | None = None,
    ) -> Grammar | None:
        """Calls of tools in the model's format `found` (tool_calls.detect). choice: "auto": text, in which calls may
        begin, or `answer`, JSON that matches this schema; only calls follow a call. "required": calls only; {"name":
        ..}: one call of this tool. "none": None, without a constraint (or `answer`). parallel: there may be several
        calls.

        A schema of a tool that cannot be enforced is an error if the tool is strict; else as much of it as possible is
        enforced.
        """
        named = choice.get("name") if isinstance(choice, Mapping) else None
        if named is not None:
            tools = [tool for tool in tools if tool.name == named]
            if not tools:
                raise UserError(f"tool_choice names the tool {named!r}, which is not among the tools")
        if choice == "none" or not tools:
            if choice == "required":
                raise UserError("tool_choice is 'required', but there are no tools")
            return None if answer is None else self.json_schema(answer, prompt)
        if answer is not None:
            self._check(_source(rules := Rules(self._control), _json(rules, answer), _SCHEMA), _SCHEMA)
        schemas = {tool.name: tool.parameters or _ANY for tool in tools}
        single = not parallel or named is not None
        try:
            return self._calls(found, tools, schemas, choice == "auto", single, prompt, answer)
        except UserError:
            usable = {tool.name: self._usable(tool) for tool in tools}
            if usable == schemas:
                raise
            return self._calls(found, tools, usable, choice == "auto", single, prompt, answer)

    def _calls(
        self,
        found: CallFormat,
        tools: Sequence[Tool],
        schemas: Mapping[str, Mapping[str, Any]],
        auto: bool,
        single: bool,
        prompt: str | None,
        answer: Mapping[str, Any] | None,
    ) -> Grammar:
        """schemas: the schemas of the arguments by the tool's name."""
        rules, what = Rules(self._control), "the schema of a tool"
        try:
            calls = call_grammar(
                found, rules, tools, not single, lambda tool: _json(rules, schemas[tool.name], not tool.strict)
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{what} cannot be used: {error}") from error
        text = rules.TEXT if answer is None else f"{rules.SPACE} {_json(rules, answer)}"
        if isinstance(found, HarmonyCalls):
            free = answer is None
            if prompt is None:  # the prompt ends inside the message of the answer, so calls are messages after it
                after = f"{rules.literal(_NEXT)} {self._turn(rules, calls.calls, free)}"
                start = f"{rules.TEXT if free else ''} {after} | {text}" if auto else after
            else:
                start = self._turn(rules, calls.calls + (f" | {self._final(rules, text)}" if auto else ""), free)
            return self._compile(rules, start, what)
        opened = f"{rules.literal(found.opening)} {calls.calls} {calls.more}"
        if not auto:
            start = f"{rules.SPACE} {opened}" + (f" | {calls.calls}" if found.bare else "")
        elif answer is not None:
            start = f"{rules.SPACE} {opened} | {text}"
        else:
            start = f"{rules.until(found.opening)} {calls.calls} {calls.more} | {rules.TEXT}"
            start += f" | {calls.trigger} {calls.begun}" if calls.trigger else ""
        return self._grammar(rules, start, prompt, what, free=answer is None)

    def _usable(self, tool: Tool) -> Mapping[str, Any]:
        """The schema of the tool; if it cannot be used, that of any object. Raises UserError if the tool is strict."""
        rules = Rules(self._control)
        what = f"the schema of the tool {tool.name}"
        try:
            self._check(_source(rules, _json(rules, tool.parameters or _ANY, not tool.strict), what), what)
        except UserError:
            if tool.strict:
                raise
            return _ANY
        return tool.parameters or _ANY

    # ---- the answer after the model's thinking

    def _grammar(
        self, rules: Rules, answer: str, prompt: str | None, what: str, nested: str = "", free: bool = False
    ) -> Grammar:
        """The grammar of `answer`, after thinking if the model may think. free: the thinking may be the whole answer,
        and its marks may be written with ordinary tokens."""
        if prompt is None:
            return self._compile(rules, answer, what, nested)
        if isinstance(self._thinking, reasoning.Harmony):
            start = self._turn(rules, self._final(rules, rules.rule(answer)), free)
            return self._compile(rules, start, what, nested)
        assert isinstance(self._thinking, reasoning.Tags)
        opening, closing = self._thinking.marks[0] + self._thinking.label, self._thinking.marks[1]
        after = f"{rules.spelled(closing, rules.TEXT)} {rules.SPACE} {rules.rule(answer)}"
        after += f" | {rules.without(closing)}" if free else ""
        end = prompt.rstrip()
        if end.endswith(opening):
            answer = after
        elif not end.endswith(closing) and self._tokenizer.has_token(self._thinking.marks[0]):
            begun = (rules.spelled if free else rules.mark)(opening, rules.SPACE)
            answer = f"{begun} {rules.rule(after)} | {rules.rule(answer)}"
        return self._compile(rules, answer, what, nested)

    @staticmethod
    def _turn(rules: Rules, last: str, free: bool) -> str:
        """Harmony: messages of thinking, then `last`. The prompt ends inside the header of a message. free: the answer
        may end in the thinking."""
        header = f'{rules.literal("<|channel|>")} ("analysis" | "commentary") {rules.literal("<|message|>")}'
        thought = rules.rule(f"{header} {rules.TEXT}")
        end = f" | {thought}" if free else ""
        return f"({thought} {rules.literal(_NEXT)})* ({last}{end})"

    @staticmethod
    def _final(rules: Rules, answer: str) -> str:
        """Harmony: the message with the answer."""
        kind = f'(" "? {rules.literal("<|constrain|>")} "json")?'
        return f"{rules.literal('<|channel|>final')} {kind} {rules.literal('<|message|>')} {answer}"

    # ---- compiling

    def _compile(self, rules: Rules, start: str, what: str, nested: str = "") -> Grammar:
        """Compiles a grammar. what: its name in errors. nested: the text of the grammar "answer"."""
        source = _source(rules, start, what, nested)
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
                return self._compiled[source]
        self._check(source, what)
        grammar = Grammar(self._matcher(source, what), self._vocab, self._encode)
        with self._lock:
            self._compiled[source] = grammar
            while len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def _check(self, source: str, what: str) -> None:
        """Raises UserError for a grammar that failed its trial, and must not be compiled in this process."""
        key = hashlib.blake2b(source.encode()).digest()
        with self._lock:
            problem = self._problems.get(key)
        if problem is None:
            problem = self._trial.problem(source)
            if problem != TOO_MUCH:  # other load of the machine may also have caused TOO_MUCH
                with self._lock:
                    self._problems[key] = problem
                    while len(self._problems) > _CHECKED:
                        self._problems.popitem(last=False)
        if problem:
            raise UserError(f"{what} cannot be used: {shown(problem, what == _GRAMMAR)}")

    def _matcher(self, source: str, what: str) -> Any:
        import llguidance

        with self._lock:
            if self._tables is None:
                self._tables = self._read_vocabulary()
        matcher = llguidance.LLMatcher(self._tables, source, log_level=0, limits=limits())
        matcher.compute_bitmask()  # the first mask takes longest; copies of the matcher share this work
        if matcher.is_error():
            raise UserError(f"{what} cannot be used: {shown(matcher.get_error(), what == _GRAMMAR)}")
        return matcher

    def _read_vocabulary(self) -> Any:
        """llguidance's tables of the vocabulary. Logits beyond the tokenizer's tokens are never allowed."""
        import llguidance

        tokens = self._tokenizer.vocabulary() + [b""] * (self._vocab - self._tokenizer.vocab_size)
        vocabulary: Any = ByteVocabulary(tokens, self._ends, list(self._control.ids.values()))
        return llguidance.LLTokenizer(vocabulary, eos_token=self._ends, slices=_SLICES)


def _check_text(text: str, what: str) -> None:
    """Raises UserError for a text that is too large or not valid Unicode (JSON allows lone surrogates)."""
    if len(text) > _MAX_CHARACTERS:
        raise UserError(f"{what} cannot be used: it is larger than {_MAX_CHARACTERS} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} cannot be used: it has an unpaired surrogate at {error.start}") from None


def _source(rules: Rules, start: str, what: str, nested: str = "") -> str:
    """The grammar in the form for llguidance. Raises UserError if it is too large."""
    grammars = [{"name": "all", "lark_grammar": rules.source(start)}]
    grammars += [{"name": "answer", "lark_grammar": nested}] if nested else []
    source = json.dumps({"grammars": grammars})
    if len(source) > _MAX_CHARACTERS:
        raise UserError(f"{what} cannot be used: it is larger than {_MAX_CHARACTERS} characters")
    return source


def _json(rules: Rules, schema: object, lenient: bool = False) -> str:
    """The expression for a schema. Raises UserError for an invalid schema."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise UserError("the JSON schema cannot be used: it must be an object")
    try:
        check_references(schema)
        return rules.json(schema, lenient)
    except RecursionError as error:
        raise UserError("the JSON schema cannot be used: it is nested too deeply") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"the JSON schema cannot be used: {error}") from error
