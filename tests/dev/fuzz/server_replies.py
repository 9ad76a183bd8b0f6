"""What a server may reply to any request: success, or a refusal, in the form of the API that was called.

In: the path, the status and the body of a reply. Out: `wrong`: what is wrong with it, "" if nothing is.
"""

import json
from typing import Any

# A server that is busy says so, one whose time for an answer is over, too.
_BUSY = (503, 504)
_FAULTS = ("server_error", "api_error")


def wrong(path: str, status: int, kind: str, body: bytes) -> str:
    """kind: the media type."""
    if status >= 500 and status not in _BUSY:
        return f"status {status}"
    if not (200 <= status < 300 or status >= 400):
        return f"status {status} is neither success nor refusal"
    try:
        if status >= 400:
            return _refusal(path, _parsed(body))
        if kind == "application/json":
            _parsed(body)
            return ""
        if kind == "application/x-ndjson":
            return _lines(path, [_parsed(line) for line in body.splitlines()])
        if kind == "text/event-stream":
            return _events(path, body)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return f"a malformed body ({type(error).__name__}: {error})"
    return "" if body else "an empty body"


def _parsed(text: bytes) -> Any:
    def refused(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text.decode(), parse_constant=refused)


def _refusal(path: str, body: Any) -> str:
    if path.startswith("/api/"):
        return "" if body.keys() == {"error"} and _is_message(body["error"]) else "not ollama's form of errors"
    if path.startswith("/v1/messages"):
        right = body.keys() == {"type", "error"} and body["type"] == "error"
        right = right and body["error"].keys() == {"type", "message"} and _is_message(body["error"]["message"])
        return "" if right else "not Anthropic's form of errors"
    right = body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    return "" if right and _is_message(body["error"]["message"]) else "not OpenAI's form of errors"


def _is_message(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip()) and len(text) < 2000 and "Traceback" not in text


def _fault(value: Any) -> str:
    """Of an event or a line that reports an error: whether it is the server's."""
    error = value.get("error") if isinstance(value, dict) else None
    if value.get("type") == "error" and "message" in value:  # of the Responses API
        error = value
    text = json.dumps(error)
    return text if "internal error" in text or any(f'"{kind}"' in text for kind in _FAULTS) else ""


def _lines(path: str, values: list[Any]) -> str:
    for value in values:
        if fault := _fault(value):
            return f"in its stream: {fault}"
    last = values[-1]
    return "" if last.get("done") is True or "error" in last or "status" in last else "a stream without an end"


def _events(path: str, body: bytes) -> str:
    data: list[Any] = []
    done = False
    if not body.endswith(b"\n\n"):
        return "a stream whose last event is cut off"
    for event in body.decode().split("\n\n")[:-1]:
        lines = [line for line in event.split("\n") if not line.startswith((":", "event: "))]
        if not lines:
            continue
        if done or len(lines) != 1 or not lines[0].startswith("data: "):
            return f"a malformed event {event[:80]!r}"
        if lines[0] == "data: [DONE]":
            done = True
        else:
            data.append(_parsed(lines[0].removeprefix("data: ").encode()))
    for value in data:
        if fault := _fault(value):
            return f"in its stream: {fault}"
    kind = data[-1].get("type", "")
    ended = {
        "/v1/messages": kind in ("message_stop", "error"),
        "/v1/responses": kind in ("response.completed", "response.incomplete", "response.failed"),
        "/responses": kind in ("response.completed", "response.incomplete", "response.failed"),
        **dict.fromkeys(("/completion", "/infill"), "error" in data[-1] or data[-1].get("stop", True) is True),
    }.get(path, done)
    return "" if ended else "a stream without an end"
