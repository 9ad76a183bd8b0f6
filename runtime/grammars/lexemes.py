"""Determines which rules of a context-free grammar can be terminals.

In: rules, as trees of nodes. Out: `divided(rules)`. llguidance reads an answer as lexemes (terminals, and texts in
rules), each as long as possible. This is fast, but it changes the language where a lexeme should end earlier: `w ::=
[a-z]+` takes the "s" of `w "s"`. So rules without recursion become terminals unless this can happen: one lexeme may end
at a place where the same or another lexeme may continue with a character that can also begin what follows. Then the
longer lexeme becomes a rule (a text becomes single characters), and llguidance follows all its readings. A grammar
without any recursion becomes one terminal.

Automata of the lexemes (Glushkov's, in which a repetition may have any length) show where lexemes may continue. If this
analysis takes too long, the grammar has no terminals: its masks take longer (about 20 ms with 152,000 tokens), but its
language is the same.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from json import dumps
from typing import Any

Ranges = tuple[tuple[int, int], ...]  # ranges of characters, both ends included

_MOST_STEPS = 2_000_000  # limit; a step takes some microseconds. Enough for 70,000 characters of rules for JSON objects
_READ = 10  # steps that a character of the automaton counts


@dataclass(frozen=True)
class Chars:
    """A sequence of characters of these classes. text: in Lark."""

    classes: tuple[Ranges, ...]
    text: str

    @classmethod
    def literal(cls, text: str) -> "Chars":
        return cls(tuple(((ord(char), ord(char)),) for char in text), dumps(text, ensure_ascii=False))


@dataclass(frozen=True)
class Special:
    """A control token. text: in Lark."""

    text: str


@dataclass(frozen=True)
class Name:
    """A reference to a rule."""

    text: str


@dataclass(frozen=True)
class Series:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """A repetition. high: None: no limit. text: what follows the body in Lark."""

    body: "Node"
    low: int
    high: int | None
    text: str


Node = Chars | Special | Name | Series | Choice | Repeat
Leaf = Chars | Special | Name


@dataclass(frozen=True)
class Divided:
    """The result. rules: bodies by name. named: the names in them that are terminals. terminals: the bodies of these,
    and of the terminals to which they refer."""

    rules: dict[str, Node]
    named: frozenset[str]
    terminals: dict[str, Node]


class _TooLarge(Exception):
    """The analysis of a grammar takes too many steps."""


class _Steps:
    """Counts steps. Raises _TooLarge after _MOST_STEPS."""

    def __init__(self) -> None:
        self._left = _MOST_STEPS

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _TooLarge


def divided(rules: Mapping[str, Node]) -> Divided:
    """Divides a grammar, which begins with the rule `root`; see the module's docstring. Leaves out unused rules."""
    made = {name: rules[name] for name in _used(["root"], rules)}
    regular, steps = _regular(made), _Steps()
    named = regular - {"root"}
    try:
        while True:
            others = {name: body for name, body in made.items() if name not in named}
            longer = _Lexemes(others, rules, named, steps).longer()
            if longer and "root" in regular:
                named = regular
            if not longer or "root" in regular:
                break
            named = named - {leaf.text for leaf in longer}
            made = {name: _split(body, longer) for name, body in made.items()}
    except (_TooLarge, RecursionError):
        texts = {leaf for body in made.values() for leaf in _leaves(body)}
        made, named = {name: _split(body, texts) for name, body in made.items()}, set[str]()
    left = {name: body for name, body in made.items() if name not in named}
    seeds = [leaf.text for body in left.values() for leaf in _leaves(body) if isinstance(leaf, Name)]
    found = _used([name for name in ("root", *seeds) if name in named], rules)
    return Divided(left, frozenset(named), {name: rules[name] for name in found})


def _leaves(node: Node) -> Iterator[Leaf]:
    left = [node]
    while left:
        node = left.pop()
        if isinstance(node, Series | Choice):
            left += reversed(node.parts if isinstance(node, Series) else node.options)
        elif isinstance(node, Repeat):
            left.append(node.body)
        else:
            yield node


def _used(names: list[str], rules: Mapping[str, Node]) -> list[str]:
    """These names, and all names to which they refer."""
    found, left = dict.fromkeys(names), list(names)
    while left:
        for leaf in _leaves(rules[left.pop()]):
            if isinstance(leaf, Name) and leaf.text not in found:
                found[leaf.text] = None
                left.append(leaf.text)
    return list(found)


def _regular(rules: Mapping[str, Node]) -> set[str]:
    """The names of the rules without recursion and without control tokens."""
    refers = {name: [leaf for leaf in _leaves(body) if not isinstance(leaf, Chars)] for name, body in rules.items()}
    users = defaultdict[str, list[str]](list)
    waits = {name: len(leaves) for name, leaves in refers.items()}
    for name, leaves in refers.items():
        for leaf in leaves:
            users[leaf.text].append(name)
    ready, found = [name for name, count in waits.items() if not count], set[str]()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            waits[user] -= 1
            ready += [] if waits[user] else [user]
    return found


def _split(node: Node, texts: Collection[Leaf]) -> Node:
    """The node, in which each of these texts is replaced by a sequence of single characters."""
    if isinstance(node, Series):
        return Series(tuple(_split(part, texts) for part in node.parts))
    if isinstance(node, Choice):
        return Choice(tuple(_split(option, texts) for option in node.options))
    if isinstance(node, Repeat):
        return replace(node, body=_split(node.body, texts))
    if isinstance(node, Chars) and len(node.classes) > 1 and node in texts:
        return Series(tuple(Chars.literal(chr(ranges[0][0])) for ranges in node.classes))
    return node


