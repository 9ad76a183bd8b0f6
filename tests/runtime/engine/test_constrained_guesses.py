"""Guesses under schemas and calls of tools: answers are those without guesses, and take fewer steps."""

from collections.abc import Iterator

import numpy as np
import pytest
from known_schemas import SCHEMAS
from samples import sample
from schemas import schemas

from mlc_amd.runtime.cache.kv_pool import KvSize
from mlc_amd.runtime.calls.tool_calls import HERMES
from mlc_amd.runtime.calls.tools import read_tools
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.engine.requests import Request
from mlc_amd.runtime.engine.sampled_rows import GREEDY
from mlc_amd.runtime.errors import UserError
from mlc_amd.runtime.grammars.grammars import Grammars
from mlc_amd.runtime.options import RunOptions
from mlc_amd.runtime.speculation.draft_model import LOOKUP, open_drafter
from mlc_amd.runtime.speculation.prompt_lookup import PromptLookup
from mlc_amd.runtime.speculation.speculation import NoDrafts, Speculation, Wanted
from tests.runtime.engine.test_speculation import Eager

pytest.importorskip("llguidance")

PROMPT = "<|im_start|>user\nWrite JSON.<|im_end|>\n<|im_start|>assistant\n"
GREEDILY, HOT = {"temperature": 0.0}, {"temperature": 1.2, "seed": 11, "top_k": 50, "n": 2, "repetition_penalty": 1.1}
RECORDS = {
    "type": "array",
    "minItems": 5,
    "items": {
        "type": "object",
        "properties": {"kind": {"enum": ["measurement", "observation"]}, "temperature": {"type": "integer"}},
        "required": ["kind", "temperature"],
        "additionalProperties": False,
    },
}
TOOLS = read_tools(
    [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": {"type": "object", **schema}}}
        for i, schema in enumerate(
            [
                {"properties": {"path": {"type": "string"}}, "required": ["path"]},
                {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city", "days"]},
                *({"properties": {f"flag_{n}": {"type": "boolean"}}, "required": [f"flag_{n}"]} for n in range(4)),
                *({"properties": {"level": {"enum": [f"low {n}", f"high {n}"]}}} for n in range(4)),
            ]
        )
    ]
)


@pytest.fixture(scope="module")
def engine(demo_artifact):
    with Engine.load(demo_artifact, RunOptions(kv_tokens=4096)) as engine:
        yield engine


@pytest.fixture(scope="module")
def grammars(engine) -> Iterator[Grammars]:
    made = Grammars(engine.tokenizer, engine.vocab)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["none", "lookup", "model"])
def drafter(request, engine, demo_artifact):
    if request.param == "none":
        yield NoDrafts()
        return
    named = LOOKUP if request.param == "lookup" else demo_artifact
    made = open_drafter(named, engine.tokenizer, None, None, KvSize.of(None, None))
    yield made
    engine.speculate(None)
    made.close()


class Steps:
    """Answers with a drafter and without, and how many steps of the model they took."""

    def __init__(self, engine, drafter, monkeypatch):
        self.engine, self.drafter = engine, drafter
        self.with_guesses = self.without = self.tokens = self.guessed = self.accepted = 0
        sampled = engine._runner.sample

        def counted(*args):
            self.count += 1
            return sampled(*args)

        self.count = 0
        monkeypatch.setattr(engine._runner, "sample", counted)

    def compare(self, grammar, **options):
        expected, self.without = self._answers(None, grammar, options), self.without + self.count
        found, self.with_guesses = self._answers(self.drafter, grammar, options), self.with_guesses + self.count
        assert found == expected
        stats = self.engine.last
        self.tokens += stats.generated
        self.guessed, self.accepted = self.guessed + stats.guessed, self.accepted + stats.accepted

    def _answers(self, drafter, grammar, options):
        speculation = self.engine._loop.speculation
        if speculation:  # without closing its drafter
            self.engine._loop.speculation = None
        if drafter:
            self.engine._loop.speculation = Eager(drafter, self.engine._runner.functions.single_rows)
        self.engine.reset()
        self.count = 0
        pieces = self.engine.generate(PROMPT, constraint=grammar, **options)
        found = sorted(((piece.index, piece.id, piece.text, piece.logprob) for piece in pieces), key=lambda of: of[0])
        self.engine._loop.speculation = None
        return found, [stats.finish for stats in pieces.answers]


@pytest.fixture
def steps(engine, drafter, monkeypatch):
    return Steps(engine, drafter, monkeypatch)


@pytest.mark.parametrize("options", [GREEDILY, HOT, {**GREEDILY, "logprobs": 2}], ids=str)
def test_answers_to_a_schema(steps, grammars, options):
    steps.compare(grammars.json_schema(RECORDS, PROMPT), max_tokens=120, **options)
    assert steps.guessed and steps.accepted > 0.3 * steps.guessed
    assert steps.with_guesses < (0.9 if isinstance(steps.drafter, NoDrafts) else 0.8) * steps.without


def test_calls_of_ten_tools(steps, grammars):
    for choice in ("required", "auto"):
        grammar = grammars.tool_calls(HERMES, TOOLS, choice, prompt=PROMPT)
        for options in (GREEDILY, HOT):
            steps.compare(grammar, max_tokens=50, **options)
    assert steps.accepted and steps.with_guesses < steps.without


KNOWN = sample([*SCHEMAS], [*SCHEMAS][:2])


@pytest.mark.parametrize("name", KNOWN)
def test_known_schemas(steps, grammars, name):
    grammar = grammars.json_schema(SCHEMAS[name], PROMPT)
    for options in (GREEDILY, HOT):
        steps.compare(grammar, max_tokens=60, **options)
    assert steps.with_guesses <= steps.without


@pytest.mark.full
@pytest.mark.parametrize("options", [GREEDILY, HOT], ids=["greedy", "hot"])
def test_generated_schemas(steps, grammars, options):
    """Without a limit that ends them all early: some end by themselves."""
    for schema in schemas(300):
        steps.compare(grammars.json_schema(schema, PROMPT), max_tokens=60, **options)
    assert steps.with_guesses < steps.without
    print(f"{steps.tokens} tokens, {steps.without} and {steps.with_guesses} steps, {steps.accepted} of {steps.guessed}")


# ---- one constraint


def tokens_of(grammars, text):
    return grammars._tokenizer.encode_inner(text.encode())


def test_guesses_are_what_may_follow(grammars):
    schema = {"type": "object", "properties": {"temperature": {"type": "integer"}}, "required": ["temperature"]}
    one = grammars.json_schema({**schema, "additionalProperties": False})()
    right, wrong = tokens_of(grammars, '{"temperature": 12'), tokens_of(grammars, " but")
    before = one.allowed().copy()
    assert one.guesses(right, 99) == right
    assert one.guesses(right, 2) == right[:2] and one.guesses(right, 0) == []
    assert one.guesses([right[0], *wrong], 99) in ([right[0]], right[: len(one.guesses([right[0]], 99))])
    ended = [*right, *tokens_of(grammars, "}")]
    assert one.guesses([*ended, *ended], 99) == right  # what ends the answer needs no row
    assert np.array_equal(one.allowed(), before)
    for token in right:
        assert one.guesses(wrong, 7) == one.guesses((), 7)
        one.accept(token)
    one.rewind(len(right))
    assert np.array_equal(one.allowed(), before)


def test_what_a_grammar_forces_is_guessed(grammars):
    one = grammars.regex("a measurement of [0-9]+ degrees")()
    forced = one.guesses((), 99)
    text = grammars._tokenizer.decode(forced, continues=True)
    assert text and "a measurement of ".startswith(text)
    assert one.guesses((), 1) == forced[:1]
    for token in tokens_of(grammars, "a measurement of 3"):
        one.accept(token)
    assert one.guesses((), 99) == []  # a digit, or a space


def test_an_error_at_a_guess_counts_only_if_the_answer_gets_there(grammars):
    """A matcher that failed at a guess begins again."""
    one = grammars.regex("[a-z]{2}[0-9]{2}")()
    one.accept(tokens_of(grammars, "a")[0])
    before = one.allowed().copy()
    with pytest.raises(UserError, match="the answer cannot follow its grammar"):
        one.accept(tokens_of(grammars, "9")[0])
    one.rewind(0)
    assert np.array_equal(one.allowed(), before)


class Never:
    """A drafter whose guesses are wrong."""

    expected, free, at_once, follows = 0.7, False, False, False

    def __init__(self):
        self.asked = 0

    def draft(self, wanted):
        self.asked += len(wanted)
        return {request: [0] * count for request, (_, count) in wanted.items()}

    def forget(self, request):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("make", [Never, PromptLookup])
def test_what_is_forced_needs_no_drafter(make):
    drafter = make()
    speculation, request = Speculation(drafter, 64), Request([0])
    limit = lambda drafts, most: [5, 6, 7][:most]  # noqa: E731
    for _ in range(100):
        guesses = speculation.drafts({request: Wanted(GREEDY._replace(tokens=[1, 2, 3]), 7, limit)}).get(request, [])
        speculation.completed({request: guesses} if guesses else {}, {request: 1 + len(guesses)}, 0.0, 1.0)
    assert speculation.counts.drafted > 150 and not getattr(drafter, "asked", 0)


def test_forced_text_ends_a_rest():
    """Steps start ahead but where there is some."""
    speculation, request = Speculation(NoDrafts(), 64), Request([0])
    forced: list[int] = []
    wanted = {request: Wanted(GREEDY, 7, lambda _, most: forced[:most])}
    for _ in range(20):
        assert speculation.resting
        speculation.rested(1, 1.0)
        speculation.watched({request: 1}, wanted)
    forced = [5, 6, 7]
    speculation.watched({request: 1}, wanted)
    assert not speculation.resting
    assert speculation.drafts(wanted) == {request: [5]}  # how long steps with more rows take is not known yet
    speculation.completed({request: [5]}, {request: 2}, 0.0, 1.2)
    speculation.completed({}, {request: 1}, 0.0, 1.0)
    assert speculation.drafts(wanted) == {request: forced}
    forced = []
    assert not speculation.drafts(wanted) and speculation.resting


def test_without_a_draft_what_is_forced_is_guessed(engine, grammars, monkeypatch):
    engine.speculate(None)
    monkeypatch.setattr(Speculation, "_counts", Eager._counts)
    for constraint in (grammars.json_schema(RECORDS, PROMPT), None):
        for _ in engine.generate(PROMPT, constraint=constraint, max_tokens=60, temperature=0.0):
            pass
        assert (engine.last.guessed > 10) == bool(constraint)
