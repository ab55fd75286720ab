"""Errors as clients see them: OpenAI's error object, and the status that makes clients do right.

An OpenAI SDK retries 429 and 5xx and gives up on other 4xx, so a status says whether trying again
can help. What is echoed of a request is cut short.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from stretto.errors import (
    InvalidRequest,
    Overloaded,
    PipelineClosed,
    StageFailed,
    StrettoError,
)
from stretto.pipeline.frontend import PromptTooLong

M = TypeVar("M", bound=BaseModel)

# What vLLM allows an error message to repeat.
MAX_ECHO = 200
MAX_DETAILS = 10
MAX_MESSAGE = MAX_ECHO * MAX_DETAILS
RETRY_AFTER_S = 1


class ErrorObject(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    # A word of OpenAI's in a response; in a stream, which has no status of its own, the status.
    code: str | int | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class ApiError(Exception):
    """A request ends with this status and this error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        at = None if param is None else _printable(param)[:MAX_ECHO]
        self.error = ErrorObject(_printable(message)[:MAX_MESSAGE], kind, at, code)
        self.retry_after_s = retry_after_s

    def response(self) -> Response:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.status == 409:
            # An SDK tries conflicts again, but this one stays.
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(ErrorBody(self.error), status=self.status, headers=headers)

    def in_stream(self) -> ErrorBody:
        return ErrorBody(msgspec.structs.replace(self.error, code=self.status))


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(body),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def invalid(param: str, message: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    return invalid(param, message, code="unsupported_value")


def check_model(name: str | None, served: Sequence[str]) -> None:
    """Raises ApiError for a model that is not served here; none at all means the one there is."""
    if name is not None and name not in served:
        raise ApiError(
            404,
            f"the model {echo(name)} does not exist; served here: {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


def check_unicode(param: str, text: str) -> None:
    """Raises ApiError for half a surrogate pair, which JSON may hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(param, f"{param} is no valid Unicode: {error.reason}") from error


def _printable(text: str) -> str:
    """`text` with halves of surrogate pairs spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


def echo(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= MAX_ECHO else f"{shown[:MAX_ECHO]}..."


def from_stretto(error: StrettoError) -> ApiError:
    """What a client is told of an error of the pipeline."""
    match error:
        case PromptTooLong():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case InvalidRequest():
            return invalid(error.param, str(error))
        case Overloaded():
            return ApiError(
                429, str(error), kind="requests", code="rate_limit_exceeded",
                retry_after_s=RETRY_AFTER_S,
            )  # fmt: skip
        case PipelineClosed():
            return shutting_down(str(error))
        case _:
            return ApiError(500, str(error), kind="server_error", code="request_failed")


def from_submission(error: StrettoError) -> ApiError:
    """As `from_stretto`, for a request that no stage has seen: a dead stage is no fault of it."""
    if isinstance(error, StageFailed):
        return ApiError(503, str(error), kind="server_error", code="stage_dead")
    return from_stretto(error)


def shutting_down(message: str = "the server is shutting down") -> ApiError:
    return ApiError(
        503, message, kind="server_error", code="shutting_down", retry_after_s=RETRY_AFTER_S
    )


def internal() -> ApiError:
    return ApiError(500, "internal error; see the server's log", kind="server_error")


def from_http(error: HTTPException, *, method: str, path: str) -> ApiError:
    """What the router refuses: unknown paths and methods, and bodies that are too large."""
    messages = {
        404: f"there is no {echo(path)} here",
        405: f"{method} is not a method of {echo(path)}",
    }
    return ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))


def from_validation(error: RequestValidationError, body: Any) -> ApiError:
    """What of a body does not fit its model; `param` is the first place at fault."""
    details = error.errors()
    paths = [_path(detail, body) for detail in details]
    lines: list[str] = []
    for path, detail in zip(paths, details[:MAX_DETAILS], strict=False):
        line = f"{path}: {_explain(detail)}" if path else f"the body {_explain(detail)}"
        if line not in lines:
            lines.append(line)
    if len(details) > MAX_DETAILS:
        lines.append(f"and {len(details) - MAX_DETAILS} more")
    # Of a union each member complains; the one that got furthest is the one that was meant.
    deepest = max((path for path in paths if path.startswith(paths[0])), key=len)
    return ApiError(
        400,
        "; ".join(lines),
        param=deepest or None,
        code="unsupported_value" if details[0]["type"] == "literal_error" else None,
    )


def checked(model: type[M], fields: Mapping[str, Any]) -> M:
    """As FastAPI would read a body that is `fields`. Raises ApiError."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = [{**detail, "loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise from_validation(RequestValidationError(found), fields) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at what was meant, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _explain(detail: Mapping[str, Any]) -> str:
    match detail["type"]:
        case "json_invalid":
            return f"is no JSON: {detail['ctx']['error']}"
        case "missing":
            return "is missing"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"is no JSON object sent as application/json (given: {echo(detail['input'])})"
        case "extra_forbidden":
            return "is not a field here"
        case _:
            return f"{detail['msg']} (given: {echo(detail['input'])})"


def _path(detail: Mapping[str, Any], body: Any) -> str:
    """A dotted path as far as the body has it: pydantic also puts names of types into it."""
    path, value = "", body
    # The first step is "body", the last one of a missing field is not there.
    for step in detail["loc"][1:]:
        match value, step:
            case dict(), str() if step in value:
                value = value[step]
                path += f".{step}"
            case list(), int() if step < len(value):
                value = value[step]
                path += f"[{step}]"
    if detail["type"] == "missing" and len(detail["loc"]) > 1:
        path += f".{detail['loc'][-1]}"
    return path.removeprefix(".")
