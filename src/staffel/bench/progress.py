"""The line that says how a measurement is going."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status

from staffel.bench.measure import Watch
from staffel.bench.results import Probe
from staffel.bench.summary import percentile, values


class Progress:
    """A live line on a terminal; nothing elsewhere, where it would fill a file."""

    def __init__(self, console: Console, *, shown: bool) -> None:
        self._status = Status("starting", console=console) if shown else None
        if self._status is not None and console.is_terminal:
            self._status.start()

    def show(self, watch: Watch) -> None:
        if self._status is not None:
            self._status.update(line(watch))

    def tell(self, probe: Probe) -> None:
        if self._status is not None:
            self._status.console.print(verdict_line(probe), markup=False, highlight=False)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


def line(watch: Watch) -> str:
    """Elapsed, sent, in flight, done, failed, and attainment and P90s so far."""
    counts, records = watch.counts, watch.records
    met = sum(not record.missed(watch.slo) for record in records)
    share = f"{met / len(records):.0%}" if records else "-"
    last = watch.plan[-1][0]
    return (
        f"{watch.rate:.3g} req/s: {max(watch.elapsed, 0):.0f} of {last:.0f} s, {counts.sent} sent, "
        f"{counts.in_flight} in flight, {counts.done} done, {counts.failed} failed; "
        f"met {share}, P90 TTFT {_ms(values(records, 'ttft'))}, TPOT {_ms(values(records, 'tpot'))}"
    )


def verdict_line(probe: Probe) -> str:
    """What a probe found."""
    share = probe.attainment
    doubt = f" ({probe.unsteady})" if probe.unsteady else ""
    return (
        f"{probe.rate:.3g} req/s: {share.value:.1%} met the SLO ({share.low:.1%} to "
        f"{share.high:.1%}), {len(probe.counted())} requests, {probe.verdict}{doubt}"
    )


def _ms(sample: list[float]) -> str:
    found = percentile(sample, 90)
    return "-" if found is None else f"{1e3 * found:.0f} ms"
