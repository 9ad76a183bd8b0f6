"""Grammars in GBNF (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md) -> llguidance's Lark.

In: a grammar's text. Out: `to_lark(text)`, whose rule `start` is the grammar's `root`. UserError, with the line, for
what is no grammar.
Rules get names of their own: GBNF's may be words that mean something in Lark, begin with a digit, or differ in case
only. A rule that refers to no others than such rules is a terminal (a name in capitals), which llguidance matches
faster.
"""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from mlc_amd.runtime.errors import UserError, shorten

_TOKENS = re.compile(
    r"""(?P<space>(?:[ \t\r\n]|\#[^\r\n]*)+)
    |(?P<literal>"(?:[^"\\]|\\.)*")
    |(?P<set>\[(?:[^\]\\]|\\.)*\])
    |(?P<token><\[[0-9]{1,9}\]>)
    |(?P<repeat>[*+?]|\{\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9}\s*)?)?\})
    |(?P<define>::=)
    |(?P<name>[\w-]+)
    |(?P<mark>[|().])""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([^\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
_ANY = r"/(.|\n)/"
_DEEPEST = 100  # parentheses


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def to_lark(text: str) -> str:
    """See the module's docstring."""
    rules = _Parser(list(_tokens(text))).rules()
    if "root" not in rules:
        raise _wrong("there is no rule named root, which grammars begin with")
    for body in rules.values():
        for part in body:
            if part.kind == "name" and part.text not in rules:
                raise _wrong(f"there is no rule named {shorten(part.text)}", part.line)
    terminals = _terminals(rules)
    names = {name: f"{'R' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)}
    names["root"] = "start"
    written = (
        " ".join(names[part.text] if part.kind == "name" else part.text for part in body) for body in rules.values()
    )
    return "\n".join(f"{names[name]}: {body}" for name, body in zip(rules, written, strict=True))


def _terminals(rules: dict[str, list[_Token]]) -> set[str]:
    found: set[str] = set()
    size = -1
    while len(found) > size:
        size = len(found)
        for name, body in rules.items():
            if name != "root" and all(part.text in found for part in body if part.kind in ("name", "token")):
                found.add(name)
    return found


def _wrong(what: str, line: int | None = None) -> UserError:
    return UserError(f"the grammar cannot be used: {f'line {line}: ' if line else ''}{what}")


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKENS.match(text, at)
        if match is None:
            raise _wrong(f"{shorten(text[at : at + 20])} is no part of a grammar", line)
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match[0], line)
        at, line = match.end(), line + match[0].count("\n")
    yield _Token("end", "", line)


class _Parser:
    """Line ends need no care: a rule ends where a name and ::= follow."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._at = tokens, 0

    def rules(self) -> dict[str, list[_Token]]:
        """The parts of each rule, as Lark has them; names are still GBNF's. Of two of a name the last counts."""
        found: dict[str, list[_Token]] = {}
        while self._next.kind != "end":
            if not self._at_rule():
                raise _wrong(f"{shorten(self._next.text)} is where a rule (name ::= ..) should begin", self._next.line)
            name = self._next.text
            self._at += 2
            found[name] = self._alternatives(0)
        return found

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _at_rule(self) -> bool:
        return self._next.kind == "name" and self._tokens[self._at + 1].kind == "define"

    def _alternatives(self, depth: int) -> list[_Token]:
        if depth > _DEEPEST:
            raise _wrong("its parentheses are nested too deeply", self._next.line)
        parts = self._sequence(depth)
        while self._next.text == "|":
            self._at += 1
            parts += [_Token("mark", "|", 0), *self._sequence(depth)]
        return parts

    def _sequence(self, depth: int) -> list[_Token]:
        parts: list[_Token] = []
        last = 0  # where the last item begins
        while self._next.kind != "end" and self._next.text not in ("|", ")") and not self._at_rule():
            token = self._next
            self._at += 1
            if token.kind == "repeat" and parts and parts[-1].kind != "repeat":
                parts[last:] = _repeated(parts[last:], token)
                continue
            last = len(parts)
            if token.text == "(":
                inner = self._alternatives(depth + 1)
                if self._next.text != ")":
                    raise _wrong("a parenthesis is not closed", token.line)
                self._at += 1
                parts += [_Token("mark", "(", 0), *inner, _Token("mark", ")", 0)]
            elif token.kind in _WRITERS:
                parts.append(token._replace(text=_WRITERS[token.kind](token)))
            else:
                raise _wrong(f"{shorten(token.text)} has nothing before it that it applies to", token.line)
        return parts or [_Token("literal", '""', 0)]


def _repeated(item: list[_Token], token: _Token) -> list[_Token]:
    counts = [int(count) for count in re.findall("[0-9]+", token.text)]
    if len(counts) == 2 and counts[0] > counts[1]:
        raise _wrong(f"{token.text} ends before it begins", token.line)
    if counts and not counts[-1] and not token.text.rstrip("} ").endswith(","):  # which Lark has not
        return [_Token("repeat", '""', token.line)]
    return [*item, token._replace(text="".join(token.text.split()))]


def _characters(token: _Token) -> list[tuple[str, bool]]:
    """The characters between a token's first and last one, each with whether it was escaped."""
    inner, at, found = token.text[1:-1], 0, []
    while at < len(inner):
        match = _CHARACTER.match(inner, at)
        if match is None or (match[4] and match[4] not in _ESCAPES):
            raise _wrong(f"there is no escape {shorten(inner[at : at + 2])}", token.line)
        digits = match[1] or match[2] or match[3]
        code = int(digits, 16) if digits else ord(_ESCAPES[match[4]] if match[4] else match[5])
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _wrong(f"{shorten(match[0])} is no character", token.line)
        found.append((chr(code), not match[5]))
        at = match.end()
    return found


def _literal(token: _Token) -> str:
    return json.dumps("".join(char for char, _ in _characters(token)), ensure_ascii=False)


def _set(token: _Token) -> str:
    """A regular expression in which all characters but letters and digits are escaped."""
    chars = _characters(token)
    negated = bool(chars) and chars[0] == ("^", False)
    chars = chars[negated:]
    if not chars:
        if negated:
            return _ANY
        raise _wrong("[] matches no character", token.line)
    ranges, at = [], 0
    while at < len(chars):
        is_range = at + 2 < len(chars) and chars[at + 1] == ("-", False)
        low, high = chars[at][0], chars[at + 2 * is_range][0]
        if low > high:
            raise _wrong(f"{shorten(low + '-' + high)} ends before it begins", token.line)
        ranges.append(_escaped(low) + (f"-{_escaped(high)}" if is_range else ""))
        at += 3 if is_range else 1
    return f"/[{'^' * negated}{''.join(ranges)}]/"


def _escaped(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


_WRITERS = {
    "literal": _literal,
    "set": _set,
    "token": lambda token: token.text,
    "name": lambda token: token.text,
    "mark": lambda token: _ANY,  # "."
}
