"""One request against a server with known times and every fault: what its record says."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import subprocess
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace

from staffel.bench.client import Client, OwnFault, Planned, Stream
from staffel.bench.endpoint import Address, Endpoint, Features
from staffel.bench.preflight import discover
from staffel.bench.records import Record
from staffel.bench.workload import Ask
from staffel.config import ConfigError
from tests.bench.fake_server import Behaviour, FakeServer, Served

ALL = Features(ignore_eos=True, include_usage=True, continuous_usage=True)


def endpoint(server: FakeServer, **fields: Any) -> Endpoint:
    given = {"features": ALL, "timeout": 10.0, "model": "fake", **fields}
    return Endpoint(address=Address.parse(server.url), **given)


async def ask(target: Endpoint, tokens: int = 8, prompt: str | list[int] = "hi") -> Record:
    """One request, with perf_counter as the run's clock."""
    client = Client(target)
    planned = Planned(0, perf_counter(), Ask(prompt, tokens, len(prompt)))
    return await client.perform(planned, client.encode(planned))


async def reply(tokens: int = 8, endpoint_fields: dict[str, Any] | None = None, **fields: Any):
    """The record of one request to a server that behaves like this, and what the server did."""
    async with FakeServer(**fields) as server:
        record = await ask(endpoint(server, **(endpoint_fields or {})), tokens)
        return record, server.log[0]


def delays_of(record: Record, served: Served) -> list[float]:
    """From when the server wrote each token to when the client saw it. One token per event; a
    slow machine may bring several events in one read."""
    seen = [chunk.at for chunk in record.chunks for _ in range(chunk.tokens)]
    return [at - wrote for at, wrote in zip(seen, served.written, strict=True)]


async def test_times_are_those_of_the_server() -> None:
    record, served = await reply(tokens=20, prefill=0.05, tpot=0.01)
    assert record.error is None
    assert record.status == 200
    assert record.finish == "length"
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (2, 20, "usage")
    delays = delays_of(record, served)
    assert len(delays) == 20
    # Records are rounded to microseconds.
    assert min(delays) > -2e-6
    assert median(delays) < 0.005
    assert record.scheduled <= record.sent <= served.arrived + 2e-6
    assert record.ended >= record.chunks[-1].at


async def test_fault_role_only_first_chunk_as_the_first_token() -> None:
    record, served = await reply(prefill=0.1, role_chunk=True, endpoint_fields={"api": "chat"})
    assert record.error is None
    assert record.chunks[0].at >= served.due[0]
    assert len(delays_of(record, served)) == 8


async def test_fault_an_empty_delta_as_the_first_token() -> None:
    for features in (ALL, Features(include_usage=True)):
        record, served = await reply(
            prefill=0.1, empty_delta=True, endpoint_fields={"features": features}
        )
        assert record.chunks[0].at >= served.due[0]
        assert min(delays_of(record, served)) > -2e-6


async def test_a_token_without_text_is_a_token() -> None:
    """Text may be held back, in the middle of a character; the token was there."""
    for features in (ALL, Features(token_ids=True, include_usage=True)):
        record, _ = await reply(word="", token_ids=True, endpoint_fields={"features": features})
        assert record.error is None
        assert sum(chunk.tokens for chunk in record.chunks) == 8


async def test_fault_one_itl_sample_per_multi_token_chunk() -> None:
    record, _ = await reply(tokens=20, tpot=0.03, chunk_tokens=5)
    assert [chunk.tokens for chunk in record.chunks] == [5, 5, 5, 5]
    assert len(list(record.gaps())) == 15
    # The first chunk is due with its first token, the second with its last: 9 steps for 5.
    assert record.tpot == pytest.approx(0.03 * 19 / 15, rel=0.15)


async def test_events_in_one_read_are_one_chunk() -> None:
    record, served = await reply(tokens=8, burst=True)
    assert len(served.written) == 8
    assert [chunk.tokens for chunk in record.chunks] == [8]
    assert record.tpot is None


async def test_fault_empty_replies_giving_ttft_0() -> None:
    record, _ = await reply(tokens=5, prefill=0.01, word="", usage="none")
    assert record.ttft is None
    assert record.error is not None
    assert "empty" in record.error


async def test_fault_output_length_taken_from_max_tokens() -> None:
    record, served = await reply_with_fewer(tokens=5, asked=20)
    assert record.tokens == 5
    assert record.tpot == pytest.approx((served.due[-1] - served.due[0]) / 4, rel=0.3)


async def test_an_output_shorter_than_asked_for_fails_with_ignore_eos_only() -> None:
    record, _ = await reply_with_fewer(tokens=5, asked=20)
    assert record.error is not None
    assert "short: 5 of 20 tokens" in record.error
    record, _ = await reply_with_fewer(
        tokens=5, asked=20, endpoint_fields={"features": Features(include_usage=True)}
    )
    assert record.error is None


async def reply_with_fewer(
    tokens: int, asked: int, endpoint_fields: dict[str, Any] | None = None
) -> Any:
    behaviour = Behaviour(tokens=tokens, tpot=0.01, finish="stop")
    return await reply(asked, endpoint_fields, behaviour=behaviour)


async def test_fault_64_kb_line_buffers() -> None:
    record, _ = await reply(padding=500_000)
    assert record.error is None
    assert sum(chunk.tokens for chunk in record.chunks) == 8


