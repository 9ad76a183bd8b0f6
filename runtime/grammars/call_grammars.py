"""The formats of calls of tools (call_formats.py) as grammars.

In:  a format, the tools, and `Rules` to write to. Out: `CallGrammar`: expressions for calls of these tools.

Arguments match the tools' schemas: completely where they are written as JSON; else the types of the arguments and the
values of enums. They have the order of the schema (Gemma: of the alphabet), as in all constrained JSON.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlc_amd.runtime.calls.call_arguments import BareCalls, TaggedCalls
from mlc_amd.runtime.calls.call_formats import CallFormat, HarmonyCalls, JsonCalls, NamedCalls
from mlc_amd.runtime.calls.tools import Tool, resolved
from mlc_amd.runtime.grammars.lark import Rules

_MAX_DEPTH = 8  # of schemas that are followed where arguments are not JSON; deeper values may be anything
_BARE_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_NUMBER = r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,3})?/"
_INTEGER = r"/-?(0|[1-9][0-9]{0,18})/"

Arguments = Callable[[Tool], str]  # the expression for a tool's arguments as JSON


@dataclass(frozen=True)
class CallGrammar:
    """calls: after `opening`; more: optional further calls. trigger: the beginning of a call without opening, followed
    by `begun`; both "" where calls have openings."""

    calls: str
    more: str
    trigger: str = ""
    begun: str = ""


def call_grammar(
    found: CallFormat, rules: Rules, tools: Sequence[Tool], parallel: bool, arguments: Arguments
) -> CallGrammar:
    """parallel: an answer may have several calls."""
    return _WRITERS[type(found)](found, rules, tools, parallel, arguments)


def _repeated(rules: Rules, found: CallFormat, calls: str, parallel: bool) -> CallGrammar:
    """Calls with an opening each."""
    more = rules.rule(f"({rules.SPACE} {rules.literal(found.opening)} {calls})*") if parallel else ""
    return CallGrammar(calls, more)


def _closing(rules: Rules, found: CallFormat) -> str:
    return f"{rules.SPACE} {rules.literal(found.closing)}" if found.closing else ""


def _json_calls(
    found: JsonCalls, rules: Rules, tools: Sequence[Tool], parallel: bool, arguments: Arguments
) -> CallGrammar:
    space = rules.SPACE

    def key(name: str) -> str:
        return f"{rules.literal(json.dumps(name))} {space} {rules.literal(':')} {space}"

    identifier = f'({key(found.id_key)} /"[0-9]{{1,3}}"/ {space} "," {space})?' if found.id_key else ""
    head = f'"{{" {space} {identifier} {key(found.name_key)}'
    tails = [
        f'{rules.literal(json.dumps(tool.name)[1:])} {space} "," {space} {key(found.arguments_key)} '
        f'{arguments(tool)} {space} "}}"'
        for tool in tools
    ]
    quote = rules.literal('"')
    tail = rules.choice(tails)
    call = rules.rule(f"{head} {quote} {tail}")
    several = f'({space} "," {space} {call})*' if parallel else ""
    if found.listed:
        closing = _closing(rules, found)
        return CallGrammar(rules.rule(f'{space} "[" {space} {call} {several} {space} "]" {closing}'), "")
    if found.separator:
        more = f"({space} {rules.literal(found.separator)} {space} {call})*" if parallel else ""
        calls = rules.rule(f"{space} {call} {more} {_closing(rules, found)}")
        # Answers that begin like this are calls.
        trigger = rules.rule(
            rf'/[ \t\r\n]{{0,4}}\{{[ \t\r\n]{{0,8}}"{found.name_key}"[ \t\r\n]{{0,4}}:[ \t\r\n]{{0,4}}"/', "[lazy]"
        )
        return CallGrammar(calls, "", trigger if found.bare else "", rules.rule(f"{tail} {more}"))
    return _repeated(rules, found, rules.rule(f"{space} {call} {_closing(rules, found)}"), parallel)


def _named_calls(
    found: NamedCalls, rules: Rules, tools: Sequence[Tool], parallel: bool, arguments: Arguments
) -> CallGrammar:
    space = rules.SPACE
    identifier = f"({rules.literal(found.id_mark)} /[A-Za-z0-9]{{9}}/)?" if found.id_mark else ""
    bodies = []
    for tool in tools:
        name = rules.literal("".join(found.before) + ("functions." if found.numbered else "") + tool.name)
        number = '":" /[0-9]{1,3}/' if found.numbered else ""
        body = f"{arguments(tool)}"
        if found.fence:
            body = f'"\\n```json\\n" {body} "\\n```"'
        bodies.append(
            f"{name} {number} {identifier} {rules.literal(found.after)} {'' if found.fence else space} {body}"
        )
    call = rules.choice(bodies)
    if not found.repeated:
        return _repeated(rules, found, rules.rule(f"{space} {call} {_closing(rules, found)}"), parallel)
    end = f"{space} {rules.literal(found.each_closing)}" if found.each_closing else ""
    one = rules.rule(f"{space} {rules.literal(found.repeated)} {call} {end}")
    return CallGrammar(rules.rule(f"{one}{'+' if parallel else ''} {_closing(rules, found)}"), "")


# ---- arguments between tags


def _tagged_calls(
    found: TaggedCalls, rules: Rules, tools: Sequence[Tool], parallel: bool, arguments: Arguments
) -> CallGrammar:
    space = rules.SPACE
    bodies = []
    for tool in tools:
        head = rules.literal(found.name[0] + tool.name + found.name[1])
        values = [_tagged(found, rules, tool, name) for name in tool.properties]
        if not values and resolved(tool.parameters, tool.parameters).get("additionalProperties") is not False:
            key = f"{rules.literal(found.key[0])} {_BARE_KEY} {rules.literal(found.key[1])}"
            values = [f"({key} {_opening(found, rules)} {rules.until(found.value_closing)} {space})*"]
        bodies.append(f"{head} {space} {' '.join(values)} {rules.literal(found.end)}")
    call = rules.choice(bodies)
    if found.several:
        more = f"({space} {call})*" if parallel else ""
        return CallGrammar(rules.rule(f"{space} {call} {more} {_closing(rules, found)}"), "")
    return _repeated(rules, found, rules.rule(f"{space} {call} {_closing(rules, found)}"), parallel)


def _opening(found: TaggedCalls, rules: Rules) -> str:
    if found.lines:
        return rules.literal("\n")
    return f"{rules.SPACE} {rules.literal(found.value_opening)}" if found.value_opening else ""


def _tagged(found: TaggedCalls, rules: Rules, tool: Tool, name: str) -> str:
    """One argument, optional unless it is required."""
    closing = rules.literal(("\n" if found.lines else "") + found.value_closing)
    schema = resolved(tool.properties[name], tool.parameters)
    if "string" not in tool.types(name):
        definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        value = f"{rules.json({**definitions, **schema}, lenient=True)} {closing}"
    elif options := _texts(schema):
        value = f"({' | '.join(map(rules.literal, options))}) {closing}"
    else:
        value = rules.until(found.value_closing)
    argument = rules.rule(
        f"{rules.literal(found.key[0] + name + found.key[1])} {_opening(found, rules)} {value} {rules.SPACE}"
    )
    return argument if name in tool.required else f"{argument}?"


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """The values that a schema lists, as written between tags; none if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list | tuple):
        return []
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]


