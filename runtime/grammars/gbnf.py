"""Converts GBNF (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md) to llguidance's Lark.

In: the text of a grammar. Out: `to_lark(text)`, whose rule `start` is the grammar's rule `root`. Raises UserError, with
the line, for an invalid grammar. Rules get new names, because names in GBNF may be keywords in Lark, begin with a
digit, or differ in case only. lexemes.py determines which rules are terminals (names in capitals).
"""

import re
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import NamedTuple

from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.grammars.lexemes import Chars, Choice, Name, Node, Ranges, Repeat, Series, Special, divided, merged

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
_LAST = 0x10FFFF
_ANY = Chars((((0, _LAST),),), r"/(.|\n)/")
_COUNTS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_DEEPEST = 100  # limit of nested parentheses


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


@lru_cache(16)
def to_lark(text: str) -> str:
    """The grammar in Lark. See the module's docstring. May take a few seconds."""
    parser = _Parser(list(_tokens(text)))
    rules = parser.rules()
    if "root" not in rules:
        raise _wrong("there is no rule named root, which grammars begin with")
    for name, line in parser.used:
        if name not in rules:
            raise _wrong(f"there is no rule named {shorten(name)}", line)
    numbers = {name: number for number, name in enumerate(rules)}
    found = divided(rules)
    lines = [f"r{numbers[name]}: {_lark(body, numbers, found.named)}" for name, body in found.rules.items()]
    lines += [f"R{numbers[name]}: {_lark(body, numbers, found.terminals)}" for name, body in found.terminals.items()]
    return "\n".join([f"start: {'R' if 'root' in found.named else 'r'}{numbers['root']}", *lines])


def _lark(node: Node, numbers: dict[str, int], terminals: Container[str]) -> str:
    """A node in Lark. numbers: rules' numbers, for their names. terminals: the names that are written in capitals."""

    def written(node: Node) -> str:
        if isinstance(node, Name):
            return f"{'R' if node.text in terminals else 'r'}{numbers[node.text]}"
        if isinstance(node, Series):
            return " ".join(written(part) if isinstance(part, Repeat) else grouped(part) for part in node.parts) or '""'
        if isinstance(node, Choice):
            return " | ".join(map(written, node.options))
        return f"{grouped(node.body)}{node.text}" if isinstance(node, Repeat) else node.text

    def grouped(node: Node) -> str:
        text = written(node)
        return text if isinstance(node, Chars | Special | Name) else f"({text})"

    return written(node)


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
    """Line ends have no meaning here: a rule ends before a name that is followed by ::=. used: the names that rules
    refer to, with their lines."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._at = tokens, 0
        self.used: list[tuple[str, int]] = []

    def rules(self) -> dict[str, Node]:
        """The rules by name. If a name is defined twice, the last definition counts."""
        found: dict[str, Node] = {}
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

    def _alternatives(self, depth: int) -> Node:
        if depth > _DEEPEST:
            raise _wrong("its parentheses are nested too deeply", self._next.line)
        options = [self._sequence(depth)]
        while self._next.text == "|":
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        repeatable = False
        while self._next.kind != "end" and self._next.text not in ("|", ")") and not self._at_rule():
            token = self._next
            self._at += 1
            if token.kind == "repeat" and repeatable:
                parts[-1], repeatable = _repeated(parts[-1], token), False
                continue
            repeatable = True
            if token.text == "(":
                parts.append(self._alternatives(depth + 1))
                if self._next.text != ")":
                    raise _wrong("a parenthesis is not closed", token.line)
                self._at += 1
            elif token.kind == "name":
                self.used.append((token.text, token.line))
                parts.append(Name(token.text))
            elif token.kind in _READERS:
                parts.append(_READERS[token.kind](token))
            else:
                raise _wrong(f"{shorten(token.text)} has nothing before it that it applies to", token.line)
        return parts[0] if len(parts) == 1 else Series(tuple(parts))


def _repeated(item: Node, token: _Token) -> Repeat:
    text = "".join(token.text.split())
    if text in _COUNTS:
        return Repeat(item, *_COUNTS[text], text)
    first, comma, second = text[1:-1].partition(",")
    low, high = int(first), int(second or first) if second or not comma else None
    if high is not None and low > high:
        raise _wrong(f"{token.text} ends before it begins", token.line)
    return Repeat(Series(()) if high == 0 else item, low, high, text if high != 0 else "?")  # Lark has no {0}


def _characters(token: _Token) -> list[tuple[str, bool]]:
    """The characters between the first and the last character of a token; each with whether it was escaped."""
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


def _literal(token: _Token) -> Chars:
    return Chars.literal("".join(char for char, _ in _characters(token)))


def _set(token: _Token) -> Chars:
    """A class of characters as a regular expression. All characters except letters and digits are escaped."""
    chars = _characters(token)
    negated = bool(chars) and chars[0] == ("^", False)
    chars = chars[negated:]
    if not chars:
        if negated:
            return _ANY
        raise _wrong("[] matches no character", token.line)
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(chars):
        is_range = at + 2 < len(chars) and chars[at + 1] == ("-", False)
        low, high = chars[at][0], chars[at + 2 * is_range][0]
        if low > high:
            raise _wrong(f"{shorten(low + '-' + high)} ends before it begins", token.line)
        ranges.append((ord(low), ord(high)))
        at += 3 if is_range else 1
    written = "".join(_escaped(low) + (f"-{_escaped(high)}" if low < high else "") for low, high in ranges)
    plain = merged(ranges)
    return Chars((_others(plain) if negated else plain,), f"/[{'^' * negated}{written}]/")


def _others(ranges: Ranges) -> Ranges:
    """All characters outside of these ranges."""
    bounds = [-1, *(bound for pair in ranges for bound in pair), _LAST + 1]
    gaps = ((low + 1, high - 1) for low, high in zip(bounds[::2], bounds[1::2], strict=True))
    return tuple(gap for gap in gaps if gap[0] <= gap[1])


def _escaped(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


_READERS = {
    "literal": _literal,
    "set": _set,
    "token": lambda token: Special(token.text),
    "mark": lambda token: _ANY,  # "."
}
