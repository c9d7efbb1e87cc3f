"""What the API server and the gateway share: a port taken before anything starts, bounded bodies, a word when ready."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from typing import Any

import uvicorn
from starlette.requests import Request

from engine.api_requests import ApiError

PR_SET_PDEATHSIG = 1
GRACE_S = 5
BACKLOG = 2048


class PortInUse(Exception):
    """The address cannot be listened on; the text names it and the mend."""


class Listener:
    """A listening socket, held from the start: a port in use is known before a model loads, and early clients wait."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((host, port))
            self.socket.listen(BACKLOG)
        except OSError as error:
            self.socket.close()
            reason = os.strerror(error.errno or 0)
            raise PortInUse(f"{host}:{port} cannot be listened on: {reason}. Choose another port.") from error
        self.host, self.port = host, int(self.socket.getsockname()[1])


def run_server(app: Any, listener: Listener) -> None:
    """Serves until SIGTERM or SIGINT; what is being answered gets GRACE_S to end."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, http="httptools", lifespan="on"
    )
    server = uvicorn.Server(config)
    server.run(sockets=[listener.socket])


def tell_ready(descriptor: int, message: dict[str, Any]) -> None:
    """One JSON line to whoever started this process and waits for it. -1: nobody does."""
    if descriptor < 0:
        return
    os.write(descriptor, json.dumps(message).encode() + b"\n")
    os.close(descriptor)


def end_with_parent(parent_pid: int) -> None:
    """Has the kernel end this process when its parent does, so that nothing outlives a killed gateway."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError 413 as soon as it is known to be longer than `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the body has more than {limit} bytes, the most that is taken")
        parts.append(part)
    return b"".join(parts)
