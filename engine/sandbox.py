"""What an engine host gives up before it loads anything. Each layer applied is recorded and shown.

Applied without root: own session, closed descriptors, no new privileges, not dumpable, ends with its parent, resource limits.
Not yet applied: Landlock and a system-call filter (candidates may still run the C++ compiler through torch.compile).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
MAX_FILE_BYTES = 4 << 30
MAX_OPEN_FILES = 1024
KEPT_ENVIRONMENT = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "CUDA_VISIBLE_DEVICES",
)


def clean_environment(scratch: str) -> dict[str, str]:
    """The environment of a host: no secrets, no settings of the process that starts it; build caches in `scratch`."""
    kept = {name: os.environ[name] for name in KEPT_ENVIRONMENT if name in os.environ}
    return kept | {
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
        "TRITON_CACHE_DIR": f"{scratch}/triton",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def apply(parent_pid: int) -> list[str]:
    """Applies every layer that this system has, before any thread exists, and names those that took."""
    applied = ["clean environment", "no sockets opened by us"]
    libc = ctypes.CDLL(None, use_errno=True)
    for name, option, value in (
        ("ends with its parent", PR_SET_PDEATHSIG, signal.SIGKILL),
        ("not dumpable", PR_SET_DUMPABLE, 0),
        ("no new privileges", PR_SET_NO_NEW_PRIVS, 1),
    ):
        if libc.prctl(option, value, 0, 0, 0) == 0:
            applied.append(name)
    if os.getppid() != parent_pid:  # the parent ended before the death signal was asked for
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    applied.append("resource limits")
    os.closerange(3, MAX_OPEN_FILES)
    applied.append("closed descriptors")
    return applied
