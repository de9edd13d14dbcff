"""A request can harm only itself: each runs beside somebody else's stream, which feels nothing."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from msgspec import msgpack
from prometheus_client.parser import text_string_to_metric_families

from staffel.control.messages import Unable
from tests.e2e.bystander import Bystander
from tests.e2e.conftest import SMALL, MakeServer
from tests.e2e.server import MODEL, Server, free_port, run_cli, until

pytestmark = pytest.mark.e2e

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(disaggregated: Server) -> Iterator[Server]:
    """At the end nothing is left of all these requests."""
    yield disaggregated
    assert "Paris" in disaggregated.greedy("What is the capital of France?")
    until(lambda: disaggregated.quiet, 20, "the instances are at rest")
    assert disaggregated.errors() == []


@pytest.fixture
def bystander(server: Server) -> Iterator[Bystander]:
    with Bystander(server) as somebody:
        yield somebody
    somebody.check()


def ask(
    server: Server, schema: dict[str, Any], *, timeout: float = 60, **more: Any
) -> httpx.Response:
    """A chat whose answer must follow the schema."""
    body = {
        "messages": [{"role": "user", "content": "Answer."}],
        "max_tokens": 200,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    return httpx.post(server.url + CHAT, json=body | more, timeout=timeout)


def answer_of(response: httpx.Response) -> Any:
    """The JSON value that was answered."""
    assert response.status_code == 200, response.text[:500]
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return json.loads(choice["message"]["content"])


def check_refused(response: httpx.Response, *expected: str, status: int = 400) -> None:
    assert response.status_code == status, response.text[:500]
    for text in expected:
        assert text in response.json()["error"]["message"]


# ---- grammars


@pytest.mark.usefixtures("bystander")
def test_schemas_that_kill_the_library(server: Server) -> None:
    for value in (-(2**63) + 1, -(2**63) + 2):
        for schema in ({"const": value}, {"enum": [1, value]}):
            check_refused(ask(server, schema), "response_format", "can't be followed")
    assert answer_of(ask(server, {"const": -(2**53)})) == -(2**53)


def wide(properties: int) -> dict[str, Any]:
    """An object of many properties, each with a pattern of its own."""
    return {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 7 + 1}}}x{i}$"}
            for i in range(properties)
        },
    }


@pytest.mark.usefixtures("bystander")
def test_a_schema_that_takes_long(server: Server) -> None:
    check_refused(ask(server, wide(4500)), "response_format")


@pytest.mark.usefixtures("bystander")
def test_a_schema_that_is_long(server: Server) -> None:
    began = time.monotonic()
    check_refused(ask(server, wide(20_000)), "--max-schema")
    assert time.monotonic() - began < 2


@pytest.mark.usefixtures("bystander")
def test_nobody_waits_for_a_schema_whose_client_left(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        gone = [pool.submit(ask, server, wide(4000 + i), timeout=0.5) for i in range(4)]
        for request in gone:
            with pytest.raises(httpx.TimeoutException):
                request.result()
    began = time.monotonic()
    check_refused(ask(server, wide(2400)), "response_format")
    assert answer_of(ask(server, {"const": "quick"})) == "quick"
    assert time.monotonic() - began < 8


@pytest.mark.usefixtures("bystander")
def test_much_forced_text(server: Server) -> None:
    """Megabytes of it: a step must not look at all of it."""
    for items in ({"const": 5e-324}, {"type": "object", "additionalProperties": False}):
        answer = ask(server, {"type": "array", "items": items, "minItems": 10_000}, max_tokens=40)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.usefixtures("bystander")
def test_forced_text_that_is_written_like_a_special_token(server: Server) -> None:
    for value in ("<|im_end|>", {"a <|endoftext|> b": ["<|im_start|>"]}):
        assert answer_of(ask(server, {"const": value})) == value
        assert answer_of(ask(server, {"enum": [value]}, min_tokens=3)) == value


@pytest.mark.usefixtures("bystander")
def test_a_property_that_is_written_like_a_special_token(server: Server) -> None:
    name = "<|endoftext|>"
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"}},
        "required": [name],
        "additionalProperties": False,
    }
    assert isinstance(answer_of(ask(server, schema))[name], bool)


LATE = {
    "type": "array",
    "prefixItems": [{"const": "0123456789" * 3}, wide(600)],
    "minItems": 2,
    "items": False,
}
"""Fine at its start; where the second item begins the library has to give up."""


@pytest.mark.usefixtures("bystander")
def test_a_grammar_that_gives_up_in_the_middle(server: Server) -> None:
    check_refused(ask(server, LATE), "response_format", "any further")


@pytest.mark.usefixtures("bystander")
def test_a_grammar_that_gives_up_in_a_stream(server: Server) -> None:
    answer = ask(server, LATE, stream=True)
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert "any further" in json.loads(events[-1])["error"]["message"]


def test_options_of_the_library_are_no_clients_business(server: Server) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    check_refused(ask(server, schema), "x-guidance")


# ---- sizes


@pytest.mark.usefixtures("bystander")
@pytest.mark.parametrize(
    "body",
    [{"prompt": ["a"] * 2000, "n": 128}, {"prompt": ["a"] * 1_000_000}, {"prompt": ["a"] * 1025}],
    ids=["2000 prompts, n 128", "1,000,000 prompts", "one too many"],
)
def test_too_many_choices(server: Server, body: dict[str, Any]) -> None:
    began = time.monotonic()
    answer = httpx.post(server.url + COMPLETIONS, json=body | {"max_tokens": 1}, timeout=60)
    assert answer.status_code == 400
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("bystander")
def test_as_many_choices_as_there_may_be(server: Server) -> None:
    """And somebody who comes after it doesn't wait for all of them."""
    body = {"prompt": ["a"] * 128, "n": 8, "max_tokens": 1, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(httpx.post, server.url + COMPLETIONS, json=body, timeout=120)
        time.sleep(0.5)
        assert "Paris" in server.greedy("What is the capital of France?")
        assert not many.done()
        answer = many.result()
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 1024


@pytest.mark.usefixtures("bystander")
def test_long_bodies(server: Server) -> None:
    before = server.memory
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "a" * (50 * MIB)}, timeout=60)
    check_refused(answer, "--max-body", status=413)
    with ThreadPoolExecutor(6) as pool:
        body = {"prompt": "a" * (7 * MIB)}
        large = [
            pool.submit(httpx.post, server.url + COMPLETIONS, json=body, timeout=60)
            for _ in range(6)
        ]
        began = time.monotonic()
        assert "Paris" in server.greedy("What is the capital of France?")
        assert time.monotonic() - began < 5
        for request in large:
            check_refused(request.result(), "prompt")
    assert server.memory - before < 256 * MIB


