"""A chat-completions server on 127.0.0.1 that answers by a script: programs, nonsense and every fault of the real ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-scripted-6f1d2c"


@dataclass(frozen=True)
class Says:
    """A chat completion. `usage` None: a server that does not count."""

    text: str | None
    usage: tuple[int, int, int] | None = (1000, 200, 600)  # prompt, completion, cached tokens
    finish: str = "stop"
    refusal: str | None = None


@dataclass(frozen=True)
class Fails:
    status: int
    message: str = "it failed"
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Sends:
    """Status 200 and a body that is not what was asked for."""

    body: str
    kind: str = "application/json"


@dataclass(frozen=True)
class Hangs:
    """Takes the question and says nothing, for so long or until the caller is gone."""

    seconds: float = 30.0


Step = Says | Fails | Sends | Hangs | Callable[[dict[str, Any]], Says]


@dataclass
class Scripted:
    """`steps` in order, the last one again and again. What was asked is kept in `asked`."""

    steps: Sequence[Step]
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""

    def next(self, body: dict[str, Any]) -> Says | Fails | Sends | Hangs:
        self.asked.append(body)
        step = self.steps[min(len(self.asked), len(self.steps)) - 1]
        return step(body) if callable(step) else step

    def prompts(self) -> list[str]:
        """The last message of each call."""
        return [body["messages"][-1]["content"] for body in self.asked]


@contextmanager
def llm_server(*steps: Step) -> Iterator[Scripted]:
    script, ended = Scripted(steps), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.keys.append(self.headers.get("authorization", ""))
            if self.path != "/v1/chat/completions":
                return self._send(404, {"error": {"message": f"no {self.path}"}})
            step = script.next(body)
            if isinstance(step, Hangs):
                ended.wait(step.seconds)
                self.close_connection = True
                return None
            if isinstance(step, Fails):
                error = {"message": step.message, "type": "error", "code": step.code or None}
                return self._send(step.status, {"error": error}, step.headers)
            if isinstance(step, Sends):
                return self._raw(200, step.body.encode(), (("content-type", step.kind),))
            return self._send(200, completion(step, body["model"]))

        def _send(self, status: int, body: dict[str, Any], headers: Sequence[tuple[str, str]] = ()) -> None:
            self._raw(status, json.dumps(body).encode(), (("content-type", "application/json"), *headers))

        def _raw(self, status: int, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
            self.send_response(status)
            for name, value in (*headers, ("content-length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield script
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def completion(step: Says, model: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": step.text, "refusal": step.refusal}
    found: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": step.finish, "logprobs": None}],
    }
    if step.usage:
        sent, answered, cached = step.usage
        found["usage"] = {
            "prompt_tokens": sent,
            "completion_tokens": answered,
            "total_tokens": sent + answered,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    return found


def answer(fields: dict[str, Any] | None = None, **files: str) -> str:
    """An answer in the form that is asked for. `edit_forward` and `forward` are forward.py, other names are kernels."""
    known = {"name": "an idea", "focus": "projections", "hypothesis": "Fewer calls a layer.", "expected": 1.1}
    blocks = [f"```json\n{json.dumps(known | (fields or {}))}\n```"]
    for name, text in files.items():
        head = {"edit_forward": "edit forward.py", "forward": "python forward.py"}.get(name, f"cpp {name}.cpp")
        blocks.append(f"```{head}\n{text.rstrip()}\n```")
    return "Reasoning first.\n\n" + "\n\n".join(blocks)
