"""Random requests to a running server, each determined by a seed and its number: valid and hostile values in any fields
(tests/dev/fuzz/request_fields.py), any method and path, damaged bodies, clients that go away.

In: the address of a server with the bundled model and without API keys. Out: `fuzz(..)`: counts of statuses by kind of
request, and every reply that was wrong (tests/dev/fuzz/server_replies.py) with its request. `python -m
tests.dev.fuzz.server_abuse URL --requests 20000 --seed 1` runs it.
"""

import gzip
import http.client
import itertools
import json
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.dev.fuzz.request_fields import EXAMPLES, HOSTILE, METHODS, Field, Place, changed, fields
from tests.dev.fuzz.server_replies import wrong

SECONDS = 60  # without a byte of the reply: a hang
SLOW = 20  # seconds of a whole reply
THREADS = 8
GOOD = "/v1/completions", b'{"prompt": "def f(", "max_tokens": 8, "temperature": 0}'
_EVERY = 250  # requests after which a good one is sent
_NO_HTTP = b"Invalid HTTP request received."  # of uvicorn, for which there is no API yet
_PARTS = ("..", "%2e%2e", "%00", "%ff", "%ed%a0%80", "a" * 5000, "demo", "resp_1", "%f0%9f%98%80", "v1", "{id}", " ")
_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "\xff", "x" * 4000)
_HEADERS = ("x-request-id", "authorization", "accept", "content-encoding", "accept-encoding", "origin", "user-agent")