async def test_fault_retokenisation_drift(tmp_path: Path) -> None:
    """The text has twice the tokens for this tokenizer: n stays the server's."""
    model = tokenizers.models.WordLevel({"t": 0, "?": 1}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fields = {"tokenizer": str(tmp_path), "features": Features(include_usage=True)}
    record, _ = await reply(word="ab", endpoint_fields=fields)
    assert record.error is None
    assert record.tokens_from == "text"
    assert sum(chunk.tokens for chunk in record.chunks) == 16
    assert record.tokens == record.output_tokens == 8


async def test_one_token_per_chunk_is_never_assumed_silently() -> None:
    fields = {"features": Features(include_usage=True)}
    record, _ = await reply(tokens=6, chunk_tokens=2, endpoint_fields=fields)
    assert sum(chunk.tokens for chunk in record.chunks) == 6
    assert record.tokens_from == "spread"
    record, _ = await reply(usage="none", endpoint_fields={"features": Features()})
    assert record.error is not None
    assert "--tokenizer" in record.error


@pytest.mark.parametrize(
    "fields",
    [
        {"newline": "\r\n"},
        {"comment": True},
        {"chunked": False},
        {"split": 7},
        {"split": 7, "newline": "\r\n", "comment": True},
        {"done": False},
        {"finish": None},
        {"usage": "final", "logprobs": True},
    ],
    ids=str,
)
async def test_all_ways_of_streaming_give_the_same_record(fields: dict[str, Any]) -> None:
    record, _ = await reply(tokens=4, tpot=0.002, **fields)
    assert record.error is None
    assert record.tokens == sum(chunk.tokens for chunk in record.chunks) == 4


FAILURES = {
    "HTTP 429: slow down": {"status": 429, "message": "slow down"},
    "HTTP 503: no instance": {"status": 503, "message": "no instance"},
    "in place of a stream: ": {"json_answer": True},
    "error in the stream: it broke": {"error_at": 3},
    "closed the connection before": {"cut_at": 3},
    "truncated": {"cut_at": 3, "chunked": False},
    "connection": {"reset_at": 3},
    "timed out after 0.3 s": {"stall_at": 3},
}


@pytest.mark.parametrize(("message", "fields"), FAILURES.items(), ids=FAILURES)
async def test_fault_failures_left_out_of_the_denominator(
    message: str, fields: dict[str, Any]
) -> None:
    """Whatever goes wrong is a record with an error, and keeps what had come."""
    record, _ = await reply(endpoint_fields={"timeout": 0.3}, **fields)
    assert record.error is not None
    assert message in record.error
    assert record.ended is not None
    streamed = fields.keys() & {"error_at", "cut_at", "reset_at", "stall_at"}
    assert sum(chunk.tokens for chunk in record.chunks) == (3 if streamed else 0)


async def test_a_refused_connection_is_a_failed_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        target = Endpoint(address=Address.parse(url), model="x")
        record = await ask(target)
    assert record.error is not None
    assert "connection" in record.error
    assert record.status is None
    assert record.sent >= record.scheduled


async def test_a_server_that_never_answers_times_out() -> None:
    """It takes the connection, and nothing more."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        target = Endpoint(address=Address.parse(url), model="x", timeout=0.1)
        record = await ask(target)
    assert record.error == "timed out after 0.1 s"
    assert record.chunks == []


async def test_an_answer_that_is_not_http_is_a_failed_request() -> None:
    async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n\r\n")
        await writer.drain()

    async with await asyncio.start_server(garbage, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        address = Address.parse(f"http://127.0.0.1:{port}")
        record = await ask(Endpoint(address=address, model="x", timeout=5))
    assert record.error is not None
    assert "not HTTP" in record.error


def test_events_that_cannot_be_read_fail_the_request() -> None:
    for event in (b'{"choices": 5}', b"{", b"\xff", b'{"choices": [{"text": 5}]}'):
        stream = Stream()
        stream.head(200, "text/event-stream")
        stream.body(b"data: " + event + b"\n\ndata: [DONE]\n\n")
        assert stream.fault() is not None
        assert "unreadable event" in stream.fault()


def test_error_events_of_other_shapes_fail_the_request() -> None:
    for event in (
        b'data: {"object": "error", "message": "it broke"}',
        b"event: error\ndata: it broke",
        b'error: {"message": "it broke"}',
    ):
        stream = Stream()
        stream.head(200, "text/event-stream")
        stream.body(event + b"\n\ndata: [DONE]\n\n")
        assert stream.fault() == "error in the stream: it broke"


def test_want_of_files_or_ports_here_is_not_the_servers_fault() -> None:
    with pytest.raises(OwnFault):
        Stream().broken(OSError(errno.EMFILE, "Too many open files"))


async def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run(
        [*new, "-nodes", "-days", "2", *subject, *files], check=True, capture_output=True
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    server = FakeServer()
    await server.start(tls)
    url = server.url.replace("127.0.0.1", "localhost")
    with pytest.raises(ConfigError, match="certificate"):
        await discover(url)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    found = await discover(url)
    record = await ask(replace(found, timeout=10))
    await server.stop()
    assert record.error is None
    assert record.tokens == 8