# ---- Gemma


def _bare_calls(
    found: BareCalls, rules: Rules, tools: Sequence[Tool], parallel: bool, arguments: Arguments
) -> CallGrammar:
    bodies = [
        f"{rules.literal('call:' + tool.name)} {_bare_object(found, rules, tool.parameters, tool.parameters, 0)}"
        for tool in tools
    ]
    return _repeated(rules, found, rules.rule(f"{rules.choice(bodies)} {_closing(rules, found)}"), parallel)


def _bare_string(found: BareCalls, rules: Rules) -> str:
    return rules.rule(f"{rules.literal(found.quote)} {rules.until(found.quote)}")


def _bare_any(found: BareCalls, rules: Rules, depth: int) -> str:
    options = [_bare_string(found, rules), _NUMBER, '"true"', '"false"', '"null"']
    if depth < _MAX_DEPTH:
        inner = _bare_any(found, rules, _MAX_DEPTH)
        options.append(rules.rule(f'"[" ({inner} ("," {inner})*)? "]"'))
        options.append(rules.rule(f'"{{" ({_BARE_KEY} ":" {inner} ("," {_BARE_KEY} ":" {inner})*)? "}}"'))
    return rules.choice(options)


def _bare_object(found: BareCalls, rules: Rules, schema: object, root: Mapping[str, Any], depth: int) -> str:
    described = resolved(schema, root)
    properties = described.get("properties")
    if not isinstance(properties, Mapping) or not properties or depth >= _MAX_DEPTH:
        if described.get("additionalProperties") is False:
            return rules.rule('"{" "}"')
        inner = _bare_any(found, rules, depth)
        return rules.rule(f'"{{" ({_BARE_KEY} ":" {inner} ("," {_BARE_KEY} ":" {inner})*)? "}}"')
    names = described.get("required")
    required = set(names) if isinstance(names, list | tuple) else set()
    later, first = '""', '""'  # the remaining arguments: after one, and at the beginning
    for name in sorted(properties, reverse=True):
        value = f"{rules.literal(name + ':')} {_bare_value(found, rules, properties[name], root, depth + 1)}"
        rest = rules.rule(later)
        with_first = rules.rule(f"{value} {rest}")
        with_later = rules.rule(f'"," {value} {rest}')
        first = with_first if name in required else f"{with_first} | {rules.rule(first)}"
        later = with_later if name in required else f"{with_later} | {rest}"
    return rules.rule(f'"{{" {rules.rule(first)} "}}"')


