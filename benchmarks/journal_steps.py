"""What a journal of `staffel serve --record` says of the live shell: each step, and its costs.

    python benchmarks/journal_steps.py JOURNAL [--profile FILE]

Prints what the shell adds to the executor's steps. With a profile: by phase, how long the steps
really took, as a multiple of what the profile expects of them (its slowdown left out).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import msgspec

from staffel.control.journal import Entry
from staffel.control.messages import Batch, Report
from staffel.latency.model import Work, pairs, phase_of
from staffel.latency.profile import Profile
from staffel.terminal import print_table


class Step(NamedTuple):
    """One step of an instance. Times are nanoseconds."""

    core: str
    begin: int
    end: int
    work: Work
    reads: int
    """Blocks of KV that it copied."""


@dataclass
class Seen:
    """What a journal tells."""

    steps: list[Step] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """When they ended, and nanoseconds from a step's end to the next one's beginning, of instances
    that have work."""
    messages: list[int] = field(default_factory=list)
    """Nanoseconds from a step's end to the router's knowing of it."""
    submitted: list[int] = field(default_factory=list)
    """When the router got each request."""
    first_tokens: dict[str, int] = field(default_factory=dict)
    """By request: nanoseconds from there to its first token's reaching the router."""


class Tracker:
    """Follows one engine through its calls."""

    def __init__(self, core: str, seen: Seen) -> None:
        self._core = core
        self._seen = seen
        self._known: dict[int, int] = {}
        """Tokens of the sequence in each slot."""
        self._open: tuple[int, Work, int] | None = None
        self.ended: int | None = None

    def schedule(self, now: int, batch: Batch | None) -> None:
        if batch is not None and self.ended is not None:
            self._seen.gaps.append((now, now - self.ended))
        self.ended = None
        if batch is not None:
            reads = sum(len(chunk.blocks) for chunk in batch.reads)
            self._open = (now, self._work(batch), reads)

    def commit(self, now: int) -> None:
        assert self._open is not None
        begin, work, reads = self._open
        self._seen.steps.append(Step(self._core, begin, now, work, reads))
        self.ended = now

    def _work(self, batch: Batch) -> Work:
        for enter in batch.enters:
            self._known[enter.slot] = len(enter.ids)
        context = sum(self._known[slot] for slot in batch.decodes)
        work = Work(
            prompt_tokens=sum(row.count for row in batch.rows),
            prompt_pairs=sum(pairs(row.count, row.start) for row in batch.rows),
            prompts=len(batch.rows),
            decodes=len(batch.decodes),
            decode_context=context,
        )
        for slot in (*batch.decodes, *(row.slot for row in batch.rows if row.sample)):
            self._known[slot] += 1
        return work


def read(lines: Iterable[bytes]) -> Seen:
    """Raises msgspec.DecodeError where a line is not a journal's."""
    seen = Seen()
    trackers: dict[str, Tracker] = {}
    reported: dict[tuple[str, int], int] = {}
    began: dict[str, int] = {}
    for entry in _entries(lines):
        if entry.call == "engine":
            trackers[entry.core] = Tracker(entry.core, seen)
        elif entry.core in trackers:
            _follow(trackers[entry.core], entry, reported)
        elif entry.call == "submit":
            request, now = msgspec.json.decode(entry.arguments)
            began[request["id"]] = now
            seen.submitted.append(now)
        elif entry.call == "receive":
            _note_report(seen, entry, reported, began)
    return seen


def _entries(lines: Iterable[bytes]) -> Iterator[Entry]:
    decoder = msgspec.json.Decoder(Entry)
    return (decoder.decode(line) for line in lines)


def _follow(tracker: Tracker, entry: Entry, reported: dict[tuple[str, int], int]) -> None:
    if entry.call == "schedule":
        (now,) = msgspec.json.decode(entry.arguments)
        tracker.schedule(now, msgspec.json.decode(entry.returned, type=Batch | None))
    elif entry.call == "commit":
        tracker.commit(msgspec.json.decode(entry.arguments)[-1])
    elif entry.call == "report" and tracker.ended is not None:
        report = msgspec.json.decode(entry.returned, type=Report | None)
        if report is not None:
            reported[report.instance, report.number] = tracker.ended


def _note_report(
    seen: Seen, entry: Entry, reported: dict[tuple[str, int], int], began: dict[str, int]
) -> None:
    report, now = msgspec.json.decode(entry.arguments, type=tuple[Report, int])
    sent = reported.pop((report.instance, report.number), None)
    if sent is not None:
        seen.messages.append(now - sent)
    returned: dict[str, Any] = msgspec.json.decode(entry.returned)
    for news in returned["news"]:
        if news["type"] == "Delta" and news["index"] == 0:
            request = news["request"]
            seen.first_tokens.setdefault(request, now - began[request])


def shell_table(seen: Seen) -> list[list[str]]:
    rows = [["ms", "P10", "P50", "P90"]]
    for name, sample in (
        ("between steps", [gap for _, gap in seen.gaps]),
        ("step to router", seen.messages),
    ):
        rows.append([name, *(f"{value / 1e6:.2f}" for value in _spread(sample))])
    return rows


def step_table(seen: Seen, profile: Profile) -> list[list[str]]:
    ratios: dict[str, list[float]] = defaultdict(list)
    model = profile.for_tp(1)
    for step in seen.steps:
        if step.work.decodes or step.work.prompts:
            expected = model.step_seconds(step.work)
            ratios[phase_of(step.work)].append((step.end - step.begin) / 1e9 / expected)
    rows = [["really / expected", "steps", "P10", "P50", "P90"]]
    for phase, found in sorted(ratios.items()):
        rows.append([phase, str(len(found)), *(f"{value:.2f}" for value in _spread(found))])
    return rows


def _spread(sample: list[Any]) -> list[float]:
    """Tenth, half and nine tenths of it."""
    if len(sample) < 2:
        return [float(value) for value in sample * 3][:3] or [float("nan")] * 3
    cuts = quantiles(sample, n=10)
    return [cuts[0], median(sample), cuts[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journal", type=Path)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    with options.journal.open("rb") as lines:
        seen = read(lines)
    print_table(shell_table(seen))
    if options.profile is not None:
        print_table(step_table(seen, Profile.load(options.profile)))


if __name__ == "__main__":
    main()
