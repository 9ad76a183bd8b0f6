"""Values of any type in any field: a request gets an answer or a refusal, never a failure of the server."""

import ast
import asyncio
import json
import random
from collections.abc import Container, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from samples import sample

pytest.importorskip("starlette")
from mlc_amd.runtime.engine.engine import Engine
from mlc_amd.runtime.options import RunOptions
from mlc_amd.tools.server import app as application
from mlc_amd.tools.server.fields import Fields
from mlc_amd.tools.server.library import Library
from mlc_amd.tools.server.options import ServeOptions
from mlc_amd.tools.server.service import Service
from tests.dev.fuzz.request_fields import EXAMPLES, HOSTILE, METHODS, SEES, TYPES, ask, fields
from tests.dev.fuzz.server_fuzz import fuzz
from tests.dev.fuzz.server_replies import wrong

SECONDS = 60  # of a reply, on a slow machine
KINDS = (("null",), ("true", "false"), ("0", "1", "-1"), ("1.5",), ('""', '"x"'), ("[",), ("{",))
SAMPLE = 150  # of the other values
GOOD = "/v1/completions", b'{"prompt": "def f(", "max_tokens": 4, "temperature": 0}'

Request = tuple[str, str, bytes]  # method, path, body


@pytest.fixture(scope="module")
def replies(demo_artifact, seeing, embedding_models):
    """replies(requests, right) -> a line for each whose reply is wrong, or of another status."""

    async def run(requests: Iterable[Request], right: Container[int]) -> str:
        options = RunOptions(threads=1, kv_tokens=8192)
        loaders = {"demo": partial(Engine.load, demo_artifact, options), SEES: partial(Engine.load, seeing, options)}
        library = Library(loaders | embedding_models, most=4)
        app = application.make_app(Service(library, ServeOptions(quiet=True)))
        left, found = iter(requests), list[str]()

        async def work() -> None:
            for method, path, body in left:
                status, problem = 0, "no reply"
                with suppress(TimeoutError):
                    async with asyncio.timeout(SECONDS):
                        status, kind, text = await ask(app, method, path, body)
                        problem = wrong(path, status, kind, text)
                if problem or status not in right:
                    found.append(f"{path} {body[:1000]!r} got {status}: {problem or text[:300]!r}")

        before = await ask(app, "POST", *GOOD)
        await asyncio.gather(*(work() for _ in range(8)))
        after = await ask(app, "POST", *GOOD)
        assert before[0] == 200 and _text(after) == _text(before), after
        await library.close()
        return "\n".join(found)

    return lambda requests, right: asyncio.run(run(requests, right))


def _text(reply: tuple[int, str, bytes]) -> str:
    return json.loads(reply[2])["choices"][0]["text"]


def test_every_field_is_known():
    """What the server reads by name is among the fields that the other test fills."""
    known = {step for field in fields() for step in field.place}
    accessors = {name for name in vars(Fields) if not name.startswith("_")} - {"path", "wrong"}
    folder = Path(application.__file__).parent
    read = {
        (path.name, node.args[0].value)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in accessors
        and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    }  # fmt: skip
    assert len(read) > 100 and {(name, field) for name, field in read if field not in known} == set()
    assert {path for path, method, handler in application.ROUTES if method == "POST"} - EXAMPLES.keys() == {
        # other addresses of some of them, and one with a single field (test_serve_slots.py)
        "/slots/{number:int}", "/chat/completions", "/completions", "/responses", "/embeddings", "/rerank",
        "/v2/rerank", "/reranking", "/v1/reranking",
    }  # fmt: skip


def test_examples_are_answered(replies):
    """Whole and in a stream; of a path's many formats of answers every other one is streamed."""

    def requests() -> Iterable[Request]:
        for path, examples in EXAMPLES.items():
            for i, example in enumerate(examples if path != "/infill" else ()):  # no model here has tokens for a gap
                streams = (False, True) if i < 4 or SEES in example.values() else (i % 2 == 0,)
                for stream in (False,) if "prompt_logprobs" in example else streams:  # refused in streams
                    yield METHODS[path], path, json.dumps(example | {"stream": stream}).encode()

    assert not replies(requests(), {200, 403, 404})


@pytest.mark.parametrize("kinds", sample((2, len(KINDS)), (2,)))  # of them in each field
def test_a_value_of_any_type_in_any_field(replies, kinds):
    draw, known = random.Random(0), fields()

    def requests() -> Iterable[Request]:
        for field in known:
            for kind in draw.sample(KINDS, kinds):
                values = [one for one in TYPES if one in kind or (one[0] == kind[0] and kind[0] in "[{")]
                yield METHODS[field.path], field.path, field.body(draw.choice(values))
        for field in draw.choices(known, k=SAMPLE):
            yield METHODS[field.path], field.path, field.body(draw.choice(HOSTILE))

    assert not replies(requests(), range(200, 500))


def test_random_requests(served):
    """A short run of `python -m tests.dev.fuzz.server_abuse URL --requests`."""
    counts, found = fuzz(served.url, 300, seed=1)
    assert not found and counts.total() == 300
