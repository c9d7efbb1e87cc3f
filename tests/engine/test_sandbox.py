"""What a host gives up before candidate code runs, seen from inside candidate code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine import sandbox
from engine.artifacts import ArtifactStore
from engine.client import HostClient, HostFailure
from engine.wire import HostStatus, Load, Status
from tests.engine.conftest import KV_BYTES
from tests.paths import ROOT


@pytest.fixture(scope="module")
def seen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a candidate can see of the process it runs in: it tells by the error that it raises."""
    secret_file = (tmp_path_factory.mktemp("open") / "held-open").open("w")
    os.set_inheritable(secret_file.fileno(), True)
    text = (
        "import json, os, resource\n"
        "status = dict(l.split(':', 1) for l in open('/proc/self/status').read().splitlines())\n"
        "links = {f: os.readlink('/proc/self/fd/' + f) for f in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + f)}\n"
        "raise ValueError(json.dumps({'environment': dict(os.environ), 'links': links, 'no_new_privs': status['NoNewPrivs'].strip(),\n"
        "  'core': resource.getrlimit(resource.RLIMIT_CORE)[0], 'files': resource.getrlimit(resource.RLIMIT_NOFILE)[0],\n"
        "  'stdin': os.read(0, 10).decode(), 'session': os.getsid(0) == os.getpid()}))\n"
    )
    artifact = ArtifactStore(tmp_path_factory.mktemp("data")).put({"forward.py": text}, name="looks around")
    os.environ["POLYMORPH_PLANTED_SECRET"] = "s3cr3t"
    try:
        with HostClient(tiny_model, dtype="float32", threads=1, kv_bytes=KV_BYTES) as host:
            with pytest.raises(HostFailure) as caught:
                host.call(Load(artifact.hash, str(artifact.path)))
            status = host.call(Status())
    finally:
        del os.environ["POLYMORPH_PLANTED_SECRET"]
        secret_file.close()
    assert isinstance(status, HostStatus)
    told: dict[str, Any] = json.loads(caught.value.message.removeprefix("ValueError: "))
    return told | {"layers": status.sandbox}


def test_no_secret_reaches_candidate_code(seen: dict[str, Any]) -> None:
    assert "POLYMORPH_PLANTED_SECRET" not in seen["environment"]
    allowed = {
        *sandbox.KEPT_ENVIRONMENT,
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "PYTHONUNBUFFERED",
        "PYTHONDONTWRITEBYTECODE",
    }
    allowed |= {"GOMP_SPINCOUNT", "LC_CTYPE", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}  # OpenMP's and Python's own
    assert {name for name in seen["environment"] if name not in allowed and not name.startswith("TORCH")} == set()


def test_no_file_of_the_caller_is_open(seen: dict[str, Any]) -> None:
    assert not [link for link in seen["links"].values() if "held-open" in link]


def test_limits_hold(seen: dict[str, Any]) -> None:
    assert (seen["no_new_privs"], seen["core"], seen["files"]) == ("1", 0, sandbox.MAX_OPEN_FILES)
    assert seen["stdin"] == "" and seen["session"]


def test_the_layers_applied_are_recorded(seen: dict[str, Any]) -> None:
    assert {"no new privileges", "resource limits", "closed descriptors", "ends with its parent"} <= set(seen["layers"])


def test_a_host_ends_with_its_caller(tiny_model: Path) -> None:
    """The caller is killed and cannot clean up."""
    code = (
        "import sys, time; from pathlib import Path; from engine.client import HostClient\n"
        f"host = HostClient(Path({str(tiny_model)!r}), dtype='float32', threads=1, kv_bytes=1 << 20)\n"
        "host.start(); print(host.pid, flush=True); time.sleep(60)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    host = int(caller.stdout.readline())
    assert Path(f"/proc/{host}").exists()
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    deadline = time.monotonic() + 10
    while _runs(host) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(host)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
