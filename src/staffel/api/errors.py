"""Errors as clients see them: OpenAI's error JSON with the right status."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from staffel.control.messages import UNAVAILABLE_RETRY_S, Failure

_TYPES = {
    408: "timeout_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout_error",
}


class ApiError(Exception):
    """Ends a request with `status` and OpenAI's error JSON.

    `param` names the field at fault, `code` is what programs compare, `retry_after` is in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def bad_field(field: str, text: str) -> ApiError:
    """A 400 for a field whose value can't be served."""
    return ApiError(400, f"{field}: {text}", param=field)


def wrong_key() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
    )


def unknown_model(name: str, served: str) -> ApiError:
    return ApiError(
        404,
        f"The model {name[:100]!r} does not exist; this server has {served!r}.",
        param="model",
        code="model_not_found",
    )


def context_exceeded(limit: int, prompt: int, output: int, field: str) -> ApiError:
    """The prompt's tokens and the output tokens asked for don't fit into `limit` tokens."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{prompt + output} tokens ({prompt} in the prompt, {output} for the output). "
        f"Shorten the prompt or lower max_tokens.",
        param=field,
        code="context_length_exceeded",
    )


def no_connection_left() -> ApiError:
    text = "All connections are at work on requests (--max-connections)."
    return ApiError(503, text, code=503, retry_after=1)


def not_ready(state: str, missing: dict[str, str] | None = None) -> ApiError:
    """`missing`: instances that aren't ready, and why."""
    reasons = "".join(f" {name}: {why}." for name, why in (missing or {}).items())
    return ApiError(
        503,
        f"The server is {state} and takes no requests now.{reasons}",
        code=503,
        retry_after=UNAVAILABLE_RETRY_S,
    )


def from_failure(failure: Failure) -> ApiError:
    """What the engine says of a request that it can't answer (to its end)."""
    if failure.status == 400:  # nothing else of a request shows only while it runs
        return bad_field("response_format", failure.message)
    retry_after = failure.retry_after
    if retry_after is None and failure.status in (429, 503):
        retry_after = UNAVAILABLE_RETRY_S
    return ApiError(failure.status, failure.message, code=failure.status, retry_after=retry_after)
