"""What is lost when processes are killed: the worker in mid-search, an engine host under load. On the real command."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.bench.figures import Figure
from tests.e2e.click_path import ask, stable_server
from tests.e2e.product import Product, running_product

CLIENTS, REQUESTS_EACH, TOKENS = 8, 4, 48
MEASURED_BEFORE_KILL = 3
BUDGET_MIN = 2.0
LIMIT_S = 600.0


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, running_product(Path(folder)) as product:
        wait_for(lambda: _serves(product), 90)
        return host_killed_under_load(product) + worker_killed_in_search(product)


def host_killed_under_load(product: Product) -> list[Figure]:
    clients = [Client(product) for _ in range(CLIENTS)]
    threads = [threading.Thread(target=c.run) for c in clients]
    for t in threads:
        t.start()
    wait_for(lambda: sum(c.chunks for c in clients) > CLIENTS, 60)
    killed = int(str(stable_server(product)["host_pid"]))
    os.kill(killed, signal.SIGKILL)
    start = time.perf_counter()
    ask(product)
    again = time.perf_counter() - start
    for t in threads:
        t.join()
    outcomes = [o for c in clients for o in c.outcomes]
    whole, clear = outcomes.count("answer"), outcomes.count("clear error")
    now = int(str(stable_server(product)["host_pid"]))
    return [
        Figure(
            "requests in flight or sent around the kill", len(outcomes), "requests", CLIENTS * REQUESTS_EACH, "equal"
        ),
        Figure("of those answered whole", whole, "requests"),
        Figure("of those given a clear error", clear, "requests"),
        Figure("of those left without either", len(outcomes) - whole - clear, "requests", 0, "equal"),
        Figure("answering again after kill -9 of the host", again, "s"),
        Figure("a new engine host serves", str(now not in (0, killed)), "", "True", "equal"),
    ]


@dataclass
class Client:
    """Streams answers one after another and says how each ended."""

    product: Product
    chunks: int = 0
    outcomes: list[str] = field(default_factory=list)

    def run(self) -> None:
        for i in range(REQUESTS_EACH):
            self.outcomes.append(self._one(i))

    def _one(self, i: int) -> str:
        body = {
            "model": "demo",
            "prompt": f"Number {i} of {id(self)}:",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        tokens, error, done = 0, "", False
        try:
            with httpx.stream("POST", f"{self.product.gateway}/v1/completions", json=body, timeout=120) as response:
                if response.status_code != 200:
                    response.read()
                    error = response.json()["error"]["message"]
                for line in response.iter_lines() if not error else ():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line[6:])
                        error = error or chunk.get("error", {}).get("message", "")
                        tokens += len(chunk.get("choices", []))
                        self.chunks += 1
        except httpx.HTTPError as problem:
            return f"broken: {problem!r}"
        if error:
            return "clear error"
        return "answer" if done and tokens else "cut short"


def worker_killed_in_search(product: Product) -> list[Figure]:
    run_id = _start_run(product)
    wait_for(lambda: len(_measured(product, run_id)) >= MEASURED_BEFORE_KILL, LIMIT_S)
    before = _measured(product, run_id)
    os.kill(_worker_pid(product), signal.SIGKILL)
    start = time.perf_counter()
    wait_for(lambda: _run(product, run_id)["attempt"] == 2, LIMIT_S)
    resumed = time.perf_counter() - start
    wait_for(lambda: _run(product, run_id)["state"] not in ("queued", "running"), LIMIT_S)
    after, row = _measured(product, run_id), _run(product, run_id)
    kept = sum(after.get(k) == v for k, v in before.items())
    return [
        Figure("experiments measured before kill -9 of the worker", len(before), "experiments"),
        Figure("of those kept as they were", kept, "experiments", len(before), "equal"),
        Figure("experiments in the end", len(after), "experiments", len(before), "at least"),
        Figure("another worker goes on after", resumed, "s"),
        Figure("how the run ended", row["state"], "", "succeeded", "equal"),
    ]


def _start_run(product: Product) -> str:
    code = (
        "from polymorph_web.endpoints.models import Endpoint; from polymorph_web.runs.services import start_run;"
        "e = Endpoint.objects.get(slug='demo');"
        f"print(start_run(e, e.created_by, dict(budget_minutes={BUDGET_MIN}, tolerance='near', foci=(), seed=0)).id)"
    )
    return product.manage("shell", "-v0", "-c", code).splitlines()[-1]


def _worker_pid(product: Product) -> int:
    """The process of this product's tree whose command line is the worker's."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"celery" in words and f"POLYMORPH_DATA={product.data}".encode() in environment:
            return int(path.name)
    raise AssertionError("no worker is running")


def _rows(product: Product, query: str, *values: Any) -> list[tuple[Any, ...]]:
    with sqlite3.connect(product.data / "db.sqlite3", timeout=20) as database:
        return database.execute(query, values).fetchall()


def _run(product: Product, run_id: str) -> dict[str, Any]:
    ((state, attempt),) = _rows(product, "select state, attempt from runs_run where id = ?", run_id.replace("-", ""))
    return {"state": state, "attempt": attempt}


def _measured(product: Product, run_id: str) -> dict[str, Any]:
    """Experiments with a ratio, by id."""
    query = "select key, payload from runs_runrecord where kind = 'experiment' and run_id = ?"
    rows = ((key, json.loads(payload)) for key, payload in _rows(product, query, run_id.replace("-", "")))
    return {key: payload for key, payload in rows if payload["ratio"] is not None}


def _serves(product: Product) -> bool:
    try:
        return stable_server(product)["state"] == "ready"
    except (httpx.HTTPError, OSError, KeyError, StopIteration):
        return False


def wait_for(true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(0.1)
