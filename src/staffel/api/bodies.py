"""Reading request bodies: not too long, not too slowly, and not too many large ones at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import Request as HttpRequest

from staffel.api.errors import ApiError
from staffel.api.limits import Limits

_AT_ONCE = 16
"""Bodies of the largest size that are held in memory at a time."""


class Bodies:
    """Reads bodies, and keeps count of their bytes until nobody needs them any more."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0
        """Bytes of all bodies that are being read or worked on."""

    @asynccontextmanager
    async def read(self, http: HttpRequest) -> AsyncGenerator[bytes]:
        """The body. It counts as held until the context is left.

        Raises:
            ApiError: 413 too long, 408 too slow, 429 too much of it at a time.
        """
        body = bytearray()
        try:
            self._check_announced(http)
            try:
                async with asyncio.timeout(self._limits.body_timeout):
                    async for part in http.stream():
                        self._held += len(part)
                        body += part
                        self._check(len(body))
            except TimeoutError:
                raise self._too_slow() from None
            yield bytes(body)
        finally:
            self._held -= len(body)

    def _check_announced(self, http: HttpRequest) -> None:
        length = http.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise self._too_long()

    def _check(self, length: int) -> None:
        if length > self._limits.max_body_bytes:
            raise self._too_long()
        if self._held > _AT_ONCE * self._limits.max_body_bytes:
            raise ApiError(429, "Too many large requests at a time.", code=429, retry_after=1)

    def _too_long(self) -> ApiError:
        most = self._limits.max_body_bytes
        return ApiError(413, f"The body is longer than {most} bytes (--max-body).", code=413)

    def _too_slow(self) -> ApiError:
        most = self._limits.body_timeout
        return ApiError(408, f"The body took longer than {most:g} s (--body-timeout).", code=408)
