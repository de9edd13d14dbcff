"""Finds out what a server supports before it is measured, with one tiny request (and its repeats).

Nothing is assumed: an optional field is asked for, left out when the server refuses it by name,
and left out as well when it is taken without effect.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from staffel.bench.endpoint import Address, Api, Endpoint, Features
from staffel.bench.exchange import Exchange, connect, tls_context
from staffel.bench.sse import DONE, EventReader, Payload, decode_payload, error_text
from staffel.bench.tokens import TextTokenizer
from staffel.bench.workload import Ask
from staffel.config import ConfigError

_TINY = Ask(prompt="One, two, three, four,", output_tokens=8, prompt_tokens=8)
_REFUSALS = (400, 422)
_NAMED_AS = {
    "ignore_eos": ("ignore_eos",),
    "continuous_usage": ("continuous_usage_stats", "stream_options"),
    "include_usage": ("include_usage", "stream_options"),
    "token_ids": ("return_token_ids",),
}
"""How a refusal may name a feature."""


class Reply:
    """A whole answer; the sink of its exchange."""

    def __init__(self) -> None:
        self.status = 0
        self.type = ""
        self.content = b""

    def head(self, status: int, content_type: str) -> None:
        self.status, self.type = status, content_type

    def body(self, data: bytes) -> None:
        self.content += data

    def read(self, at: float) -> None:
        """When it came doesn't matter here."""


class _Card(Struct):
    id: str
    max_model_len: int | None = None


class _Cards(Struct):
    data: list[_Card]


async def discover(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    api: Api = "completions",
    extra: dict[str, Any] | None = None,
    timeout: float = 600.0,
    tokenizer: Path | None = None,
    ignore_eos: bool = True,
) -> Endpoint:
    """The endpoint at `url`, ready to be measured. Costs the server a few tokens.

    Args:
        model: None: the one that `/v1/models` lists.
        extra: fields for each body; None: none.
        timeout: seconds for each request, those of this function included.
        tokenizer: folder with a tokenizer.json, for servers that don't tell tokens by chunk.
        ignore_eos: ask for outputs of exactly the workload's length.

    Raises:
        ConfigError: nobody answers, or not with what is needed to measure: the text says what.
    """
    if tokenizer is not None:
        TextTokenizer(str(tokenizer))
    address = await _locate(Address.parse(url))
    card = await _card(address, api_key, model, timeout)
    endpoint = Endpoint(
        address=address,
        model=card.id,
        api=api,
        api_key=api_key,
        features=Features(
            ignore_eos=ignore_eos, include_usage=True, continuous_usage=True, token_ids=True
        ),
        extra=extra or {},
        timeout=timeout,
        tokenizer=str(tokenizer) if tokenizer else None,
        max_model_len=card.max_model_len,
    )
    endpoint, reply = await _accepted(endpoint)
    return _settled(endpoint, _payloads(reply))


async def fetch(address: Address, request: bytes, timeout: float) -> Reply:
    """One exchange, whatever its status. Raises ConfigError where there is no whole answer."""
    reply = Reply()
    exchange = Exchange(request, reply)
    try:
        async with asyncio.timeout(timeout):
            await connect(address, tls_context(address), exchange)
            await exchange.ended
    except TimeoutError:
        raise ConfigError(f"URL: {address} gave no answer within {timeout:g} s") from None
    except OSError as error:
        raise ConfigError(f"URL: {address} can't be asked: {error}") from None
    finally:
        exchange.close(gently=True)
    return reply


