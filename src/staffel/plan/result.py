"""What is recommended and why: a verdict with its neighbours, and the file that `serve` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from staffel.config import SLO, ConfigError
from staffel.plan.candidates import Group, link_limit, nodes_needed
from staffel.plan.question import Alone, Found, Option, Question
from staffel.plan.together import place_trial
from staffel.plan.trials import Simulator

RATE_FACTORS = (0.8, 1.0, 1.2)
OUTPUT_FACTORS = (0.8, 1.2)
_MIB = 2**20
_CLOSE = 1.05
"""Placements whose goodputs differ by less than a simulation can tell."""


class Row(Struct, frozen=True, kw_only=True):
    """A placement in the table."""

    placement: str
    devices: int
    goodput: float
    """Requests per second."""
    per_device: float
    simulated: str
    """The unit that was simulated, and how often the placement repeats it."""


class Phase(Struct, frozen=True, kw_only=True):
    """One phase of one instance, alone."""

    role: str
    parallel: str
    devices: int
    goodput: float
    per_device: float


class Sensitivity(Struct, frozen=True, kw_only=True):
    """What becomes of the recommended placement when something else comes than was planned for."""

    attainment: dict[str, float]
    """By the rate's factor."""
    goodput: dict[str, float]
    """By the factor on output lengths; requests per second."""


class Plan(Struct, frozen=True, kw_only=True):
    """The answer of `staffel plan`."""

    model: str
    basis: str
    """Where step times come from."""
    workload: str
    slo: SLO
    target: float
    asked_rate: float | None
    recommended: Row
    runner_up: Row | None
    disaggregated: Row | None
    """The best one."""
    colocated: Row | None
    """The best one."""
    sensitivity: Sensitivity
    phases: list[Phase]
    simulated: int
    skipped: int
    notes: list[str]
    verdict: str
    yaml: str

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class Setting(Struct, frozen=True, kw_only=True):
    """What the answer repeats of how it was asked."""

    basis: str
    workload: str
    model: str
    """As `serve` takes it."""
    device_word: str = "GPU"
    serving: dict[str, Any] = {}
    """Fields of every instance in the placement's file."""
    assumptions: tuple[str, ...] = ()


def conclude(question: Question, found: Found, setting: Setting, simulator: Simulator) -> Plan:
    """Choose, and find out how the choice bears what wasn't planned for.

    Raises:
        ConfigError: nothing meets the SLO.
    """
    ranked = ranking(question, found)
    if not ranked:
        raise ConfigError(_nothing(question, found))
    best = ranked[0]
    notes = [*setting.assumptions, *_notes(question, best, setting.device_word)]
    verdict = _verdict(found, best, setting.device_word)
    return Plan(
        model=question.engines.model,
        basis=setting.basis,
        workload=setting.workload,
        slo=question.slo,
        target=question.attainment,
        asked_rate=question.rate,
        recommended=_row(best),
        runner_up=_row_or_none(_runner_up(ranked)),
        disaggregated=_row_or_none(next(iter(found.disaggregated), None)),
        colocated=_row_or_none(next(iter(found.colocated), None)),
        sensitivity=_sensitivity(question, best, simulator),
        phases=[*_phases("prefill", found.prefill), *_phases("decode", found.decode)],
        simulated=found.simulated,
        skipped=found.skipped,
        notes=notes,
        verdict=verdict,
        yaml=_yaml(question, best, setting, [verdict, *notes]),
    )


def ranking(question: Question, found: Found) -> list[Option]:
    """All placements, the best first."""
    options = [*found.disaggregated, *found.colocated]
    return sorted(options, key=lambda each: question.rank(each.goodput, each.devices))


def _runner_up(ranked: Sequence[Option]) -> Option | None:
    """The best one that isn't the same in another number."""
    return next((option for option in ranked if option.unit != ranked[0].unit), None)


# ---- words


def _verdict(found: Found, best: Option, device: str) -> str:
    others = found.disaggregated if best.unit.colocated else found.colocated
    chosen, other = (
        ("Don't disaggregate: colocated instances", "the best disaggregated placement")
        if best.unit.colocated
        else ("Disaggregate: prefill and decode apart", "the best colocated placement")
    )
    figure = f"{chosen} serve {best.per_device:.3g} requests/s per {device}"
    if not others:
        return f"{figure}; {other.replace('the best', 'no')} meets the SLO."
    rival = max(others, key=lambda option: option.per_device)
    ratio = best.per_device / rival.per_device
    close = "" if ratio >= _CLOSE else " (too close for a simulation to tell)"
    return f"{figure}, {ratio:.2f} times as many as {other}, {rival.unit}{close}."


