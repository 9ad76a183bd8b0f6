"""The bundled model at a high temperature, under constraints: what it writes matches them."""

import json
import random
from collections.abc import Iterator

import pytest
from known_schemas import SCHEMAS
from schemas import schemas

from mlc_amd.runtime.calls.tool_calls import HERMES
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.grammars.grammars import Grammars
from tests.dev import mask_cost
from tests.runtime.engine.test_engine_calls import PROMPT
from tests.runtime.text.test_tool_calls import TOOLS, calls_of, read

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

ADDRESS = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture
def grammars(engine: Engine) -> Iterator[Grammars]:
    made = Grammars(engine.tokenizer, engine.vocab)
    yield made
    made.close()


def texts(engine: Engine, **options) -> list[tuple[str, str]]:
    """The answers to PROMPT, and why each ended."""
    settings = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    pieces = engine.generate(PROMPT, **(settings | options))
    made = [""] * options.get("n", 1)
    for piece in pieces:
        made[piece.index] += piece.text
    return list(zip(made, [stats.finish for stats in pieces.answers], strict=True))


def test_eight_answers_at_once_match_a_schema(engine, grammars):
    answers = texts(engine, n=8, max_tokens=250, constraint=grammars.json_schema(ADDRESS, PROMPT))
    ended = [text for text, finish in answers if finish == "stop"]
    for text in ended:
        jsonschema.validate(json.loads(text), ADDRESS)
    assert len(ended) > 4 and len(set(ended)) == len(ended)


def ended(engine: Engine, grammars: Grammars, schema: dict, **options) -> list[bool]:
    """Whether each answer ended by itself: then it matches the schema. Others were cut off."""
    found = []
    for text, finish in texts(engine, constraint=grammars.json_schema(schema, PROMPT), **options):
        found.append(finish == "stop")
        if found[-1]:
            try:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"{text!r} of {schema} with {options}") from error
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_known_schemas(engine, grammars, name):
    seed = random.randrange(1 << 30)
    hot = ended(engine, grammars, SCHEMAS[name], n=3, max_tokens=300, seed=seed)
    greedy = ended(engine, grammars, SCHEMAS[name], max_tokens=300, temperature=0.0)
    assert any(hot + greedy)


def test_generated_schemas(engine, grammars):
    assert sum(sum(ended(engine, grammars, schema, n=2, max_tokens=120)) for schema in schemas(8)) > 8


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "least"), [({"temperature": 0.0}, 0.7), ({"temperature": 1.5, "n": 4}, 0.85)], ids=["greedy", "hot"]
)
def test_all_generated_schemas(engine, grammars, options, least):
    found = []
    for schema in schemas(300):
        found += ended(engine, grammars, schema, max_tokens=700, seed=random.randrange(1 << 30), **options)
    print(f"{sum(found)} of {len(found)} answers ended")
    assert sum(found) > least * len(found)  # a small model repeats itself in strings and lists until it is cut off


def test_what_masks_cost_is_reported(loaded, capsys):
    mask_cost.report(loaded, sequences=2, tokens=6, rounds=1)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == ["none", *mask_cost.KINDS]
    assert all(float(row[1]) > 0 and float(row[3]) > 0 for row in rows[3:])


def test_calls_of_tools(engine, grammars):
    """A small model that has never seen one."""
    required = grammars.tool_calls(HERMES, TOOLS[1:], "required", parallel=False, prompt=PROMPT)
    answers = texts(engine, n=4, max_tokens=250, constraint=required)
    calls = [calls_of(read(HERMES, [text])) for text, finish in answers if finish == "stop"]
    assert calls and all(len(one) == 1 and one[0][0] == "clock" for one in calls)
    auto = grammars.tool_calls(HERMES, TOOLS, "auto", prompt=PROMPT)
    free, bound = (texts(engine, max_tokens=24, temperature=0.0, constraint=one) for one in (None, auto))
    assert free == bound  # text without calls is not changed
