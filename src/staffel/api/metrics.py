"""Prometheus metrics of one app, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from staffel.api.engine import Engine, InstanceStatus

_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)
_TOKEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 1, 5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)


class Metrics:
    """What requests observe; instances are read from the engine when somebody scrapes."""

    def __init__(self, engine: Engine, dropped_lines: Callable[[], int]) -> None:
        """`dropped_lines` counts the log lines that could not be written."""
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "staffel_requests",
            "Client requests that are over, by endpoint, HTTP status (499: the client left) "
            "and finish reason.",
            ["endpoint", "status", "finish"],
            registry=registry,
        )
        self.ttft = Histogram(
            "staffel_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST,
            registry=registry,
        )
        self.tpot = Histogram(
            "staffel_time_per_output_token_seconds",
            "(last - first token time) / (tokens - 1) of a choice.",
            buckets=_TOKEN,
            registry=registry,
        )
        self.itl = Histogram(
            "staffel_inter_token_latency_seconds",
            "Gap between consecutive tokens of a choice.",
            buckets=_TOKEN,
            registry=registry,
        )
        self.e2e = Histogram(
            "staffel_e2e_latency_seconds",
            "From a request's arrival to its last token; complete requests only.",
            buckets=_WHOLE,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "staffel_prompt_tokens", "Prompt tokens of requests that are over.", registry=registry
        )
        self.cached_tokens = Counter(
            "staffel_cached_prompt_tokens",
            "Of the prompt tokens, those found in a prefix cache.",
            registry=registry,
        )
        self.output_tokens = Counter(
            "staffel_output_tokens", "Output tokens of requests that are over.", registry=registry
        )
        ProcessCollector(registry=registry)
        registry.register(_Instances(engine))
        registry.register(_Log(dropped_lines))


class _Instances:
    """Gauges of the instances, fresh at every scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        instances = self._engine.status()
        yield GaugeMetricFamily("staffel_up", "The server process answers.", 1)
        yield GaugeMetricFamily(
            "staffel_ready", "Requests are taken.", int(self._engine.state() == "ready")
        )
        yield GaugeMetricFamily(
            "staffel_queued", "Requests that wait in the router.", self._engine.queued
        )
        yield _per_instance("staffel_instance_ready", "The instance serves.", instances, "ready")
        yield _per_instance(
            "staffel_instance_restarts",
            "Starts after the first one.",
            instances,
            "restarts",
            CounterMetricFamily,
        )
        for field, text in (
            ("running", "Sequences in the batch."),
            ("waiting", "Sequences that wait for their turn."),
            ("pinned", "Prefilled sequences that wait to be handed over."),
        ):
            yield _per_instance(f"staffel_instance_{field}", text, instances, field)
        yield _blocks(instances)
        for field, text in (
            ("preemptions", "Sequences that had to go for want of blocks."),
            ("started", "Dispatches that ran here."),
            ("copied_bytes", "Of KV, read from other instances."),
            ("copied_seconds", "That copying took; copied_bytes over it is the speed."),
        ):
            yield _per_instance(
                f"staffel_instance_{field}", text, instances, field, CounterMetricFamily
            )

    def describe(self) -> list[Metric]:
        return []


class _Log:
    """The server's own log, which nobody may be reading."""

    def __init__(self, dropped_lines: Callable[[], int]) -> None:
        self._dropped_lines = dropped_lines

    def collect(self) -> Iterator[Metric]:
        text = "Log lines of the server that could not be written."
        yield CounterMetricFamily("staffel_log_lines_dropped", text, self._dropped_lines())

    def describe(self) -> list[Metric]:
        return []


_LABELS = ["instance", "role"]


def _per_instance(
    name: str,
    text: str,
    instances: Sequence[InstanceStatus],
    field: str,
    family: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    metric = family(name, text, labels=_LABELS)
    for status in instances:
        source = status if field in ("ready", "restarts") else status.load
        if source is not None:
            metric.add_metric([status.instance, status.role], float(getattr(source, field)))
    return metric


def _blocks(instances: Sequence[InstanceStatus]) -> Metric:
    metric = GaugeMetricFamily(
        "staffel_instance_blocks",
        "KV cache blocks: free (hold nothing), cached (kept for prefix hits), used.",
        labels=[*_LABELS, "state"],
    )
    for status in instances:
        if (load := status.load) is None:
            continue
        used = load.total_blocks - load.free_blocks - load.cached_blocks
        for state, count in (
            ("free", load.free_blocks),
            ("cached", load.cached_blocks),
            ("used", used),
        ):
            metric.add_metric([status.instance, status.role, state], count)
    return metric