def _bare_value(found: BareCalls, rules: Rules, schema: object, root: Mapping[str, Any], depth: int) -> str:
    described = resolved(schema, root)
    values = [described["const"]] if "const" in described else described.get("enum")
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values) and values:
        return rules.choice(rules.literal(found.quote + value + found.quote) for value in values)
    options = described.get("anyOf", described.get("oneOf"))
    if depth >= _MAX_DEPTH:
        return _bare_any(found, rules, depth)
    if isinstance(options, list | tuple) and options:
        return rules.choice(_bare_value(found, rules, option, root, depth + 1) for option in options)
    kinds = described.get("type")
    makers: dict[str, Callable[[], str]] = {
        "string": lambda: _bare_string(found, rules),
        "integer": lambda: _INTEGER,
        "number": lambda: _NUMBER,
        "boolean": lambda: '("true" | "false")',
        "null": lambda: '"null"',
        "object": lambda: _bare_object(found, rules, described, root, depth),
        "array": lambda: _bare_array(found, rules, described, root, depth),
    }
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list | tuple) else []
    known = [makers[name]() for name in names if name in makers]
    return rules.choice(known) if known else _bare_any(found, rules, depth)


def _bare_array(found: BareCalls, rules: Rules, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    item = _bare_value(found, rules, schema.get("items"), root, depth + 1)
    return rules.rule(f'"[" ({item} ("," {item})*)? "]"')


# ---- Harmony


def _harmony_calls(
    found: HarmonyCalls, rules: Rules, tools: Sequence[Tool], parallel: bool, arguments: Arguments
) -> CallGrammar:
    """A message's header and its text; the answer ends with it."""
    channel, message = rules.literal("<|channel|>"), rules.literal("<|message|>")
    kind = f'(" " {rules.literal("<|constrain|>")} "json" | " json")?'
    bodies = []
    for tool in tools:
        name = rules.literal(f" to={found.prefix}{tool.name}")
        bodies.append(f'{channel} "commentary" {name} {kind} {message} {arguments(tool)}')
        bodies.append(f'{name} {channel} "commentary" {kind} {message} {arguments(tool)}')
    return CallGrammar(rules.choice(bodies), "")


_WRITERS: dict[type[CallFormat], Callable[..., CallGrammar]] = {
    JsonCalls: _json_calls,
    NamedCalls: _named_calls,
    TaggedCalls: _tagged_calls,
    BareCalls: _bare_calls,
    HarmonyCalls: _harmony_calls,
}
