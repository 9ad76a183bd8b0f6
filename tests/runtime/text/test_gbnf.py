"""Grammars in GBNF: the language is the grammar's, wherever its parts end."""

import itertools
import random
import time
from contextlib import suppress

import pytest
from vocabularies import build_tokenizer, byte_level_metadata

pytest.importorskip("llguidance")
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars import lexemes
from mlc_amd.runtime.grammars.gbnf import to_lark
from mlc_amd.runtime.grammars.grammars import Grammar, Grammars
from tests.runtime.text.test_grammars import accepts

LONGEST = 5  # characters of the answers that are compared
ANSWERS = ["".join(answer) for count in range(LONGEST + 1) for answer in itertools.product("ab", repeat=count)]


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """Grammars of a vocabulary of bytes, and their tokenizer."""
    tokenizer = build_tokenizer(byte_level_metadata(), tmp_path_factory.mktemp("vocabulary"))
    made = Grammars(tokenizer, tokenizer.vocab_size)
    yield made, tokenizer
    made.close()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= w "s"\nw ::= [a-z]+', ("abs", "ss"), ("s", "ab", "ab1s")),
        ('root ::= w "s" ("," root)?\nw ::= [a-z]+', ("abs,ss", "as"), ("abs,s", "a")),
        ('root ::= ("a" | "ab") "bc"', ("abc", "abbc"), ("ac", "abb")),
        ('root ::= x "bc" ("," root)?\nx ::= "a" | "ab"', ("abc", "abbc,abc"), ("abb", "abc,")),
        ('root ::= "(" root ")" | w "if"\nw ::= [a-z]*', ("(xxif)", "if"), ("((if)", "xi")),
        ('root ::= "/*" c "*/" root?\nc ::= [^/]*', ("/* a * b */", "/***//**/"), ("/*/", "/**")),
        ('root ::= n n ("," root)?\nn ::= [0-9]{2}', ("1234", "1234,5678"), ("12,34", "123")),
        ('root ::= (("a"*)? [b]{0} | "")+ "c"', ("c", "aac"), ("bc", "a")),
    ],
)
def test_an_answer_may_end_where_the_grammar_does(bytewise, grammar, right, wrong):
    found = bytewise[0].grammar(grammar)
    assert [accepts(found, bytewise[1], text) for text in (*right, *wrong)] == [True] * len(right) + [False] * len(
        wrong
    )


def test_json_keeps_its_lexemes():
    grammar = r"""root ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
        value ::= root | string | number | "[" ws (value ("," ws value)*)? "]" ws
        string ::= "\"" ([^"\\] | "\\" ["\\bfnrt])* "\"" ws
        number ::= "-"? [0-9]+ ("." [0-9]+)? ws
        ws ::= | " " | "\n" [ \t]{0,20}"""
    assert sum(line.startswith("R") for line in to_lark(grammar).splitlines()) == 3


def test_large_grammars_have_their_language(bytewise):
    """One whose rules are divided, and one for which finding the terminals takes too long."""
    rules = "".join(f'\no{i} ::= "<key{i:03}" number word "s" (">" o{i + 1})?' for i in range(300))
    objects = f'root ::= o0 | "(" root ")"\nnumber ::= [0-9]+ ":"\nword ::= [a-z]+{rules}\no300 ::= root'
    words = " | ".join(f'"{"".join(word)}"' for word in itertools.islice(itertools.product("abcdefgh", repeat=4), 800))
    listed = f'root ::= ("ab" | "abc" | {words})+ "cx" ("," root)?'
    assert min(len(objects), len(listed)) > 5000
    assert "\nR" in to_lark(objects) and "\nR" not in to_lark(listed)
    for text, right, wrong in (
        (objects, ("<key00012:abs", "(<key0001:ss><key0012:as)"), ("<key000:abs", "<key0001:s", "<key0001:ab")),
        (listed, ("abcx", "abccx,abcx", "aaabcx"), ("cx", "abx", "abcxx")),
    ):
        found = bytewise[0].grammar(text)
        assert [accepts(found, bytewise[1], one) for one in right] == [True] * len(right)
        assert [accepts(found, bytewise[1], one) for one in wrong] == [False] * len(wrong)


