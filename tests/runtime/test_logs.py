"""Logging never waits for whoever reads stderr."""

from __future__ import annotations

import json
import logging
import os
import time

import pytest

from staffel.runtime.logs import JsonFormatter, OncePerSecond, WaitlessHandler

LINE = "x" * 1000


def logger_to(descriptor: int, kept: int) -> tuple[logging.Logger, WaitlessHandler]:
    handler = WaitlessHandler(descriptor, kept)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, handler


def test_a_pipe_that_nobody_reads_costs_lines_and_no_time() -> None:
    reading, writing = os.pipe()
    logger, handler = logger_to(writing, kept=50)
    began = time.monotonic()
    for _ in range(1000):
        logger.error(LINE)
    assert time.monotonic() - began < 5
    assert 700 < handler.dropped < 1000
    began = time.monotonic()
    handler.close()
    assert time.monotonic() - began < 5, "the end of the process waits for ever"
    os.close(reading)


def test_what_was_dropped_is_said_once_somebody_reads() -> None:
    reading, writing = os.pipe()
    logger, handler = logger_to(writing, kept=10)
    for _ in range(200):
        logger.error(LINE)
    dropped, told, lines = handler.dropped, 0, 0
    with os.fdopen(reading) as pipe:
        while told < dropped:
            entry = json.loads(pipe.readline())
            told += entry.get("dropped", 0)
            lines += "dropped" not in entry
        assert told == dropped
        logger.error("the next one")
        while "the next one" not in pipe.readline():
            lines += 1
        handler.close()
    assert lines + dropped == 200


def test_the_last_lines_are_written() -> None:
    reading, writing = os.pipe()
    logger, handler = logger_to(writing, kept=1000)
    for number in range(50):
        logger.error("line %d", number)
    handler.close()
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert [json.loads(line)["message"] for line in lines] == [f"line {n}" for n in range(50)]


def test_a_full_disk_is_no_error() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    logger, handler = logger_to(descriptor, kept=100)
    logger.error(LINE)
    handler.close()
    assert handler.dropped


@pytest.mark.parametrize(("name", "passed"), [("uvicorn.error", 2), ("staffel.request", 6)])
def test_what_anybody_can_cause_is_said_once_a_second(name: str, passed: int) -> None:
    sieve, through = OncePerSecond(), []
    for moment in (0.0, 0.1, 0.2, 0.9, 1.1, 1.2):
        record = logging.LogRecord(name, logging.WARNING, "", 0, "bad\nwith a number", None, None)
        record.created = 100 + moment
        if sieve.filter(record):
            through.append(getattr(record, "fields", {}))
    assert len(through) == passed
    assert through[-1] == ({"left_out": 3} if passed == 2 else {})
