"""Error responses: a status, and a body in the form of the API that was called.

In: exceptions of handlers and of the engine. Out: `ApiError`, and its body for each API:

    OpenAI      {"error": {"message", "type", "param", "code"}}   https://platform.openai.com/docs/guides/error-codes
    Anthropic   {"type": "error", "error": {"type", "message"}}   https://docs.anthropic.com/en/api/errors
    ollama      {"error": message}                                https://github.com/ollama/ollama/blob/main/docs/api.md
"""

import sys
import traceback
from collections.abc import Callable
from typing import Any

from mlc_amd.runtime.engine.generation import ContextFull
from mlc_amd.runtime.engine.scheduler import QueueFull
from mlc_amd.runtime.errors import MachineError, UserError

# Seconds after which a client should try again, if the queue is full or the model is being loaded.
RETRY_AFTER = 2
# status -> (OpenAI's type, Anthropic's type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    500: ("server_error", "api_error"),
    501: ("not_supported_error", "api_error"),
    503: ("overloaded_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


class ApiError(Exception):
    """A request that is answered with an error. status: of HTTP. param: the field of the body that is wrong. code:
    OpenAI's code for programs, or None. headers: of the response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param)


def overloaded(message: str) -> ApiError:
    return ApiError(503, message, code="overloaded", retry_after=str(RETRY_AFTER))


def loading() -> ApiError:
    """The error until the default model is loaded."""
    return ApiError(503, "loading model: try again later", code="loading_model", retry_after=str(RETRY_AFTER))


def reported(error: BaseException) -> ApiError:
    """The error that is reported for an exception. Prints the traceback of a bug to stderr, the server's log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return overloaded(str(error))
    if isinstance(error, ContextFull):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, MachineError):
        return ApiError(500, str(error))
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows")
    traceback.print_exception(error, file=sys.stderr)
    return ApiError(500, f"internal error ({type(error).__name__}): the server's log has the details")


# ---- bodies


def openai_body(error: ApiError) -> dict[str, Any]:
    kind = _types(error)[0]
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _types(error)[1], "message": error.message}}


def ollama_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def _types(error: ApiError) -> tuple[str, str]:
    return _TYPES.get(error.status, _TYPES[400 if error.status < 500 else 500])


# path prefix -> the body of its API's errors; all other paths: OpenAI's
_BODIES: dict[str, Callable[[ApiError], dict[str, Any]]] = {"/v1/messages": anthropic_body, "/api/": ollama_body}


def body_for(path: str, error: ApiError) -> dict[str, Any]:
    """The body for an error of a request to this path."""
    return next((make for prefix, make in _BODIES.items() if path.startswith(prefix)), openai_body)(error)
