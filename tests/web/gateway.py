"""A gateway of a few lines: real HTTP on a free port, keeps what the web asks of it and answers what a test sets."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.fleet import ApiServer
from engine.wire import EndpointSpec, VersionShare

TOKEN = "token-of-the-tests"


class Gateway:
    """`refuse` is the sentence of a 503 to every change; `status` is the answer of every look."""

    def __init__(self) -> None:
        self.registered: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []
        self.prompts: list[dict[str, Any]] = []
        self.refuse = ""
        self.status: dict[str, Any] = {"plan": None, "applied_generation": 0, "servers": [], "error": ""}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"gateway": self}))
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def serves(self, *servers: dict[str, Any], error: str = "") -> None:
        """Answers from now on that these servers run and that the newest plan is applied."""
        generation = self.plans[-1]["generation"] if self.plans else 0
        self.status = {"plan": None, "applied_generation": generation, "servers": list(servers), "error": error}


def server(role: str, digest: str, state: str = "ready", starts: int = 1) -> dict[str, Any]:
    """One engine server in the real gateway's own words."""
    version = VersionShare("baseline" if role == "stable" else "v1", digest, 1.0, role)
    spec = EndpointSpec(slug="chat", model_path="/models/tiny", dtype="float32")
    return ApiServer(spec, role, version, 1, Path("/data"), state=state, starts=starts, host_pid=4242).described()


class _Handler(BaseHTTPRequestHandler):
    gateway: Gateway

    def do_GET(self) -> None:
        self._admin(lambda: self.gateway.status)

    def do_PUT(self) -> None:
        body = self._body()
        kept = self.gateway.plans if self.path.endswith("/plan") else self.gateway.registered

        def keep() -> dict[str, Any]:
            kept.append(body)
            return {"ok": True}

        self._admin(keep, changes=True)

    def do_POST(self) -> None:
        """An answer in two pieces, streamed as OpenAI's servers do."""
        self.gateway.prompts.append(self._body())
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-polymorph-version", "v7")
        self.end_headers()
        for piece in ("Grüße", " back"):
            self.wfile.write(f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _admin(self, answer: Any, changes: bool = False) -> None:
        if self.headers["authorization"] != f"Bearer {TOKEN}":
            return self._send(401, {"error": {"message": "Wrong token."}})
        if changes and self.gateway.refuse:
            return self._send(503, {"error": {"message": self.gateway.refuse}})
        return self._send(200, answer())

    def _body(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass
