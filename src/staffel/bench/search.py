"""Which rate to probe next, and what all probes together say of the goodput."""

from __future__ import annotations

import math
from dataclasses import dataclass

from staffel.bench.fit import Point, goodput
from staffel.bench.judge import second_half
from staffel.bench.results import Interval, Probe
from staffel.bench.stats import Evidence, evidence, together
from staffel.bench.steady import MIN_REQUESTS, TURNOVERS, residence, too_short
from staffel.config import SLO, ConfigError

PRECISION = 0.05
_NOTHING_USED = "no goodput: no probe measured well and was in steady state"
CLIMB = 3.0
"""Factor upwards while nothing misses: overshooting is cheap, since overload shows within seconds,
and low rates take long."""
DESCEND = 2.0
CLOSE = 1.5
"""Bisection ends once the bracket's upper end is at most so many times the lower one."""
STEP = 1.15
"""Factor between the neighbouring rates at which the estimate is refined."""
BRACKET_SHARE, REFINE_SHARE = 1 / 20, 1 / 10
"""Usual longest probe, as a share of the budget."""
SPARE = 1.6
"""Requests sent for each one needed: their number is random, and not all count."""
REFINE_REQUESTS = 200
"""Fewer in a probe that refines wouldn't show how they hang together, and so be too sure."""
PLENTY = 2000
"""Requests near the goodput that make the interval trustworthy."""
LONGER = 2.0
"""A probe that was too short is made again, once, so many times as long. If that doesn't do,
requests don't get through, and its rate is taken for a ceiling."""
FENCE = 4.0
"""How far from the estimate a rate is looked for that is surely too high, or low enough."""
IDLE = 0.2
"""Mean requests in flight below which a server is as good as unloaded."""


@dataclass(frozen=True)
class ProbePlan:
    """What to run next."""

    rate: float
    """Requests per second."""
    max_seconds: float
    """How long to send for, at most."""
    early: bool
    """Whether it may end as soon as the judge has a verdict. A probe near the goodput runs to its
    end: one that stops when it looks good looks better than it is."""


@dataclass(frozen=True)
class _Seen:
    """A probe as the search sees it."""

    probe: Probe
    point: Point
    tells: bool
    """Whether its attainment is used: not that of a run that only looks good because its backlog
    hadn't grown enough, nor one that was too short or that the load generator spoiled."""

    @property
    def rate(self) -> float:
        return self.probe.rate

    @property
    def short(self) -> bool:
        """Whether it says nothing, and a longer one may."""
        if self.tells or self.probe.verdict == "below" or not self.probe.generator.kept_up:
            return False
        start, end = self.probe.window
        return too_short(self.probe.counted(), end - start) is not None

    @property
    def settled(self) -> bool:
        """Whether it was long enough to have a part with the usual load."""
        return len(self.probe.counted()) >= MIN_REQUESTS

    @property
    def seconds(self) -> float:
        """How long requests were sent."""
        records = self.probe.records
        return records[-1].scheduled if records else 0.0

    @property
    def took(self) -> float:
        """Median seconds that a request took; 0 or infinite where it can't be said."""
        return residence(self.probe.counted() or self.probe.records)


