"""The reproduction of DistServe's evaluation in tables, beside what was published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from staffel.plan.published import TOY
from staffel.plan.reproduce import Interference, Reproduced, System

REASONS = (
    "chatbot's lengths follow another trace than ShareGPT's, scaled to the same averages: prompts "
    "have no long tail, so waiting behind a long prompt is rarer.",
    "summarization's prompts have 1,975 tokens on average where the paper reports 1,738.",
    "Scheduling is this project's: how prompts are batched, which instance gets a request, how KV "
    "is pulled and who is admitted to memory differ from the authors'.",
    "Memory bounds decode here, as the authors' own simulator has it not: by their table of KV "
    "capacities, one decode instance holds about 80 to 90 chat requests at a time (OPT-13B tp1, "
    "OPT-66B tp2 pp2), and so decodes fewer than 6 and 5 requests/s; published are 6.9 and 7.6.",
    "No batches with prompts and decoding sequences together were measured: chunked prefill is "
    "taken to read the weights once, and else to cost the sum.",
    "The article's example and its interference curve have step times of their own: by the "
    "coefficients, a prompt of 512 tokens takes 77 ms on DistServe's engine, so one instance alone "
    "prefills about 13 requests/s where the article has 5.6, and a decode step takes 22 ms where "
    "it has 7.5.",
)
"""Why figures differ from the published ones, as far as is known."""


def title(found: Reproduced) -> str:
    row = found.published
    return f"{row.title}: {row.slo}"


def table(found: Reproduced) -> list[list[str]]:
    head = ["", "placement", "requests/s and GPU", "over vLLM", "tightest SLO at vLLM's rate"]
    return [head, *(_cells(found, system) for system in found.systems), *_published(found)]


def _cells(found: Reproduced, system: System) -> list[str]:
    scale = "-" if system.slo_scale is None else f"{system.slo_scale:.2f} x"
    figures = [f"{system.per_gpu:.3g}", _times(found.ratio(system)), scale]
    return [system.name, str(system.unit), *figures]


def _times(ratio: float) -> str:
    return "-" if math.isinf(ratio) else f"{ratio:.2f}"


def _published(found: Reproduced) -> list[list[str]]:
    row = found.published
    scale = "-" if row.slo_ratio is None else f"{1 / row.slo_ratio:.2f} x"
    return [
        ["published: vLLM", f"tp{row.vllm_tp}", _figure(row.vllm_per_gpu), "1.00", "1.00 x"],
        ["published: DistServe", "as above", _figure(row.per_gpu), f"{row.rate_ratio:.2f}", scale],
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def difference(found: Reproduced) -> str:
    """By how much the published placement's ratio is off."""
    here = found.ratio(found.systems[2])
    published = found.published.rate_ratio
    if math.isinf(here):
        return f"vLLM, prefill first, meets this SLO at no rate here; published: {published:.2f}."
    return (
        f"DistServe as published over vLLM: {here:.2f} here, {published:.2f} published "
        f"({here / published - 1:+.0%})."
    )


def toy_table(example: dict[str, float]) -> list[list[str]]:
    rows = [
        [name, f"{value:.3g}", f"{TOY[name]:.3g}", f"{value / TOY[name] - 1:+.0%}"]
        for name, value in example.items()
    ]
    return [["", "here", "published", "difference"], *rows]


def interference_table(rows: Sequence[Interference]) -> list[list[str]]:
    head = ["prompt tokens", "step alone, ms", "with the prompt, ms", "times"]
    return [
        head,
        *(
            [
                str(row.prompt_tokens),
                f"{1e3 * row.alone:.1f}",
                f"{1e3 * row.beside:.1f}",
                f"{row.ratio:.1f}",
            ]
            for row in rows
        ),
        ["published: 128", "7.5", "14", "1.9; up to 12 for longer prompts"],
    ]


def save(
    path: Path,
    found: Sequence[Reproduced],
    example: dict[str, float],
    disturbed: Sequence[Interference],
) -> None:
    everything: dict[str, Any] = {
        "rows": [_as_json(each) for each in found],
        "toy": {"here": example, "published": TOY},
        "interference": disturbed,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=2) + b"\n")


def _as_json(found: Reproduced) -> dict[str, Any]:
    systems = [
        {
            "name": system.name,
            "placement": str(system.unit),
            "per_gpu": system.per_gpu,
            "slo_scale": system.slo_scale,
        }
        for system in found.systems
    ]
    return {"published": found.published, "systems": systems}