async def _locate(address: Address) -> Address:
    """With the first of the host's addresses that takes connections."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"URL: {address.host}: {error.strerror or error}") from None
    failure: OSError | None = None
    for ip in dict.fromkeys(str(entry[4][0]) for entry in found):
        try:
            _, writer = await asyncio.open_connection(ip, address.port)
        except OSError as error:
            failure = error
            continue
        writer.close()
        return replace(address, ip=ip)
    raise ConfigError(f"URL: {address} can't be reached: {failure}; is the server running?")


async def _card(address: Address, api_key: str | None, model: str | None, timeout: float) -> _Card:
    reply = await fetch(address, address.request("GET", "/models", api_key), timeout)
    if reply.status in (401, 403):
        raise ConfigError(f"--api-key: {address} wants another: {error_text(reply.content)}")
    cards = _cards(reply)
    if model is not None:
        return next((card for card in cards if card.id == model), _Card(model))
    if len(cards) != 1:
        known = ", ".join(card.id for card in cards) or f"nothing (HTTP {reply.status})"
        raise ConfigError(f"--model: name the model; {address}/models lists {known}")
    return cards[0]


def _cards(reply: Reply) -> list[_Card]:
    try:
        return msgspec.json.decode(reply.content, type=_Cards).data if reply.status == 200 else []
    except msgspec.DecodeError:
        return []


async def _accepted(endpoint: Endpoint) -> tuple[Endpoint, Reply]:
    """The endpoint without what the server refuses, and its answer to the rest.

    Each round leaves at least one field out, so this ends.
    """
    while True:
        reply = await fetch(endpoint.address, endpoint.request(_TINY), endpoint.timeout)
        if reply.status == 200:
            return endpoint, reply
        message = error_text(reply.content, limit=2000)
        if reply.status not in _REFUSALS:
            raise ConfigError(f"URL: {endpoint.url} answers HTTP {reply.status}: {message[:300]}")
        endpoint = _without_refused(endpoint, reply, message)


def _without_refused(endpoint: Endpoint, reply: Reply, message: str) -> Endpoint:
    if "max_completion_tokens" in message and endpoint.limit_field == "max_tokens":
        return replace(endpoint, limit_field="max_completion_tokens")
    asked = _used(endpoint.features)
    body = reply.content.decode(errors="replace")
    refused = [name for name in asked if _NAMED_AS[name][0] in body]
    refused = refused or [name for name in asked if _NAMED_AS[name][-1] in body]
    if not asked:
        raise ConfigError(f"URL: {endpoint.url} refuses a plain request: {message[:300]}")
    # A server that names none of them may still mean any of them.
    how = "refused" if refused else "left out, since the server refused without naming a field"
    notes = tuple(f"{_NAMED_AS[name][0]}: {how}" for name in refused or asked)
    off = dict.fromkeys(refused or asked, False)
    if "include_usage" in off:
        # Continuous usage is an addition to it.
        off["continuous_usage"] = False
    features = replace(endpoint.features, **off)
    return replace(endpoint, features=features, notes=endpoint.notes + notes)


def _used(features: Features) -> list[str]:
    return [name for name in _NAMED_AS if getattr(features, name)]


def _payloads(reply: Reply) -> list[Payload]:
    """The events of the tiny request's stream. Raises ConfigError where it is none, or fails."""
    if not reply.type.startswith("text/event-stream"):
        text = error_text(reply.content)
        raise ConfigError(f"URL: the server doesn't stream: it answers {reply.type!r}: {text}")
    payloads = []
    for data in _events(reply):
        try:
            payload = decode_payload(data)
        except msgspec.DecodeError as error:
            raise ConfigError(f"URL: the server's stream can't be read: {error}") from None
        if payload.failed:
            raise ConfigError(f"URL: the server fails a tiny request: {error_text(data)}")
        payloads.append(payload)
    return payloads


def _events(reply: Reply) -> Iterator[bytes]:
    reader = EventReader()
    for event in (*reader.feed(reply.content), *reader.close()):
        if event.data != DONE:
            yield event.data


def _settled(endpoint: Endpoint, payloads: list[Payload]) -> Endpoint:
    """The endpoint with the features that had an effect.

    Raises:
        ConfigError: no content, or no way to know how many tokens a chunk has.
    """
    content = [payload for payload in payloads if any(_carries(payload))]
    if not content:
        raise ConfigError("URL: the server's answer to a tiny request has no content")
    counted = [payload.usage for payload in payloads if payload.usage is not None]
    usage = any(one.completion_tokens for one in counted)
    # One chunk with usage could be the last one, which always has it.
    running = len(content) > 1 and all(one.usage and one.usage.completion_tokens for one in content)
    ids = any(choice.token_ids for one in content for choice in one.choices)
    scores = any(choice.scored() for one in content for choice in one.choices)
    if not (usage or ids or scores or endpoint.tokenizer):
        raise ConfigError(
            "--tokenizer: the server doesn't say how many tokens it sends; give the model's folder"
        )
    return _with_effect(endpoint, usage=usage, running=running, ids=ids)


def _carries(payload: Payload) -> Iterator[bool]:
    return (bool(choice.content() or choice.token_ids) for choice in payload.choices)


def _with_effect(endpoint: Endpoint, *, usage: bool, running: bool, ids: bool) -> Endpoint:
    seen = {"include_usage": usage, "continuous_usage": running, "token_ids": ids}
    idle = [name for name in _used(endpoint.features) if not seen.get(name, True)]
    notes = tuple(f"{_NAMED_AS[name][0]}: no effect" for name in idle)
    features = replace(endpoint.features, **dict.fromkeys(idle, False))
    if features.continuous_usage:
        # Either tells the tokens of a chunk; ids repeat the whole prompt in the first one.
        features = replace(features, token_ids=False)
    return replace(endpoint, features=features, notes=endpoint.notes + notes)