@dataclass(frozen=True)
class Sent:
    """A request. cut: bytes of the body that are sent before the client goes away; read: chunks of the reply after
    which it does; None: never."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    read: int | None = None

    def __str__(self) -> str:
        more = f" {dict(self.headers)}" if self.headers else ""
        return f"{self.kind}: {self.method} {self.path[:100]}{more} {self.body[:2000]!r}"


# ---- requests

_FIELDS: dict[str, list[Field]] = {}
for _field in fields():
    _FIELDS.setdefault(_field.path, []).append(_field)
_VALID = [json.dumps(one) for examples in EXAMPLES.values() for body in examples for one in body.values()]


def _body(draw: random.Random, path: str) -> bytes:
    """An example with up to four other values, some of which belong to other fields."""
    example = draw.choice(EXAMPLES[path])
    values: dict[Place, str] = {("stream",): draw.choice(("true", "false"))} if draw.random() < 0.7 else {}
    if draw.random() < 0.1:
        values[("n",)] = draw.choice(("2", "3", "5"))
    for chosen in draw.choices(_FIELDS[path], k=draw.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        values[chosen.place] = draw.choice(_VALID if draw.random() < 0.3 else HOSTILE)
    if draw.random() < 0.3:
        example = {**draw.choice(EXAMPLES[path]), **example}
    return changed(example, values)


def _hostile(draw: random.Random) -> Sent:
    path = draw.choice(list(EXAMPLES))
    return Sent("values", METHODS[path], path, _body(draw, path))


def _streamed(draw: random.Random) -> Sent:
    """A stream that is left early."""
    path = draw.choice([path for path in EXAMPLES if "stream" in EXAMPLES[path][0]])
    body = {**draw.choice(EXAMPLES[path]), "stream": True, "n": draw.choice((1, 2, 3))}
    limit = {"max_tokens": 200, "max_output_tokens": 200, "options": {"num_predict": 200}}
    return Sent("cancelled", "POST", path, json.dumps(body | limit).encode(), read=draw.choice((0, 1, 2, 5)))


def _truncated(draw: random.Random) -> Sent:
    """The client goes away, or sends a body that ends early."""
    path = draw.choice(list(EXAMPLES))
    body = _body(draw, path)
    at = draw.randrange(len(body))
    if draw.random() < 0.5:
        return Sent("truncated", METHODS[path], path, body[:at])
    return Sent("gone", METHODS[path], path, body, cut=at)


def _encoded(draw: random.Random) -> Sent:
    path = draw.choice(list(EXAMPLES))
    body, kind = _body(draw, path), draw.choice(("gzip", "gzip", "deflate", "br", "x-gzip", "identity", "gzip, gzip"))
    made = gzip.compress(body, 1) if "gzip" in kind else zlib.compress(body, 1) if kind == "deflate" else body
    damage = draw.randrange(4)
    made = (made, made, made[: draw.randrange(len(made))], made + draw.randbytes(9))[damage]
    return Sent("encoded", METHODS[path], path, made, {"content-encoding": kind})


def _typed(draw: random.Random) -> Sent:
    path = draw.choice(list(EXAMPLES))
    headers = {"content-type": draw.choice(_TYPES)}
    for name in draw.sample(_HEADERS, 2):
        headers[name] = draw.choice(("", "\xff\xfe", "x" * 3000, "gzip", "Bearer", "null", "http://[", "0"))
    return Sent("headers", METHODS[path], path, _body(draw, path), headers)


def _routed(draw: random.Random) -> Sent:
    """Another method, another path."""
    path = draw.choice(list(METHODS))
    for name in ("{id}", "{name:path}"):
        path = path.replace(name, draw.choice(_PARTS))
    if draw.random() < 0.5:
        path += draw.choice(("/", "//", "?", "?model=", "?a=b&", "/../", "%2f")) + draw.choice(_PARTS)
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "X"))
    body = draw.choice((b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, draw.randbytes(50)))
    return Sent("routes", method, path.replace(" ", "%20"), body)


_KINDS: tuple[tuple[Callable[[random.Random], Sent], int], ...] = (
    (_hostile, 70), (_streamed, 5), (_truncated, 7), (_encoded, 5), (_typed, 5), (_routed, 8),
)  # fmt: skip


def drawn(seed: int, number: int) -> Sent:
    """The request of this number."""
    draw = random.Random(f"{seed}/{number}")
    kinds, weights = zip(*_KINDS, strict=True)
    return draw.choices(kinds, weights)[0](draw)


# ---- replies


def send(netloc: str, sent: Sent) -> tuple[int | str, str]:
    """(status, what is wrong). Status "closed": the server closed the connection without a reply, "left": the client
    did."""
    connection = http.client.HTTPConnection(netloc, timeout=SECONDS)
    begun = time.monotonic()
    try:
        connection.putrequest(sent.method, sent.path, skip_accept_encoding=True)
        for name, text in {"content-type": "application/json", **sent.headers}.items():
            connection.putheader(name, text.encode("latin-1"))
        connection.putheader("content-length", str(len(sent.body)))
        connection.endheaders(sent.body if sent.cut is None else sent.body[: sent.cut])
        if sent.cut is not None:
            return "left", ""
        reply = connection.getresponse()
        if sent.read is not None and reply.status == 200:
            for _ in range(sent.read):
                reply.readline()
            return "left", ""
        text = reply.read()
        kind = (reply.headers["content-type"] or "").partition(";")[0]
    except TimeoutError:
        return "hang", f"no byte for {SECONDS} s"
    except http.client.IncompleteRead:
        return "cut", "the reply is cut off"
    except (ConnectionError, http.client.HTTPException):
        return "closed", "" if sent.kind in ("headers", "routes") else "the connection was closed without a reply"
    finally:
        connection.close()
    if (seconds := time.monotonic() - begun) > SLOW:
        return reply.status, f"the reply took {seconds:.0f} s"
    if sent.kind in ("headers", "routes") and text == _NO_HTTP:
        return reply.status, ""
    path = sent.path.partition("?")[0]
    return reply.status, "" if sent.method == "HEAD" else wrong(path, reply.status, kind, text)


def fuzz(url: str, requests: int, seed: int, first: int = 0) -> tuple[Counter[tuple[str, int | str]], list[str]]:
    """(requests by kind and status, what was wrong)."""
    netloc, counts, found = urlsplit(url).netloc, Counter[tuple[str, int | str]](), list[str]()
    numbers, lock = itertools.count(first), threading.Lock()
    good = Sent("good", "POST", *GOOD)
    expected = _answer(netloc, good)

    def work() -> None:
        while (number := next(numbers)) < first + requests:
            sent = drawn(seed, number)
            status, problem = send(netloc, sent)
            if number % _EVERY == 0 and (answer := _answer(netloc, good)) != expected:
                problem = f"{problem} the good client then got {answer!r}"
            with lock:
                counts[sent.kind, status] += 1
                if problem:
                    found.append(f"number {number}: {problem}: {sent}")

    threads = [threading.Thread(target=work, daemon=True) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, found


def _answer(netloc: str, good: Sent) -> str:
    """The text of an answer, or why there is none."""
    connection = http.client.HTTPConnection(netloc, timeout=SECONDS)
    try:
        connection.request("POST", good.path, good.body)
        reply = connection.getresponse()
        text = reply.read().decode()
        return json.loads(text)["choices"][0]["text"] if reply.status == 200 else f"{reply.status} {text}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def table(counts: Counter[tuple[str, int | str]]) -> str:
    """Kinds as rows, statuses as columns."""
    kinds, statuses = sorted({kind for kind, _ in counts}), sorted({status for _, status in counts}, key=str)
    rows = [["", "requests", *map(str, statuses)]]
    rows += [[kind, *(str(sum(n for (k, _), n in counts.items() if k == kind)) for _ in "x"),
              *(str(counts[kind, status]) for status in statuses)] for kind in kinds]  # fmt: skip
    rows.append(["total", str(counts.total()), *(str(sum(counts[k, s] for k in kinds)) for s in statuses)])
    return "\n".join("".join(f"{cell:>10}" for cell in row) for row in rows)
