"""SLOs that a published evaluation used, by name."""

from __future__ import annotations

from staffel.config import SLO, ConfigError

PAPER = {
    "paper:opt-13b-chatbot": SLO(ttft=0.25, tpot=0.1),
    "paper:opt-66b-chatbot": SLO(ttft=2.5, tpot=0.15),
    "paper:opt-175b-chatbot": SLO(ttft=4.0, tpot=0.2),
    "paper:opt-66b-code": SLO(ttft=0.125, tpot=0.2),
    "paper:opt-66b-summarization": SLO(ttft=15.0, tpot=0.15),
}
"""DistServe, OSDI 2024: ShareGPT, HumanEval and LongBench on A100-80G. Seconds."""

BLOG = {
    "blog:opt-13b-chatbot": SLO(ttft=0.2, tpot=0.1),
    "blog:opt-66b-chatbot": SLO(ttft=0.4, tpot=0.1),
    "blog:opt-66b-code": SLO(ttft=0.125, tpot=0.2),
    "blog:opt-66b-summarization": SLO(ttft=15.0, tpot=0.15),
}
"""The authors' article of 2024, which bounds chat more tightly. Seconds."""

PRESETS = PAPER | BLOG


def slo_preset(name: str) -> SLO:
    """The SLO of that name in PRESETS. Raises ConfigError with the names there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(
            f"--slo: no preset {name!r}; there are {', '.join(PRESETS)}, "
            "or write it like ttft=0.25,tpot=0.1"
        ) from None
