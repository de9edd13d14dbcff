"""What DistServe's authors published, to compare with.

"paper": Zhong et al., DistServe, OSDI 2024, Table 1 and the evaluation's figures. "article": the
authors' article of March 2024, whose chat objectives are tighter. All on A100-80G, 90 % attainment.
"""

from __future__ import annotations

from dataclasses import dataclass

from staffel.bench.presets import BLOG, PAPER
from staffel.config import SLO
from staffel.plan.candidates import Parallel


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model under one workload and SLO."""

    source: str
    model: str
    workload: str
    slo: SLO
    prefill: Parallel
    decode: Parallel
    vllm_tp: int
    rate_ratio: float
    """Goodput per GPU, DistServe's over vLLM's."""
    slo_ratio: float | None = None
    """How much tighter an SLO DistServe meets at the same rate."""
    per_gpu: float | None = None
    """Requests per second, of DistServe."""
    vllm_per_gpu: float | None = None

    @property
    def names(self) -> tuple[str, str, str]:
        """What it can be chosen by."""
        return self.source, self.model, self.workload

    @property
    def title(self) -> str:
        return f"{self.model} {self.workload}, {self.source}"

    def matches(self, beginning: str) -> bool:
        return any(name.startswith(beginning) for name in self.names)


_13B = {"model": "opt-13b", "prefill": Parallel(2, 1), "decode": Parallel(1, 1), "vllm_tp": 1}
_66B = {"model": "opt-66b", "prefill": Parallel(4, 1), "decode": Parallel(2, 2), "vllm_tp": 4}


def _row(source: str, task: str, shape: dict, ratio: float, *more: float | None) -> Published:
    presets, prefix = (PAPER, "paper") if source == "paper" else (BLOG, "blog")
    names = ("slo_ratio", "per_gpu", "vllm_per_gpu")
    return Published(
        source=source,
        workload=task,
        slo=presets[f"{prefix}:{shape['model']}-{task}"],
        rate_ratio=ratio,
        **shape,
        **dict(zip(names, more, strict=False)),
    )


ROWS = (
    _row("paper", "chatbot", _13B, 4.6, 1.74, 2.30, 0.50),
    _row("paper", "chatbot", _66B, 2.75, 3.14, 0.955, 0.347),
    _row("paper", "code", _66B, 5.72, 1.35, 1.14, 0.20),
    _row("paper", "summarization", _66B, 4.24, 12.59, 0.53, 0.125),
    _row("article", "chatbot", _13B, 2.0),
    _row("article", "chatbot", _66B, 3.41),
    _row("article", "code", _66B, 3.2, 1.5),
    _row("article", "summarization", _66B, 4.48, 10.2),
)
"""Those of OPT-175B are missing: the authors published no step times for it."""

TOY_SLO = SLO(ttft=0.4, tpot=0.04)
TOY_ALONE = (SLO(ttft=0.4), SLO(tpot=0.04))
"""What bounds each phase by itself."""
TOY_WORKLOAD = "fixed:512,64"
TOY = {"colocated": 1.6, "prefill only": 5.6, "decode only": 10.0, "2P1D": 3.3}
"""The article's example: OPT-13B, one A100 an instance, requests per second and GPU."""
