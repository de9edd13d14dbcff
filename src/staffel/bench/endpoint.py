"""What is measured: where it is, how it is asked, and what it was found to support."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from staffel.bench.workload import Ask
from staffel.config import ConfigError

Api = Literal["completions", "chat"]
LimitField = Literal["max_tokens", "max_completion_tokens"]

_OWN_FIELDS = {
    "ignore_eos",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "model",
    "n",
    "prompt",
    "return_token_ids",
    "stream",
}


class Address(Struct, frozen=True, kw_only=True):
    """Where requests go. One name lookup for a whole run: `ip` is what was found to answer."""

    tls: bool
    host: str
    port: int
    prefix: str
    """Path before "/completions": usually "/v1"."""
    ip: str = ""
    """Empty: not looked up yet."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """From "http://host:8000", with or without "/v1" at its end.

        Raises:
            ConfigError: no http or https URL, or one with a query.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"URL: {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"URL: {url!r} is not like http://127.0.0.1:8000 or https://host/v1")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        prefix = path if re.search(r"/v\d+$", path) else f"{path}/v1"
        return cls(tls=tls, host=parts.hostname, port=port or (443 if tls else 80), prefix=prefix)

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self._authority()}{self.prefix}"

    def request(self, method: str, path: str, api_key: str | None, body: bytes = b"") -> bytes:
        """The bytes of one HTTP/1.1 request, the only one of its connection.

        A new connection for each request is what independent users have, and no request waits
        for another's; so TTFT includes connecting (and the TLS handshake).
        """
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self._authority()}",
            "Connection: close",
            "Accept-Encoding: identity",
            "User-Agent: staffel-bench",
        ]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join((*lines, "", "")).encode() + body

    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Features(Struct, frozen=True, kw_only=True):
    """Optional parts of the API that the server was seen to honour, and are used."""

    ignore_eos: bool = False
    """Accepted; whether it is honoured shows in each reply's length."""
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False


class Endpoint(Struct, frozen=True, kw_only=True):
    """Everything that is needed to send a request. Made by `preflight.discover`."""

    address: Address
    model: str
    api: Api = "completions"
    api_key: str | None = None
    features: Features = Features()
    limit_field: LimitField = "max_tokens"
    extra: dict[str, Any] = {}
    """Fields of the user's, added to each body."""
    timeout: float = 600.0
    """Seconds from the start of a request to its end; then it has failed."""
    tokenizer: str | None = None
    """Folder with a tokenizer.json, for servers that don't say which chunk has how many tokens."""
    max_model_len: int | None = None
    """As the server says; None: it doesn't."""
    notes: tuple[str, ...] = ()
    """What was found out about the server that a reader of the figures should know."""

    def __post_init__(self) -> None:
        if own := sorted(_OWN_FIELDS & self.extra.keys()):
            raise ConfigError(f"--extra-body: {', '.join(own)}: set by the measurement itself")
        if not self.timeout > 0:
            raise ConfigError("--timeout: must be a number of seconds above 0")

    @property
    def url(self) -> str:
        return str(self.address)

    def request(self, ask: Ask) -> bytes:
        """The bytes that ask for one reply as a stream.

        Raises:
            ConfigError: a prompt of token ids for the chat API, which takes text alone.
        """
        body = msgspec.json.encode(self._body(ask))
        path = "/chat/completions" if self.api == "chat" else "/completions"
        return self.address.request("POST", path, self.api_key, body)

    def _body(self, ask: Ask) -> dict[str, Any]:
        body = {"model": self.model, **self._prompt(ask), self.limit_field: ask.output_tokens}
        body |= {"stream": True, **self._optional()}
        options = {**body.pop("stream_options", {}), **self.extra.get("stream_options", {})}
        return {**body, **self.extra, **({"stream_options": options} if options else {})}

    def _prompt(self, ask: Ask) -> dict[str, Any]:
        if self.api == "completions":
            return {"prompt": ask.prompt}
        if not isinstance(ask.prompt, str):
            raise ConfigError(
                "--api: chat takes text, and this workload has token ids; use completions"
            )
        return {"messages": [{"role": "user", "content": ask.prompt}]}

    def _optional(self) -> dict[str, Any]:
        use = self.features
        options = {
            "include_usage": use.include_usage,
            "continuous_usage_stats": use.continuous_usage,
        }
        wanted = {name: True for name, on in options.items() if on}
        fields = {"ignore_eos": use.ignore_eos, "return_token_ids": use.token_ids}
        body: dict[str, Any] = {name: True for name, on in fields.items() if on}
        return body | ({"stream_options": wanted} if wanted else {})
