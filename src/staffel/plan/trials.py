"""What the search asks of the simulator: a goodput, or an attainment at a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from staffel.config import SLO
from staffel.sim.models import InstanceModel, LinkModel


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Instances under the workload that is planned for."""

    instances: tuple[InstanceModel, ...]
    link: LinkModel | None
    slo: SLO
    high: float
    """Requests per second that they can't serve for long, or about so; 0: none at all."""
    first_token_only: bool = False
    """Outputs are one token: prefill alone."""
    output_factor: float = 1.0
    """Outputs are longer by it."""


@dataclass(frozen=True)
class Seen:
    """A trial at one rate."""

    rate: float
    """Requests per second."""
    attainment: float
    ttft_met: float
    """Share of requests that met the TTFT bound."""
    tokens_per_second_per_user: float
    """1 / median TPOT."""
    output_tokens_per_second: float
    slo_scale: float
    """The smallest factor on all bounds that enough requests would still meet."""


class Simulator(Protocol):
    """Answers trials; equal ones get equal answers."""

    @property
    def width(self) -> int:
        """How many it computes at a time."""

    def goodputs(self, trials: Sequence[Trial]) -> list[float]:
        """Requests per second, one for each; 0 where no rate is low enough."""

    def at_rates(self, asked: Sequence[tuple[Trial, float]]) -> list[Seen]:
        """Each trial at its rate."""