@pytest.mark.usefixtures("bystander")
def test_a_body_without_an_announced_length(server: Server) -> None:
    parts = (b"x" * MIB for _ in range(20))
    answer = httpx.post(server.url + COMPLETIONS, content=parts, timeout=60)
    check_refused(answer, "--max-body", status=413)


@pytest.mark.usefixtures("bystander")
def test_many_ids_to_detokenize(server: Server) -> None:
    for count in (5_000_000, 1_000_000):
        answer = httpx.post(server.url + "/detokenize", json={"tokens": [300] * count}, timeout=60)
        assert answer.status_code in (400, 413)


# ---- connections


@pytest.fixture(scope="module")
def few_files(make_server: MakeServer, real_model: Path) -> Iterator[Server]:
    """A server that may open 200 files, and is short of patience; with a key from a file, a
    temporary folder of its own, and a tokenizer that knows a token more than the model."""
    with tempfile.TemporaryDirectory(prefix="isolation-", dir="/tmp") as folder:
        key, model = Path(folder) / "key", Path(folder) / "model"
        key.write_text("none\n")
        add_token(real_model, model)
        yield from _few_files(make_server, key, model)


def _few_files(make_server: MakeServer, key: Path, model: Path) -> Iterator[Server]:
    limit = ("prlimit", "--nofile=200:200")
    args = ("--head-timeout", "3", "--body-timeout", "3", "--api-key-file", str(key))
    args = (str(model), "--served-model-name", MODEL, "--colocated", "1", *args)
    # Without kernels nothing is packed, which for a folder that is gone soon would be a waste.
    env = {"TMPDIR": str(key.parent), "STAFFEL_KERNELS": "off"}
    with make_server(*args, *SMALL, under=limit, env=env) as server:
        server.http.headers["Authorization"] = "Bearer none"
        yield server


