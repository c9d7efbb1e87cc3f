"""The shape of each answered request, appended to `records/<slug>.jsonl`, never its text. Torch-free.

One line for each attempt: a canary that failed has its own line with status 502, beside that of the stable version
which then answered.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from engine.api_metrics import TIMES_S
from engine.wire import RequestRecord


class Records:
    """Each line is one write at the file's end, so that a reader never sees half of one."""

    def __init__(self, data: Path) -> None:
        self._folder = Path(data) / "records"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._encode = msgspec.json.Encoder().encode
        self.registry = CollectorRegistry()
        labels = ["endpoint", "role", "version", "status"]
        self.requests = self._counter("gateway_requests", "Requests, by who answered them and how.", labels)
        self.tokens = self._counter("gateway_tokens", "Tokens, input and output apart.", ["endpoint", "kind"])
        self.retries = self._counter("gateway_retries", "Attempts that gave no answer.", ["endpoint", "role"])
        self.ttft = self._histogram("gateway_ttft_seconds", "Time to first token.")
        self.e2el = self._histogram("gateway_e2el_seconds", "End-to-end latency.")

    def add(self, record: RequestRecord) -> None:
        with (self._folder / f"{record.endpoint}.jsonl").open("ab", buffering=0) as file:
            file.write(self._encode(record) + b"\n")
        self.requests.labels(record.endpoint, record.role, record.version_id, str(record.status)).inc()
        self.tokens.labels(record.endpoint, "input").inc(record.isl)
        self.tokens.labels(record.endpoint, "output").inc(record.osl)
        if record.status == 200:
            self.ttft.labels(record.endpoint, record.role).observe(record.ttft_s)
            self.e2el.labels(record.endpoint, record.role).observe(record.e2el_s)

    def metrics(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"polymorph_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"polymorph_{name}", text, ["endpoint", "role"], buckets=TIMES_S, registry=self.registry)
