"""What a server counts, in Prometheus' text format at /metrics. Times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TIMES_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
GAUGES = {
    "running": "Requests in the current batch.",
    "waiting": "Requests that wait to be admitted.",
    "lanes": "Versions resident.",
    "kv_blocks": "KV cache blocks of the newest version.",
    "kv_blocks_free": "KV cache blocks that could be handed out.",
}
COUNTERS = {
    "preemptions": "Requests put back for want of KV cache blocks.",
    "steps": "Engine steps run.",
    "prompt_tokens": "Prompt tokens computed, cached ones apart.",
    "cached_tokens": "Prompt tokens found in the prefix cache.",
    "generated_tokens": "Tokens generated.",
    "drafted_tokens": "Tokens guessed and verified in a step.",
    "accepted_tokens": "Tokens guessed right.",
    "host_restarts": "Engine hosts started again after they ended.",
}


class EngineCollector(Collector):
    """Reads the engine's own counts when it is asked, not at every step."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"polymorph_{name}", text, value=stats.get(name, 0))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"polymorph_{name}", text, value=stats.get(name, 0))


class Metrics:
    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(stats))
        self.requests = self._counter("requests", "Requests answered, by status.", ["status"])
        self.swaps = self._counter("swaps", "Hot swaps, by outcome.", ["outcome"])
        self.ttft = Histogram("polymorph_ttft_seconds", "Time to first token.", buckets=TIMES_S, registry=self.registry)
        self.e2el = Histogram("polymorph_e2el_seconds", "End-to-end latency.", buckets=TIMES_S, registry=self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"polymorph_{name}", text, labels, registry=self.registry)

    def text(self) -> bytes:
        return generate_latest(self.registry)