def drawn(draw: random.Random) -> tuple[str, dict]:
    """A grammar as text and as rules: ("text", ..), ("set", ..), ("name", ..), ("series" or "choice", parts),
    ("repeat", part, sign)."""
    names = ["root", "x", "y"]

    def node(depth: int) -> tuple:
        kind = draw.choice(("text", "set", "name", "series", "choice", "repeat") if depth else ("text", "set", "name"))
        if kind == "text":
            return kind, "".join(draw.choice("ab") for _ in range(draw.randrange(3)))
        if kind == "set":
            return kind, draw.choice(("a", "b", "ab"))
        if kind == "name":
            return kind, draw.choice(names[1:] if draw.random() < 0.8 else names)
        if kind == "repeat":
            return kind, node(depth - 1), draw.choice("*+?")
        return kind, [node(depth - 1) for _ in range(2)]

    def text(node: tuple) -> str:
        kind, value = node[:2]
        if kind in ("series", "choice"):
            return f"({(' ' if kind == 'series' else ' | ').join(map(text, value))})"
        if kind == "repeat":
            return f"({text(value)}){node[2]}"
        return {"text": f'"{value}"', "set": f"[{value}]"}.get(kind, value)

    rules = {name: node(3) for name in names}
    return "\n".join(f"{name} ::= {text(body)}" for name, body in rules.items()), rules


def language(rules: dict) -> set[str]:
    """Its texts of up to LONGEST characters."""
    known: dict[str, set[str]] = {name: set() for name in rules}

    def joined(one: set[str], other: set[str]) -> set[str]:
        return {a + b for a in one for b in other if len(a + b) <= LONGEST}

    def texts(node: tuple) -> set[str]:
        kind, value = node[:2]
        if kind in ("text", "set"):
            return {value} if kind == "text" else set(value)
        if kind == "name":
            return known[value]
        if kind == "choice":
            return texts(value[0]) | texts(value[1])
        if kind == "series":
            return joined(texts(value[0]), texts(value[1]))
        body = texts(value)
        found = {""} if node[2] in "*?" else set(body)
        found |= body
        while node[2] in "*+" and (more := joined(found, body)) - found:
            found |= more
        return found

    before = None
    while before != (before := sum(map(len, known.values()))):
        for name, body in rules.items():
            known[name] = known[name] | texts(body)
    return known["root"]


@pytest.mark.parametrize(("count", "steps"), [(120, lexemes._MOST_STEPS), (40, 0)])
def test_random_grammars_have_their_language(bytewise, monkeypatch, count, steps):
    """Also where none of their rules are terminals."""
    monkeypatch.setattr(lexemes, "_MOST_STEPS", steps)
    to_lark.cache_clear()
    grammars, tokenizer = bytewise
    compared = 0

    def is_answer(grammar: Grammar, text: str) -> bool:
        with suppress(UserError):  # it led into a rule that never ends
            return accepts(grammar, tokenizer, text)
        return False

    for seed in range(count):
        text, rules = drawn(random.Random(seed))
        expected = language(rules)
        if not expected:
            continue  # such a rule never ends
        found = grammars.grammar(text)
        right = {answer for answer in ANSWERS if is_answer(found, answer)}
        assert right == expected, text
        compared += 1
    assert compared > count / 2


def test_hostile_grammars_are_converted_in_time():
    begun = time.monotonic()
    for count in (3000, 20_000):
        chain = "".join(f"\na{i} ::= a{i + 1}" for i in range(count))
        assert to_lark(f'root ::= a0{chain}\na{count} ::= "x"').startswith("start: ")
    doubled = "".join(f"\na{i} ::= a{i + 1} a{i + 1}" for i in range(60))
    assert to_lark(f'root ::= a0{doubled}\na60 ::= "x" | [a-z]').startswith("start: ")
    assert to_lark("root ::= " + "(" * 100 + '"a"' + ")*" * 100 + ' "a" root?').startswith("start: ")
    alternatives = " | ".join(f'"word {i}" [a-z]' for i in range(3000))
    assert to_lark(f"root ::= ({alternatives}) root?").startswith("start: ")
    assert time.monotonic() - begun < 60