def add_token(source: Path, folder: Path) -> None:
    """A copy of the model whose tokenizer has a token that the model has no row for."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "tokenizer.json":
            (folder / file.name).symlink_to(file)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    last = max(tokenizer["model"]["vocab"].values())
    pad = tokenizer["added_tokens"][0] | {"id": last + 1, "content": "<pad>"}
    tokenizer["added_tokens"].append(pad)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_a_token_that_the_model_has_no_row_for(few_files: Server) -> None:
    """As fine-tunes have that add a token to pad with."""
    asked = {
        CHAT: {"messages": [{"role": "user", "content": "a <pad> b"}]},
        COMPLETIONS: {"prompt": "a <pad> b"},
    }
    with Bystander(few_files) as somebody:
        for path, body in asked.items():
            answer = few_files.http.post(path, json=body | {"max_tokens": 1})
            check_refused(answer, "49152 is no token id")
    somebody.check()


def connect(server: Server, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def test_heads_that_never_end(few_files: Server) -> None:
    with Bystander(few_files) as somebody:
        connections = [connect(few_files, b"GET /health HTTP/1.1\r\nX: ") for _ in range(300)]
        for _ in range(20):
            assert few_files.status("/health") == 200
            time.sleep(0.05)
        began = time.monotonic()
        for connection in connections:
            read_all(connection)
        assert time.monotonic() - began < 10, "some were never closed"
    somebody.check()
    assert len(few_files.log) < 200_000
    assert "Traceback" not in few_files.log


def test_connections_that_say_nothing(few_files: Server) -> None:
    connections = [connect(few_files, b"") for _ in range(100)]
    began = time.monotonic()
    assert not any(map(read_all, connections))
    assert time.monotonic() - began < 10


def test_large_heads(few_files: Server) -> None:
    with Bystander(few_files) as somebody:
        for head in (
            b"GET /health HTTP/1.1\r\nX: " + b"x" * (2 * MIB),
            b"GET /health HTTP/1.1\r\n" + b"X: x\r\n" * 300_000,
            b"GET /" + b"x" * (2 * MIB),
            b"GET /health HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
        ):
            connection = socket.create_connection(("127.0.0.1", few_files.port), timeout=10)
            try:
                connection.sendall(head)
            except (ConnectionResetError, BrokenPipeError):
                continue  # it was told long before it was through
            answer = read_all(connection)
            assert not answer or answer.startswith(b"HTTP/1.1 431 "), answer[:80]
    somebody.check()


def test_a_large_head_is_told_so(few_files: Server) -> None:
    with connect(few_files, b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n") as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"--max-head" in answer


def test_a_body_that_never_ends(few_files: Server) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer none\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    with connect(few_files, head) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_long_answer_outlasts_what_comes_after_its_request(few_files: Server) -> None:
    """An empty line too many, and the beginning of a next head: neither ends the answer."""
    body = b'{"prompt":"Once","max_tokens":100,"ignore_eos":true,"temperature":0,"stream":true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer none\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    began = time.monotonic()
    with connect(few_files, head + body + b"\r\nGET /hea") as connection:
        answer = b""
        while b"[DONE]" not in answer:
            part = connection.recv(65536)
            assert part, "the connection was closed in the midst of an answer"
            answer += part
    assert time.monotonic() - began > 3, "it must outlast --head-timeout"


def test_connections_are_kept_for_the_next_request(few_files: Server) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(few_files, request) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        time.sleep(1)
        connection.sendall(request[:10])
        time.sleep(1)
        connection.sendall(request[10:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(request * 3)
        time.sleep(0.5)
        assert connection.recv(65536).count(b"200 OK") == 3


# ---- what the server writes, and where


def test_a_log_that_nobody_reads(make_server: MakeServer, tmp_path: Path) -> None:
    """stderr is a pipe, and the pipe is full."""
    pipe = tmp_path / "pipe"
    script = f'mkfifo {pipe}; sleep 1000 < {pipe} & exec "$@" 2> {pipe}'
    server = make_server("--colocated", "1", *SMALL, under=("bash", "-c", script, "-"))
    try:
        server.launch().wait_ready()
        with Bystander(server) as somebody:
            for _ in range(300):  # 160 fill the pipe
                assert server.http.post(COMPLETIONS, json={"n": 0}).status_code == 400
        somebody.check()
        assert dropped_lines(server) == 0, "so few lines can wait"
    finally:
        server.close()


def dropped_lines(server: Server) -> float:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return next(s.value for s in samples if s.name == "staffel_log_lines_dropped_total")


def test_a_journal_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    ended = run_cli("serve", "--port", str(free_port()), "--record", "/dev/full")
    assert ended.returncode == 2
    assert "--record" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_message_that_is_none(few_files: Server) -> None:
    base = Path(few_files.environment["TMPDIR"])
    [folder] = base.glob("staffel-*")
    unknown = Unable("nobody", 1, "I can't")
    messages = [b"", b"nonsense", b"\xc1", b"\x81\xa4type\xa5Hello", msgpack.encode(unknown)]
    with (
        Bystander(few_files) as somebody,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as intruder,
    ):
        intruder.connect(f"ipc://{folder}/router")
        for frames in [*([message] for message in messages), [b"", b"x"], [b"a"] * 5]:
            intruder.send_multipart(frames)
        time.sleep(0.5)
    somebody.check()
    assert "was dropped" in few_files.log


def test_a_key_from_a_file(few_files: Server) -> None:
    url = f"{few_files.url}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": "Bearer none"}).status_code == 200
