"""A `RunStore` in plain files, for the command line, in `<data>/runs/<run_id>/`.

    config.json lease.json report.json records.jsonl events.jsonl

Every write happens under the run's lock file, checks the lease, appends one line and is synced before it returns. A
line cut short by a kill is dropped on the next write, so numbers stay without gaps and nothing complete is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from optimizer.records import Candidate, Check, Estimate, Experiment, Post, Proposal, State, Verdict, clean, to_json
from optimizer.store import Lease, LeaseLost, RunState

KINDS: dict[str, type] = {
    "proposals": Proposal,
    "candidates": Candidate,
    "estimates": Estimate,
    "experiments": Experiment,
    "checks": Check,
    "posts": Post,
}
KEYS = {
    "proposals": ("id",),
    "candidates": ("artifact_hash",),
    "estimates": ("artifact_hash",),
    "experiments": ("id",),
    "checks": ("artifact_hash", "check", "case"),
    "posts": ("id",),
}


def worker_name() -> str:
    """This process, named so that another on the same machine can tell whether it still lives."""
    return f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"


class FileStore:
    def __init__(self, data_dir: Path) -> None:
        self.root = Path(data_dir).resolve() / "runs"
        self.root.mkdir(parents=True, exist_ok=True)

    def create(self, run_id: str, config: dict[str, Any]) -> None:
        """A new run, queued. Raises FileExistsError for an id that is taken."""
        folder = self.root / run_id
        folder.mkdir()
        _write(folder / "config.json", config)

    def cancel(self, run_id: str) -> None:
        """Asks the run's worker to stop."""
        (self._folder(run_id) / "cancel").touch()

    def claim(self, run_id: str, owner: str, ttl_s: float) -> Lease | None:
        with self._locked(run_id) as folder:
            held = _read(folder / "lease.json") or {"attempt": 0, "expires": 0.0, "owner": ""}
            if held.get("ended") or (held["expires"] > time.time() and not _gone(held["owner"])):
                return None
            lease = Lease(run_id, owner, held["attempt"] + 1, time.time() + ttl_s)
            _write(folder / "lease.json", asdict(lease))
            return lease

    def renew(self, lease: Lease, ttl_s: float) -> Lease:
        with self._held(lease) as folder:
            renewed = replace(lease, expires=time.time() + ttl_s)
            _write(folder / "lease.json", asdict(renewed))
            return renewed

    def finish(self, lease: Lease, outcome: str, reason: str = "") -> None:
        with self._held(lease) as folder:
            _append(folder / "records.jsonl", {"kind": "ended", "data": {"outcome": outcome, "reason": reason}})
            _write(folder / "lease.json", asdict(replace(lease, expires=0.0)) | {"ended": outcome, "reason": reason})

    def cancelled(self, run_id: str) -> bool:
        return (self._folder(run_id) / "cancel").exists()

    def append_event(self, lease: Lease, kind: str, payload: dict[str, Any]) -> int:
        with self._held(lease) as folder:
            path = folder / "events.jsonl"
            seq = _last_seq(path) + 1
            _append(path, {"seq": seq, "at": time.time(), "kind": kind, "payload": clean(payload)})
            return seq

    def events(self, run_id: str, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        found = (e for e in _lines(self._folder(run_id) / "events.jsonl") if e["seq"] > after)
        return [event for event, _ in zip(found, range(limit), strict=False)]

    def put_proposal(self, lease: Lease, proposal: Proposal) -> None:
        self._put(lease, "proposals", proposal)

    def put_candidate(self, lease: Lease, candidate: Candidate) -> None:
        self._put(lease, "candidates", candidate)

    def put_estimate(self, lease: Lease, estimate: Estimate) -> None:
        self._put(lease, "estimates", estimate)

    def put_experiment(self, lease: Lease, experiment: Experiment) -> None:
        self._put(lease, "experiments", experiment)

    def put_checks(self, lease: Lease, checks: list[Check]) -> None:
        self._put(lease, "checks", *checks)

    def put_post(self, lease: Lease, post: Post) -> None:
        self._put(lease, "posts", post)

    def put_report(self, lease: Lease, report: dict[str, Any]) -> None:
        with self._held(lease) as folder:
            _write(folder / "report.json", clean(report))

    def set_progress(self, lease: Lease, phase: str, elapsed_s: float) -> None:
        with self._held(lease) as folder:
            _append(folder / "records.jsonl", {"kind": "progress", "data": {"phase": phase, "elapsed_s": elapsed_s}})

    def load(self, run_id: str) -> RunState:
        folder = self._folder(run_id)
        rows: dict[str, dict[tuple[Any, ...], Any]] = {kind: {} for kind in KINDS}
        phase, elapsed = "queued", 0.0
        for line in _lines(folder / "records.jsonl"):
            kind, data = line["kind"], line["data"]
            if kind in KINDS:
                rows[kind][tuple(data[k] for k in KEYS[kind])] = from_json(KINDS[kind], data)
            else:
                phase, elapsed = data.get("phase", data.get("outcome", phase)), data.get("elapsed_s", elapsed)
        found = {kind: list(by_key.values()) for kind, by_key in rows.items()}
        return RunState(
            run_id,
            _read(folder / "config.json") or {},
            phase,
            report=_read(folder / "report.json"),
            elapsed_s=elapsed,
            **found,
        )

    def _put(self, lease: Lease, kind: str, *records: Any) -> None:
        with self._held(lease) as folder:
            _append(folder / "records.jsonl", *({"kind": kind, "data": to_json(r)} for r in records))

    def _folder(self, run_id: str) -> Path:
        folder = self.root / run_id
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id) or not (folder / "config.json").is_file():
            raise KeyError(f"There is no run {run_id!r} under {self.root}.")
        return folder

    @contextmanager
    def _locked(self, run_id: str) -> Iterator[Path]:
        folder = self._folder(run_id)
        with (folder / "lock").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield folder

    @contextmanager
    def _held(self, lease: Lease) -> Iterator[Path]:
        """The run's folder while `lease` is still the run's own; an expired one that nobody took over still is."""
        with self._locked(lease.run_id) as folder:
            held = _read(folder / "lease.json") or {}
            if held.get("ended") or (held.get("owner"), held.get("attempt")) != (lease.owner, lease.attempt):
                raise LeaseLost(f"run {lease.run_id} is no longer held by {lease.owner}")
            yield folder


