"""What prompts do to the tokens of running streams: the experiment that disaggregation answers.

Streams decode steadily; while they do, prompts arrive one at a time. A gap between two tokens of
a stream counts as disturbed if a prompt was being computed in it (from its sending to its first
token), and as undisturbed if none was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from staffel.bench.load import run_load
from staffel.bench.measure import Subject
from staffel.bench.records import Record
from staffel.bench.results import Generator, Interference, Interval, Probe
from staffel.bench.unloaded import one_by_one
from staffel.bench.workload import Ask, Lengths
from staffel.config import ConfigError

SETTLE_S = 2.0
"""Undisturbed time before the first prompt and between two."""
ROOM = 3.0
"""A disturbed prompt may take so many times its unloaded TTFT before the next one comes."""
STREAM_PROMPT = 32
SPARE = 1.5

Span = tuple[float, float]


async def interference(
    subject: Subject, *, streams: int, lengths: Sequence[int], repeats: int
) -> tuple[list[Interference], Probe]:
    """Run the experiment: one row for each prompt length, and all requests.

    Raises:
        ConfigError: the streams can't last that long within the model's context.
    """
    prompts = [length for length in lengths for _ in range(repeats)]
    solo = await one_by_one(subject, subject.asks([Lengths(length, 1) for length in lengths]))
    alone = dict(zip(lengths, (record.ttft or 0.0 for record in solo), strict=True))
    plan = await _plan(subject, streams, prompts, alone)
    records: list[Record] = []
    generator = await run_load(subject.endpoint, plan, on_record=records.append)
    records.sort(key=lambda record: record.index)
    _check(records)
    running, disturbers = records[:streams], records[streams:]
    return list(_rows(running, disturbers, prompts)), _probe(records, generator)


async def _plan(
    subject: Subject, streams: int, prompts: Sequence[int], alone: dict[int, float]
) -> list[tuple[float, Ask]]:
    """The streams at once, long enough for all prompts; then the prompts, one at a time."""
    starts, at = [], 2 * SETTLE_S
    for length in prompts:
        starts.append(at)
        at += ROOM * alone[length] + SETTLE_S
    tokens = await _stream_tokens(subject, at)
    stream_asks = subject.asks([Lengths(STREAM_PROMPT, tokens)] * streams)
    prompt_asks = subject.asks([Lengths(length, 1) for length in prompts])
    return [(0.0, ask) for ask in stream_asks] + list(zip(starts, prompt_asks, strict=True))


async def _stream_tokens(subject: Subject, seconds: float) -> int:
    """Tokens that an unloaded stream takes that long for: a loaded one takes longer."""
    [record] = await one_by_one(subject, subject.asks([Lengths(STREAM_PROMPT, 32)]))
    tokens = int(SPARE * seconds / (record.tpot or seconds))
    limit = subject.endpoint.max_model_len
    if limit is not None and tokens + STREAM_PROMPT > limit:
        raise ConfigError(
            f"--lengths: the streams would need {tokens} tokens to outlast all prompts, and the "
            f"model's context is {limit}; give fewer or shorter prompts, or fewer --repeats"
        )
    return tokens


def _probe(records: list[Record], generator: Generator) -> Probe:
    """The requests as a probe; its rate and attainment mean nothing here."""
    last = records[-1].scheduled
    return Probe(
        rate=len(records) / last,
        window=(0.0, last + 1.0),
        records=records,
        attainment=Interval(1.0, 0.0, 1.0),
        throughput=len(records) / last,
        unsteady=None,
        verdict=None,
        generator=generator,
    )


def _check(records: Sequence[Record]) -> None:
    failed = [record for record in records if record.error is not None]
    if failed:
        raise ConfigError(f"URL: {len(failed)} requests failed: {failed[0].error}")


def _rows(
    running: Sequence[Record], disturbers: Sequence[Record], prompts: Sequence[int]
) -> Iterator[Interference]:
    spans = [(record.sent, record.chunks[0].at) for record in disturbers]
    # Until the last prompt only: gaps grow with the streams' length, and so would the yardstick.
    alone = [gap for at, gap in _gaps(running, spans, disturbed=False) if at < spans[-1][1]]
    for length in dict.fromkeys(prompts):
        mine = [span for span, prompt in zip(spans, prompts, strict=True) if prompt == length]
        during = [gap for _, gap in _gaps(running, mine, disturbed=True)]
        if not (alone and during):
            raise ConfigError("--repeats: too few tokens fell into the measured times; give more")
        worst = [max(gap for _, gap in _gaps(running, [span], disturbed=True)) for span in mine]
        yield Interference(
            prompt_tokens=length,
            streams=len(running),
            ttft=median(end - start for start, end in mine),
            itl_alone=fmean(alone),
            itl_during=fmean(during),
            itl_worst=median(worst),
        )


def _gaps(
    running: Sequence[Record], spans: Sequence[Span], *, disturbed: bool
) -> Iterator[tuple[float, float]]:
    """(end, gap per token) of the streams' gaps that overlap a span, or that overlap none."""
    for record in running:
        for before, chunk in zip(record.chunks, record.chunks[1:], strict=False):
            if chunk.tokens and _overlaps(before.at, chunk.at, spans) == disturbed:
                yield chunk.at, (chunk.at - before.at) / chunk.tokens


def _overlaps(start: float, end: float, spans: Sequence[Span]) -> bool:
    """Spans are in order and apart."""
    place = bisect_left(spans, (end,))
    return place > 0 and spans[place - 1][1] > start
