"""The formats of calls of tools (call_formats.py) as grammars: writes expressions for calls of given tools.

Arguments must match the tools' schemas. Where a format writes arguments as JSON, this is enforced completely; otherwise
only the types of the arguments and the values of enums are. Arguments have the order of the schema (Gemma: alphabetical
order), as in all constrained JSON.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlc_amd.runtime.calls.call_arguments import BareCalls, TaggedCalls
from mlc_amd.runtime.calls.call_formats import CallFormat, HarmonyCalls, JsonCalls, NamedCalls
from mlc_amd.runtime.calls.tools import Tool, resolved
from mlc_amd.runtime.grammars.lark import Rules

# limit of the depth of schemas that are enforced where arguments are not JSON; deeper values may be anything
_MAX_DEPTH = 8
_BARE_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,3})?/"
_INTEGER = r"/-?(0|[1-9][0-9]{0,18})/"

Arguments = Callable[[Tool], str]  # makes the expression for a tool's arguments as JSON


@dataclass(frozen=True)
class CallGrammar:
    """The expressions for calls. The last two are "" if calls have openings."""

    calls: str  # the text after `opening`
    more: str  # optional further calls
    trigger: str = ""  # the beginning of a call without an opening
    begun: str = ""  # the text after the trigger


def call_grammar(
    found: CallFormat, rules: Rules, tools: Sequence[Tool], parallel: bool, arguments: Arguments
) -> CallGrammar:
    """The expressions for calls of these tools. parallel: whether an answer may have several calls."""
    return _WRITERS[type(found)](_Writer(rules, tools, parallel, arguments), found)


@dataclass(frozen=True)
class _Writer:
    """Adds the grammar of calls in each format to `rules`. arguments: see `call_grammar`."""

    rules: Rules
    tools: Sequence[Tool]
    parallel: bool
    arguments: Arguments

    def _repeated(self, found: CallFormat, body: str) -> CallGrammar:
        """Calls that each have an opening."""
        calls = self._closed(found, body)
        more = f"({self.rules.SPACE} {self.rules.literal(found.opening)} {calls})*"
        return CallGrammar(calls, self.rules.rule(more) if self.parallel else "")

    def _closed(self, found: CallFormat, body: str) -> str:
        closing = f"{self.rules.SPACE} {self.rules.literal(found.closing)}" if found.closing else ""
        return self.rules.rule(f"{body} {closing}")

    def json_calls(self, found: JsonCalls) -> CallGrammar:
        rules, space = self.rules, self.rules.SPACE

        def key(name: str) -> str:
            return f"{rules.literal(json.dumps(name))} {space} {rules.literal(':')} {space}"

        identifier = f'({key(found.id_key)} /"[0-9]{{1,3}}"/ {space} "," {space})?' if found.id_key else ""
        head = f'"{{" {space} {identifier} {key(found.name_key)}'
        tails = [
            f'{rules.literal(json.dumps(tool.name)[1:])} {space} "," {space} {key(found.arguments_key)} '
            f'{self.arguments(tool)} {space} "}}"'
            for tool in self.tools
        ]
        quote = rules.literal('"')
        tail = rules.choice(tails)
        call = rules.rule(f"{head} {quote} {tail}")
        if found.listed:
            several = f'({space} "," {space} {call})*' if self.parallel else ""
            return CallGrammar(self._closed(found, f'{space} "[" {space} {call} {several} {space} "]"'), "")
        if found.separator:
            more = f"({space} {rules.literal(found.separator)} {space} {call})*" if self.parallel else ""
            calls = self._closed(found, f"{space} {call} {more}")
            # An answer that begins like this is a call.
            trigger = rules.rule(
                rf'/[ \t\r\n]{{0,4}}\{{[ \t\r\n]{{0,8}}"{found.name_key}"[ \t\r\n]{{0,4}}:[ \t\r\n]{{0,4}}"/', "[lazy]"
            )
            return CallGrammar(calls, "", trigger if found.bare else "", rules.rule(f"{tail} {more}"))
        return self._repeated(found, f"{space} {call}")

    def named_calls(self, found: NamedCalls) -> CallGrammar:
        rules, space = self.rules, self.rules.SPACE
        identifier = f"({rules.literal(found.id_mark)} /[A-Za-z0-9]{{9}}/)?" if found.id_mark else ""
        number = '":" /[0-9]{1,3}/' if found.numbered else ""
        bodies = []
        for tool in self.tools:
            name = rules.literal("".join(found.before) + ("functions." if found.numbered else "") + tool.name)
            body = self.arguments(tool)
            body = f'"\\n```json\\n" {body} "\\n```"' if found.fence else f"{space} {body}"
            bodies.append(f"{name} {number} {identifier} {rules.literal(found.after)} {body}")
        call = rules.choice(bodies)
        if not found.repeated:
            return self._repeated(found, f"{space} {call}")
        end = f"{space} {rules.literal(found.each_closing)}" if found.each_closing else ""
        one = rules.rule(f"{space} {rules.literal(found.repeated)} {call} {end}")
        return CallGrammar(self._closed(found, f"{one}{'+' if self.parallel else ''}"), "")

    def tagged_calls(self, found: TaggedCalls) -> CallGrammar:
        rules, space = self.rules, self.rules.SPACE
        bodies = []
        for tool in self.tools:
            head = rules.literal(found.name[0] + tool.name + found.name[1])
            head += f" /[0-9]{{1,3}}/ {rules.literal(found.number_end)}" if found.number_end else ""
            values = [_tagged(found, rules, tool, name) for name in tool.properties]
            further = resolved(tool.parameters, tool.parameters).get("additionalProperties") is not False
            if not values and further and "{}" not in found.value_closing:
                key = f"{rules.literal(found.key[0])} {_BARE_KEY} {rules.literal(found.key[1])}"
                kinds, opening = _kinds(found, rules), _opening(found, rules)
                values = [f"({key} {kinds} {opening} {rules.until(found.value_closing)} {space})*"]
            bodies.append(f"{head} {space} {' '.join(values)} {rules.literal(found.end)}")
        call = rules.choice(bodies)
        if found.several:
            more = f"({space} {call})*" if self.parallel else ""
            return CallGrammar(self._closed(found, f"{space} {call} {more}"), "")
        return self._repeated(found, f"{space} {call}")

    def bare_calls(self, found: BareCalls) -> CallGrammar:
        rules = self.rules
        values = [_BareValues(rules, found.quote, tool.parameters) for tool in self.tools]
        pairs = zip(self.tools, values, strict=True)
        bodies = [f"{rules.literal('call:' + tool.name)} {of.objects(tool.parameters, 0)}" for tool, of in pairs]
        return self._repeated(found, rules.choice(bodies))

    def harmony_calls(self, found: HarmonyCalls) -> CallGrammar:
        """The header and the text of a message; the answer ends with it."""
        rules = self.rules
        channel, message = rules.literal("<|channel|>"), rules.literal("<|message|>")
        kind = f'(" " {rules.literal("<|constrain|>")} "json" | " json")?'
        bodies = []
        for tool in self.tools:
            name = rules.literal(f" to={found.prefix}{tool.name}")
            bodies.append(f'{channel} "commentary" {name} {kind} {message} {self.arguments(tool)}')
            bodies.append(f'{name} {channel} "commentary" {kind} {message} {self.arguments(tool)}')
        return CallGrammar(rules.choice(bodies), "")


_WRITERS: dict[type[CallFormat], Callable[..., CallGrammar]] = {
    JsonCalls: _Writer.json_calls,
    NamedCalls: _Writer.named_calls,
    TaggedCalls: _Writer.tagged_calls,
    BareCalls: _Writer.bare_calls,
    HarmonyCalls: _Writer.harmony_calls,
}


# ---- arguments between tags


def _opening(found: TaggedCalls, rules: Rules) -> str:
    if found.lines:
        return rules.literal("\n")
    return f"{rules.SPACE} {rules.literal(found.value_opening)}" if found.value_opening else ""


def _kinds(found: TaggedCalls, rules: Rules, text: bool = True) -> str:
    """The text that says whether a value is a string. A value that may be a string or not is written as a string."""
    kinds = found.kinds[:1] if text else found.kinds[1:]
    return f"({' | '.join(map(rules.literal, kinds))})" if kinds else ""


def _tagged(found: TaggedCalls, rules: Rules, tool: Tool, name: str) -> str:
    """One argument; it is optional unless the schema requires it."""
    mark = found.value_closing.replace("{}", name)
    closing = rules.literal(("\n" if found.lines else "") + mark)
    schema = resolved(tool.properties[name], tool.parameters)
    of_text, of_json = (f"{_kinds(found, rules, text)} {_opening(found, rules)}" for text in (True, False))
    if "string" not in tool.types(name):
        definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        value = f"{of_json} {rules.json({**definitions, **schema}, lenient=True)} {closing}"
    elif options := _values(schema):
        texts = [f"{of_text} {rules.literal(one)}" for one in options if isinstance(one, str)]
        others = (json.dumps(one, ensure_ascii=False) for one in options if not isinstance(one, str))
        value = f"({' | '.join([*texts, *(f'{of_json} {rules.literal(one)}' for one in others)])}) {closing}"
    else:
        value = f"{of_text} {rules.until(mark)}"
    argument = rules.rule(f"{rules.literal(found.key[0] + name + found.key[1])} {value} {rules.SPACE}")
    return argument if name in tool.required else f"{argument}?"


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists: its `const` or `enum`; empty without these."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return list(values) if isinstance(values, list | tuple) else []


# ---- Gemma


@dataclass(frozen=True)
class _BareValues:
    """Expressions for the values of a tool's arguments. root: the schema of the arguments. made: the expressions of its
    parts, by id and depth, as many references may lead to the same part."""

    rules: Rules
    quote: str
    root: Mapping[str, Any]
    made: dict[tuple[int, int], str] = field(default_factory=dict)

    def _string(self) -> str:
        return self.rules.rule(f"{self.rules.literal(self.quote)} {self.rules.until(self.quote)}")

    def _list(self, item: str) -> str:
        return self.rules.rule(f'"[" ({item} ("," {item})*)? "]"')

    def _open_object(self, inner: str) -> str:
        return self.rules.rule(f'"{{" ({_BARE_KEY} ":" {inner} ("," {_BARE_KEY} ":" {inner})*)? "}}"')

    def _any(self, depth: int) -> str:
        options = [self._string(), _NUMBER, '"true"', '"false"', '"null"']
        if depth < _MAX_DEPTH:
            inner = self._any(_MAX_DEPTH)
            options += self._list(inner), self._open_object(inner)
        return self.rules.choice(options)

    def objects(self, schema: object, depth: int) -> str:
        rules, described = self.rules, resolved(schema, self.root)
        properties = described.get("properties")
        if not isinstance(properties, Mapping) or not properties or depth >= _MAX_DEPTH:
            closed = described.get("additionalProperties") is False
            return rules.rule('"{" "}"') if closed else self._open_object(self._any(depth))
        names = described.get("required")
        required = [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []
        later, first = '""', '""'  # the remaining arguments, after an argument and at the beginning
        for name in sorted(properties, reverse=True):
            value = f"{rules.literal(name + ':')} {self._value(properties[name], depth + 1)}"
            rest = rules.rule(later)
            with_first = rules.rule(f"{value} {rest}")
            with_later = rules.rule(f'"," {value} {rest}')
            first = with_first if name in required else f"{with_first} | {rules.rule(first)}"
            later = with_later if name in required else f"{with_later} | {rest}"
        return rules.rule(f'"{{" {rules.rule(first)} "}}"')

    def _value(self, schema: object, depth: int) -> str:
        described = resolved(schema, self.root)
        if (place := (id(described), depth)) not in self.made:
            self.made[place] = self._own_value(described, depth)
        return self.made[place]

    def _own_value(self, described: Mapping[str, Any], depth: int) -> str:
        rules = self.rules
        values = [described["const"]] if "const" in described else described.get("enum")
        if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values) and values:
            return rules.choice(rules.literal(self.quote + value + self.quote) for value in values)
        options = described.get("anyOf", described.get("oneOf"))
        if depth >= _MAX_DEPTH:
            return self._any(depth)
        if isinstance(options, list | tuple) and options:
            return rules.choice(self._value(option, depth + 1) for option in options)
        kinds = described.get("type")
        makers: dict[str, Callable[[], str]] = {
            "string": self._string,
            "integer": lambda: _INTEGER,
            "number": lambda: _NUMBER,
            "boolean": lambda: '("true" | "false")',
            "null": lambda: '"null"',
            "object": lambda: self.objects(described, depth),
            "array": lambda: self._list(self._value(described.get("items"), depth + 1)),
        }
        names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list | tuple) else []
        known = [makers[name]() for name in names if isinstance(name, str) and name in makers]
        return rules.choice(known) if known else self._any(depth)