def from_json(kind: type, data: dict[str, Any]) -> Any:
    """A record from `to_json`'s dict; fields it lacks take their defaults: a run of an older version still loads."""
    enums = {"state": State, "verdict": Verdict}
    values = {f.name: data[f.name] for f in fields(kind) if f.name in data}
    return kind(**{name: enums[name](v) if name in enums else v for name, v in values.items()})


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def _write(path: Path, data: dict[str, Any]) -> None:
    staging = path.with_suffix(".new")
    with staging.open("w") as handle:
        json.dump(data, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    staging.replace(path)


def _append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("ab+") as handle:
        handle.truncate(_complete(handle))
        handle.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        handle.flush()
        os.fsync(handle.fileno())


def _complete(handle: Any) -> int:
    """Where the last complete line ends."""
    end = handle.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        handle.seek(start)
        newline = handle.read(end - start).rfind(b"\n")
        if newline >= 0:
            return int(start + newline + 1)
        end = start
    return 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines only."""
    if not path.exists():
        return
    with path.open("rb") as handle:
        for line in handle:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _last_seq(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as handle:
        end = _complete(handle)
        start = max(0, end - 1)
        while start > 0:
            start = max(0, start - 65536)
            handle.seek(start)
            tail = handle.read(end - start)[:-1]
            if b"\n" in tail or start == 0:
                return int(json.loads(tail.rsplit(b"\n", 1)[-1])["seq"])
    return 0


def _gone(owner: str) -> bool:
    """Whether `owner` names a process of this machine that has ended."""
    found = re.fullmatch(r"(.+):(\d+):(\d+)", owner)
    return bool(found) and found[1] == socket.gethostname() and _started(int(found[2])) != int(found[3])


def _started(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0 when there is none. A zombie has ended."""
    try:
        fields_after_name = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return 0 if fields_after_name[0] in "ZX" else int(fields_after_name[19])