class GoodputSearch:
    """Brackets the goodput, bisects, then probes close to it until its interval is narrow enough.

    It decides and nothing else: the driver asks for the next probe, runs it and adds it, until
    there is no next one. All times are seconds on one clock, the driver's.
    """

    def __init__(
        self,
        target: float,
        slo: SLO,
        start_rate: float,
        budget_s: float,
        *,
        precision: float = PRECISION,
        max_rate: float = math.inf,
    ) -> None:
        """
        Args:
            target: attainment asked for, 0 to 1.
            start_rate: first rate, requests per second.
            budget_s: seconds for the whole search.
            precision: half the width of the interval that is narrow enough, as a share of the
                goodput.
            max_rate: never go above it.

        Raises:
            ConfigError: an argument out of range.
        """
        _check(target, start_rate, budget_s, precision, max_rate)
        self._target = target
        self._slo = slo
        self._start = start_rate
        self._budget = budget_s
        self._precision = precision
        self._max_rate = max_rate
        self._deadline: float | None = None
        self._seen: list[_Seen] = []
        self._anchor: float | None = None
        self._fit = Interval(math.inf, 0.0, math.inf)

    def next_probe(self, now: float) -> ProbePlan | None:
        """The next probe; None when the search is over. The first call starts the budget."""
        if self._deadline is None:
            self._deadline = now + self._budget
        if self._over():
            return None
        rate, refines = self._next_rate()
        return self._plan(min(rate, self._max_rate), refines, self._deadline - now)

    def add(self, probe: Probe) -> None:
        """What became of a probe. Its verdict and attainment are taken as the driver set them."""
        share, tells = self._reading(probe)
        self._seen.append(_Seen(probe, Point(probe.rate, share), tells=tells))
        self._fit = goodput((seen.point for seen in self._seen if seen.tells), self._target)

    def _reading(self, probe: Probe) -> tuple[Evidence, bool]:
        """What a probe says of its rate, and whether that is used."""
        counted = probe.counted()
        share = evidence(counted, self._slo)
        few, below = len(counted) < MIN_REQUESTS, probe.verdict == "below"
        if few and below:  # nothing has settled, and it is too high all the same
            late = second_half(probe.records, self._slo)
            share = late if late.requests else share
        doubtful = (few and not below) or (probe.unsteady and share.share >= self._target)
        return share, probe.generator.kept_up and not doubtful

    def result(self) -> tuple[Interval | None, list[str]]:
        """The goodput in requests per second, and what the user should know about it.

        None where it isn't to be had; the notes then say why.
        """
        value, low, high = self._fit.value, self._fit.low, self._fit.high
        if not self._seen:
            return None, [self._too_short()]
        if not self._rates:
            return None, [_NOTHING_USED, *self._doubts()]
        if value == 0:
            return None, [self._never_met(), *self._doubts()]
        if math.isinf(high):
            return None, [self._never_missed(low), *self._doubts()]
        return self._fit, [*self._width(), *self._few(), *self._doubts()]

    @property
    def _rates(self) -> list[float]:
        """Those whose attainment is used, rising."""
        return sorted(seen.rate for seen in self._seen if seen.tells)

    @property
    def _ceiling(self) -> _Seen | None:
        """The lowest probe, above all whose attainment is used, that set a limit all the same."""
        top = max(self._rates, default=0.0)
        unused = (seen for seen in self._seen if not seen.tells and seen.rate > top)
        return min(unused, key=lambda seen: seen.rate, default=None)

    def _next_rate(self) -> tuple[float, bool]:
        """The rate, and whether it refines (else it brackets)."""
        rates, value = self._rates, self._fit.value
        if not self._seen:
            return self._start, False
        last = self._seen[-1]
        if last.short and self._shorts(last.rate) == 1:
            return last.rate, False  # by now it is known how long a request takes
        if not rates or value == 0:
            return min(seen.rate for seen in self._seen) / DESCEND, False
        if math.isinf(value):
            return self._climb(rates[-1]), False
        return self._between(rates, value)

    def _climb(self, top: float) -> float:
        ceiling = self._ceiling
        return top * CLIMB if ceiling is None else math.sqrt(top * ceiling.rate)

    def _between(self, rates: list[float], value: float) -> tuple[float, bool]:
        """The fit crosses the target: make sure of both ends, come closer, refine."""
        if math.isinf(self._fit.high) and rates[-1] < FENCE * value:
            return rates[-1] * CLOSE, False
        if self._fit.low == 0 and self._promising(rates[0]):
            return rates[0], False
        if self._fit.low == 0 and rates[0] > value / FENCE:
            return rates[0] / CLOSE, False
        below = max((rate for rate in rates if rate <= value), default=rates[0])
        above = min((rate for rate in rates if rate > value), default=rates[-1])
        if above > below * CLOSE:
            return math.sqrt(below * above), False
        return min(self._cell(), key=self._known_at), True

    def _promising(self, rate: float) -> bool:
        """Whether more of a rate will soon show that it is good: sooner than a lower one, at which
        requests take longer to come."""
        parts = [s.point.evidence for s in self._seen if s.tells and s.rate == rate]
        known = together(parts)
        return known.requests < REFINE_REQUESTS and known.share >= (1 + self._target) / 2

    def _cell(self) -> tuple[float, float]:
        """The two rates of the grid around the estimate.

        A grid, so that probes gather at few rates: many rates with a little at each leave the
        fit free to follow the noise. Its first cell has the first estimate in its middle.
        """
        value = self._fit.value
        if self._anchor is None:
            self._anchor = value / math.sqrt(STEP)
        cell = math.floor(math.log(value / self._anchor, STEP))
        return self._anchor * STEP**cell, self._anchor * STEP ** (cell + 1)

    def _known_at(self, rate: float) -> float:
        """Effective requests at this rate."""
        return sum(s.point.evidence.effective for s in self._seen if s.tells and s.rate == rate)

    def _plan(self, rate: float, refines: bool, left: float) -> ProbePlan | None:
        need = self._need(rate)
        if need > left:
            return None
        usual = self._budget * BRACKET_SHARE
        if refines:
            usual = max(self._budget * REFINE_SHARE, REFINE_REQUESTS / rate)
        seconds = min(max(usual, need), left)
        if left - seconds < need:  # too little for one more
            seconds = left
        return ProbePlan(rate, seconds, early=not refines)

    def _need(self, rate: float) -> float:
        """Seconds that a probe takes to tell anything: enough requests, and long enough.

        The time that a request takes is added for warm-up and cool-down, three times.
        """
        took = self._took(rate)
        need = max(SPARE * MIN_REQUESTS / rate, TURNOVERS * took) + 3 * took
        short = (seen.seconds for seen in self._seen if seen.rate == rate and seen.short)
        return max(need, LONGER * max(short, default=0.0))

    def _shorts(self, rate: float) -> int:
        return sum(seen.short for seen in self._seen if seen.rate == rate)

    def _took(self, rate: float) -> float:
        """Seconds that a request took at the rate next to this one; 0: not known.

        Of an overloaded server that is how long the run was, and says nothing of lower rates.
        """
        known = [seen for seen in self._seen if 0 < seen.took < math.inf]
        known = [seen for seen in known if seen.tells and seen.settled] or known
        nearest = min(known, key=lambda seen: abs(math.log(seen.rate / rate)), default=None)
        return 0.0 if nearest is None else nearest.took

    def _over(self) -> bool:
        return bool(self._seen) and (
            self._hopeless() or self._at_limit() or (self._narrow() and self._settled())
        )

    def _hopeless(self) -> bool:
        """An all but idle server missed: at lower rates it does so too."""
        last = self._seen[-1].probe
        length = last.window[1] - last.window[0]
        took = [(r.ended or math.inf) - r.scheduled for r in last.counted()]
        return last.verdict == "below" and bool(took) and sum(took) < IDLE * length

    def _at_limit(self) -> bool:
        """Good at the highest rate allowed, or close to one that can't be sent."""
        rates, ceiling = self._rates, self._ceiling
        if not rates or not math.isinf(self._fit.value):
            return False
        if rates[-1] >= self._max_rate:
            return True
        if ceiling is None or ceiling.probe.generator.kept_up:
            return False
        return ceiling.rate <= rates[-1] * CLOSE

    def _settled(self) -> bool:
        """Both sides of the estimate were probed to their end, not only by early ones."""
        return self._anchor is not None and all(self._known_at(rate) for rate in self._cell())

    def _narrow(self) -> bool:
        value, low, high = self._fit.value, self._fit.low, self._fit.high
        return 0 < value < math.inf and high - low <= 2 * self._precision * value

    def _too_short(self) -> str:
        return (
            f"the budget of {self._budget:.3g} s is too short for one probe: {MIN_REQUESTS} "
            f"requests at {self._start:.3g}/s take longer; give a longer one or a higher first rate"
        )

    def _never_met(self) -> str:
        lowest = min((s.point for s in self._seen if s.tells), key=lambda point: point.rate)
        return (
            f"no goodput: even at {lowest.rate:.3g} requests/s only "
            f"{lowest.evidence.share:.1%} met the SLO, and {self._target:.4g} is asked for"
        )

    def _never_missed(self, low: float) -> str:
        """No upper end: every rate met the target, or none was surely too high."""
        least, most = min(low, self._rates[-1]), max(seen.rate for seen in self._seen)
        if least <= 0:
            return f"no goodput: no rate up to {most:.3g} was surely too high, or surely low enough"
        return (
            f"the goodput is at least {least:.3g} requests/s; no rate up to {most:.3g} was surely "
            "too high"
        )

    def _width(self) -> list[str]:
        if self._narrow():
            return []
        value, low, high = self._fit.value, self._fit.low, self._fit.high
        return [
            f"the interval is wide: {low / value - 1:+.0%} to {high / value - 1:+.0%} where "
            f"±{self._precision:.0%} was asked for; a longer budget narrows it"
        ]

    def _few(self) -> list[str]:
        """Few requests near the goodput can't show for how long a queue remembers."""
        near = (s.point for s in self._seen if s.tells)
        value = self._fit.value
        number = sum(p.evidence.requests for p in near if value / CLOSE < p.rate < value * CLOSE)
        if number >= PLENTY:
            return []
        return [
            f"only {number} requests were measured near the goodput; with fewer than {PLENTY} the "
            "interval may be too narrow"
        ]

    def _doubts(self) -> list[str]:
        """Probes that weren't used, and why."""
        unused = sorted((s.probe for s in self._seen if not s.tells), key=lambda probe: probe.rate)
        return [f"not used: {probe.rate:.3g} requests/s, {_why_not(probe)}" for probe in unused]


def _why_not(probe: Probe) -> str:
    if not probe.generator.kept_up:
        return "the load generator could not keep up"
    return f"not in steady state: {probe.unsteady}"


def _check(
    target: float, start_rate: float, budget_s: float, precision: float, max_rate: float
) -> None:
    if not 0 < target < 1:
        raise ConfigError("--attainment: must lie between 0 and 1, like 0.9")
    if not 0 < precision < 1:
        raise ConfigError("--precision: must lie between 0 and 1, like 0.05")
    for name, value in (("start rate", start_rate), ("--budget", budget_s)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}: must be a number above 0")
    if not max_rate >= start_rate:
        raise ConfigError("max rate: must be at least the start rate")
