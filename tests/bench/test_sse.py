"""Server-sent events from bytes in any pieces."""

from __future__ import annotations

import pytest

from staffel.bench.sse import Event, EventReader, decode_payload, error_text

STREAM = (
    b": hello\r\n\r\ndata: {}\r\n\r\nevent: error\ndata: a\ndata:b\n\nid: 1\nretry: 3\n\n"
    b"error: broken\n\ndata: [DONE]\n\n"
)
EVENTS = [
    Event(b"", b"{}"),
    Event(b"error", b"a\nb"),
    Event(b"error", b"broken"),
    Event(b"", b"[DONE]"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_whatever_the_reads(size: int) -> None:
    reader = EventReader()
    reads = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for read in reads for event in reader.feed(read)] == EVENTS


def test_the_end_of_the_stream_ends_an_event() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: [DONE]")) == []
    assert list(reader.close()) == [Event(b"", b"[DONE]")]


def test_a_line_of_megabytes_in_small_reads() -> None:
    reader = EventReader()
    line = b"data: " + b"x" * 3_000_000 + b"\n\n"
    reads = [line[at : at + 1000] for at in range(0, len(line), 1000)]
    (event,) = [event for read in reads for event in reader.feed(read)]
    assert len(event.data) == 3_000_000


@pytest.mark.parametrize(
    ("json", "content"),
    [
        (b'{"text": "a"}', "a"),
        (b'{"delta": {"role": "assistant"}}', ""),
        (b'{"delta": {"content": "a"}}', "a"),
        (b'{"delta": {"content": null, "reasoning_content": "a"}}', "a"),
        (b'{"delta": {"reasoning": "a"}}', "a"),
        (b'{"delta": {"tool_calls": [{"id": 1}]}}', '{"id": 1}'),
        (b'{"delta": {"tool_calls": []}, "finish_reason": "stop", "unknown": [1]}', ""),
    ],
)
def test_what_counts_as_content(json: bytes, content: str) -> None:
    payload = decode_payload(b'{"choices": [' + json + b'], "usage": null}')
    assert payload.choices[0].content() == content


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": [{"loc": ["body", "x"]}]}', '[{"loc":["body","x"]}]'),
        (b"<h1>Bad\n gateway</h1>", "<h1>Bad gateway</h1>"),
        (b"\xff", "\ufffd"),
    ],
)
def test_the_message_of_an_error(body: bytes, text: str) -> None:
    assert error_text(body) == text