# ---- where lexemes overlap

Edges = tuple[
    bool, frozenset, frozenset
]  # of a node: whether it may be empty, the leaves that it may begin and end with
_EMPTY: Edges = (True, frozenset(), frozenset())


def _edges(node: Node, leaf: Callable[[Leaf], Edges], after: dict[Any, set], steps: _Steps) -> Edges:
    """The edges of a node. leaf: returns those of a leaf. after: what may follow each leaf; this adds to it."""
    if isinstance(node, Repeat):
        empty, first, last = _edges(node.body, leaf, after, steps)
        steps.take(len(first) * len(last))
        for one in last if node.high != 1 else ():
            after[one] |= first
        return empty or node.low == 0, first, last
    if isinstance(node, Choice):
        options = [_edges(option, leaf, after, steps) for option in node.options]
        first, last = (frozenset[Any]().union(*sets) for sets in list(zip(*options, strict=True))[1:])
        steps.take(len(first) + len(last))
        return any(empty for empty, _, _ in options), first, last
    if isinstance(node, Series):
        empty, first, last = _EMPTY
        for part in node.parts:
            skips, begins, ends = _edges(part, leaf, after, steps)
            steps.take(len(first) + len(last) * len(begins) + len(ends))
            for one in last:
                after[one] |= begins
            first, last = first | begins if empty else first, last | ends if skips else ends
            empty = empty and skips
        return empty, first, last
    return leaf(node)


class _Lexemes:
    """rules: of the grammar, without terminals. bodies: of all rules. named: the rules that are terminals. All methods
    raise _TooLarge if they take too many `steps`."""

    def __init__(
        self, rules: dict[str, Node], bodies: Mapping[str, Node], named: Collection[str], steps: _Steps
    ) -> None:
        self._steps = steps
        self._bodies, self._classes, self._owners = bodies, list[Ranges](), list[Leaf]()
        self._after = defaultdict[int, set[int]](set)  # which characters follow a character in a lexeme, by number
        leaves = {leaf for body in rules.values() for leaf in _leaves(body)}
        self._lexemes = {leaf: self._edges(leaf) for leaf in leaves if isinstance(leaf, Chars) or leaf.text in named}
        self._follow = self._follows(rules)

    def _edges(self, lexeme: Leaf) -> Edges:
        """The edges of a lexeme, as numbers of characters."""

        def leaf(node: Leaf) -> Edges:
            self._steps.take(_READ)
            if isinstance(node, Name):
                return _edges(self._bodies[node.text], leaf, self._after, self._steps)
            if not isinstance(node, Chars) or not node.classes:
                return _EMPTY
            first, count = len(self._classes), len(node.classes)
            self._steps.take(count)
            self._classes += node.classes
            self._owners += [lexeme] * count
            for number in range(first, first + count - 1):
                self._after[number].add(number + 1)
            return False, frozenset((first,)), frozenset((first + count - 1,))

        return leaf(lexeme)

    def _follows(self, rules: dict[str, Node]) -> dict[Leaf, Ranges]:
        """The characters that may come after each lexeme."""
        after = defaultdict[Leaf, set[Leaf]](set)
        known: dict[str, Edges] = dict.fromkeys(rules, (False, frozenset(), frozenset()))

        def leaf(node: Leaf) -> Edges:
            self._steps.take(_READ)
            if isinstance(node, Name) and node.text in rules:
                return known[node.text]
            own = frozenset((node,))
            return self._lexemes[node][0] if node in self._lexemes else False, own, own

        before = None
        while before != (before := (dict(known), sum(map(len, after.values())))):
            for name, body in reversed(rules.items()):  # used rules mostly come before the rules that use them
                known[name] = _edges(body, leaf, after, self._steps)
        firsts = {one: [self._classes[i] for i in edges[1]] for one, edges in self._lexemes.items()}
        return {
            one: merged(pair for other in after[one] for ranges in firsts.get(other, ()) for pair in ranges)
            for one in self._lexemes
        }

    def longer(self) -> set[Leaf]:
        """The lexemes that may be read too far."""
        lasts = {i for _, _, last in self._lexemes.values() for i in last}
        found, known = set[Leaf](), set[frozenset[int]]()
        left = [frozenset(i for _, first, _ in self._lexemes.values() for i in first)]
        while left:
            for read in self._read(left.pop()):
                self._steps.take(_READ * len(read))
                if read in known:
                    continue
                known.add(read)
                more = frozenset(after for i in read for after in self._after[i])
                left.append(more)
                for owner in {self._owners[i] for i in read & lasts}:
                    follow = self._follow[owner]
                    found |= {self._owners[i] for i in more if _overlap(self._classes[i], follow)}
        return found

    def _read(self, numbers: frozenset[int]) -> Iterator[frozenset[int]]:
        """The sets of these characters that the same input character can match."""
        begins, ends = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        for number in numbers:
            for low, high in self._classes[number]:
                begins[low].add(number)
                ends[high + 1].add(number)
        active = set[int]()
        for place in sorted(begins.keys() | ends.keys()):
            active = (active - ends[place]) | begins[place]
            if active:
                yield frozenset(active)


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges, sorted; overlapping and adjacent ranges are joined."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def _overlap(one: Ranges, other: Ranges) -> bool:
    return any(low <= last and first <= high for low, high in one for first, last in other)