def _nothing(question: Question, found: Found) -> str:
    reasons = []
    if not found.prefill:
        reasons.append("no prefill instance computes prompts in time")
    if not found.decode:
        reasons.append("no decode instance is fast enough")
    why = " and ".join(reasons) or "prefill and decode each could, but not together"
    share = f"{question.attainment:.0%}"
    return (
        f"--slo: no placement meets {question.slo} for {share} of the requests at any rate: {why}; "
        "loosen the SLO, or give faster hardware"
    )


def _notes(question: Question, best: Option, device: str) -> list[str]:
    notes = []
    if question.rate is not None and best.goodput < question.rate:
        notes.append(
            f"{question.rate:g} requests/s are more than this cluster serves: {best.goodput:.3g}"
        )
    spare = question.cluster.devices - best.devices
    if spare and question.rate is None:
        notes.append(f"{spare} of {question.cluster.devices} {device}s are left over")
    if not best.unit.colocated:
        notes.append(_handoffs(question, best))
    return notes


def _handoffs(question: Question, best: Option) -> str:
    """How much of the link between the phases the KV takes."""
    size = question.kv_bytes_per_request
    most = best.copies * link_limit(question.cluster, best.unit, size, within_node=best.within_node)
    where = "within nodes" if best.within_node else "between nodes"
    needed, link = best.goodput * size / 1e9, most * size / 1e9
    return (
        f"KV handoffs {where} need {needed:.3g} GB/s of the {link:.3g} GB/s there are "
        f"({size / 1e6:.3g} MB per request)"
    )


# ---- rows


def _row(option: Option) -> Row:
    return Row(
        placement=str(option.whole),
        devices=option.devices,
        goodput=option.goodput,
        per_device=option.per_device,
        simulated=f"{option.copies} x {option.unit.short()}",
    )


def _row_or_none(option: Option | None) -> Row | None:
    return None if option is None else _row(option)


def _phases(role: str, found: Sequence[Alone]) -> list[Phase]:
    return [
        Phase(
            role=role,
            parallel=str(alone.group.parallel),
            devices=alone.group.devices,
            goodput=alone.goodput,
            per_device=alone.per_device,
        )
        for alone in found
    ]


def _sensitivity(question: Question, best: Option, simulator: Simulator) -> Sensitivity:
    trial = place_trial(question, best.unit, best.unit_goodput, within_node=best.within_node)
    planned = (question.rate or best.goodput) / best.copies
    seen = simulator.at_rates([(trial, factor * planned) for factor in RATE_FACTORS])
    longer = [replace(trial, output_factor=factor) for factor in OUTPUT_FACTORS]
    goodputs = simulator.goodputs(longer)
    return Sensitivity(
        attainment={
            f"{factor:g}": each.attainment for factor, each in zip(RATE_FACTORS, seen, strict=True)
        },
        goodput={
            f"{factor:g}": best.copies * each
            for factor, each in zip(OUTPUT_FACTORS, goodputs, strict=True)
        },
    )


# ---- the placement's file


def _yaml(question: Question, best: Option, setting: Setting, comments: Sequence[str]) -> str:
    lines = [
        "# Written by `staffel plan`.",
        f"# For {setting.workload} with {question.slo} at {question.attainment:.0%}: "
        f"{best.goodput:.3g} requests/s on {best.devices} {setting.device_word}s.",
        f"# Step times: {setting.basis}.",
        *(f"# {comment}" for comment in comments),
        f"model: {_scalar(setting.model)}",
    ]
    hosts = nodes_needed(question.cluster, best.whole)
    if hosts > 1:
        lines.append(f"hosts: {hosts}")
    lines.append("instances:")
    lines += [_instance(question, group, setting.serving) for group in best.whole.groups]
    return "\n".join(lines) + "\n"


def _instance(question: Question, group: Group, serving: dict[str, Any]) -> str:
    engines = question.engines
    kv_bytes = engines.builds[group.parallel].kv_tokens * engines.kv_bytes_per_token
    fields: dict[str, Any] = {"role": group.role, "count": group.count}
    if group.devices > group.count:
        fields["parallel"] = {"tp": group.parallel.tp, "pp": group.parallel.pp}
    if group.role == "colocated":
        fields["policy"] = group.policy
    fields |= {
        "chunk_tokens": group.chunk_tokens,
        "max_sequences": engines.sequences(group.parallel),
        "kv_memory": f"{max(1, kv_bytes // _MIB)}MiB",
        "block_size": engines.block_size,
    }
    return f"  - {_flow(fields | serving)}"


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    return str(value)


def _scalar(text: str) -> str:
    """JSON's strings are YAML's."""
    return msgspec.json.encode(text).decode()
