"""What goes around every request: its id, the key check, and the record of its end."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from staffel.api.errors import ApiError, bad_field, no_connection_left, wrong_key
from staffel.api.metrics import Metrics
from staffel.api.record import Record

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_OPEN_PATHS = ("/health", "/ready", "/metrics")


class Envelope:
    """Plain ASGI, because middleware that wraps the streams would hide a client's leaving."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        api_key: str | None,
        crowded: Callable[[], bool],
    ) -> None:
        self._app = app
        self._crowded = crowded
        self._metrics = metrics
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(self._metrics, time.monotonic_ns, time.monotonic_ns())
        scope.setdefault("state", {})["record"] = record

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = record.request_id
            await send(message)

        try:
            await (self._admit(scope, record) or self._app)(scope, receive, send_marked)
        finally:
            record.close()

    def _admit(self, scope: Scope, record: Record) -> ASGIApp | None:
        """None, or the refusal."""
        headers = Headers(scope=scope)
        given = headers.get("x-request-id")
        record.request_id = uuid.uuid4().hex
        try:
            if given is not None:
                record.request_id = _checked_id(given) or record.request_id
            if scope["path"] not in _OPEN_PATHS:
                self._check_key(headers)
                if self._crowded():
                    raise no_connection_left()
        except ApiError as error:
            return error.response()
        return None

    def _check_key(self, headers: Headers) -> None:
        if self._api_key is None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        right = secrets.compare_digest(key.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not right:
            raise wrong_key()


def _checked_id(given: str) -> str:
    if _REQUEST_ID.fullmatch(given) is None:
        raise bad_field("X-Request-Id", "must be 1 to 128 of the characters A-Za-z0-9._:/+=@-")
    return given
