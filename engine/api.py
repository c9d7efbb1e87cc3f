"""The OpenAI-compatible server of one endpoint version. No torch: the model runs in an engine host behind a pipe.

    python -m engine.api --model FOLDER --name demo --artifact DIR --port 8001

It listens on the loopback address unless told otherwise; `/internal/...` is for the gateway that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.api_generate import EventStream, Generation
from engine.api_metrics import CONTENT_TYPE, Metrics
from engine.api_requests import ApiError, Ask, bad, check_ids, read_chat, read_completion, read_json
from engine.api_responses import Writer
from engine.artifacts import Artifact, ArtifactError, ArtifactStore, read_artifact
from engine.client import DEFAULT_KV_BYTES, HostClient, HostFailure
from engine.http_server import Listener, PortInUse, end_with_parent, read_body, run_server, tell_ready
from engine.models.config import read_config
from engine.models.errors import ModelError
from engine.models.tokenizer import Tokenizer
from engine.runner import EngineRunner

MAX_BODY = 16 << 20
MAX_UNFINISHED = 1024  # requests taken in before more are told to come back


class SwapRequest(msgspec.Struct, frozen=True):
    """`path` is the artefact's folder; times in seconds."""

    artifact_hash: str
    path: str
    version_id: str = ""
    generation: int = 0
    policy: str = "drain"
    deadline_s: float = 30.0


class Server:
    """State of the process: the runner, which version it serves, and counts."""

    def __init__(self, options: argparse.Namespace, port: int) -> None:
        self.options, self.port = options, port
        self.started = time.perf_counter()
        self.tokenizer = Tokenizer(options.model)
        self.artifact = _first_artifact(options)
        self.versions = {self.artifact.hash: (options.version_id, options.generation)}
        self.ids = itertools.count(1)
        self.cold_start_s: float | None = None
        self.hot_swap_s: float | None = None
        self.runner: EngineRunner | None = None
        self.metrics = Metrics(lambda: self.runner.stats if self.runner else {})
        self.swapping = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        o = self.options
        host = HostClient(o.model, dtype=o.dtype, threads=o.threads, kv_bytes=o.kv_bytes, log=o.host_log)
        runner = EngineRunner(host, self.artifact, asyncio.get_running_loop(), max_context=o.max_context)
        try:
            await runner.start()
        except HostFailure as failure:
            await asyncio.to_thread(host.close)
            print(f"polymorph: {failure}\n{failure.log_tail}", file=sys.stderr, flush=True)
            tell_ready(o.ready_fd, {"error": str(failure)})
            os._exit(3)
        self.runner, self.cold_start_s = runner, time.perf_counter() - self.started
        told = {"port": self.port, "pid": os.getpid(), "host_pid": host.pid, "cold_start_s": self.cold_start_s}
        tell_ready(o.ready_fd, told)
        try:
            yield
        finally:
            await runner.close()

    @property
    def ready(self) -> EngineRunner:
        if self.runner is None:
            raise ApiError(503, "the server is starting; send the request again in a moment", code="starting")
        return self.runner

    # -- generation -------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self.generate(request, await self.read(request, read_completion))

    async def chat(self, request: Request) -> Response:
        return await self.generate(request, await self.read(request, read_chat))

    async def read(self, request: Request, reader: Callable[[dict[str, Any], Tokenizer], Ask]) -> Ask:
        body = read_json(await read_body(request, MAX_BODY))
        if body.get("model") != self.options.name:
            message = f"there is no model {body.get('model')!r} here; this is {self.options.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        ask = reader(body, self.tokenizer)
        check_ids(ask.sampling, self.tokenizer.vocab_size)
        return ask

    async def generate(self, request: Request, ask: Ask) -> Response:
        """Waits for the first token before it answers, so that an engine that fails by then is an error status."""
        runner = self.ready
        if runner.unfinished >= MAX_UNFINISHED:
            raise ApiError(429, "too many requests are waiting; come back in a moment", code="overloaded")
        generation, writer = Generation(ask, runner, self.tokenizer, self.ids), Writer(ask, self.options.name)
        watch = asyncio.create_task(_hang_up_with(request, generation))
        shaped = "x-polymorph-shape" in request.headers
        handed_over = False
        try:
            parts = await generation.parts()
            headers = self.headers(generation.version)
            if ask.stream:
                response = EventStream(generation, writer, parts, headers, shaped, watch)
                response.background = BackgroundTask(self.count, generation, response)
                handed_over = True
                return response
            while not generation.done:
                await generation.parts()
            if shaped:
                headers["x-polymorph-shape"] = generation.shape(writer).decode()
            answer = Response(writer.whole(generation.choices), headers=headers, media_type="application/json")
            await self.count(generation)
            return answer
        finally:
            if not handed_over:
                watch.cancel()
                generation.close()

    async def count(self, generation: Generation, stream: EventStream | None = None) -> None:
        self.metrics.requests.labels(str(stream.status if stream else 200)).inc()
        self.metrics.ttft.observe(generation.ttft_s)
        self.metrics.e2el.observe(time.perf_counter() - generation.started)

    def headers(self, artifact_hash: str) -> dict[str, str]:
        """Which version answers. A request that a swap moves midway keeps the one it started on."""
        version_id, number = self.versions.get(artifact_hash, ("", 0))
        return {
            "x-polymorph-version": version_id,
            "x-polymorph-artifact": artifact_hash,
            "x-polymorph-generation": str(number),
        }

    # -- the rest ---------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        entry = {"id": self.options.name, "object": "model", "created": int(time.time()), "owned_by": "polymorph"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.options.name:
            raise ApiError(404, f"there is no model {name!r} here", "model", "model_not_found")
        return JSONResponse({"id": name, "object": "model", "created": int(time.time()), "owned_by": "polymorph"})

    async def metrics_page(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def health(self, request: Request) -> Response:
        """The process answers; what it says of the engine does not change the status."""
        return JSONResponse({"ok": True, "engine": bool(self.runner and self.runner.healthy)})

    async def readiness(self, request: Request) -> Response:
        healthy = self.runner is not None and self.runner.healthy
        error = self.runner.error if self.runner else "starting"
        return JSONResponse({"ready": healthy, "error": error}, 200 if healthy else 503)

    async def status(self, request: Request) -> Response:
        runner = self.ready
        try:
            host = await runner.host_status()
        except HostFailure as failure:
            raise ApiError(503, str(failure), code=failure.code) from failure
        version_id, generation = self.versions[self.artifact.hash]
        own = {
            "pid": os.getpid(),
            "host_pid": host.pid,
            "artifact_hash": self.artifact.hash,
            "version_id": version_id,
            "generation": generation,
            "weights_mapping": host.weights_mapping,
            "sandbox": host.sandbox,
            "dispatch": host.dispatch,
            "cold_start_s": self.cold_start_s,
            "hot_swap_s": self.hot_swap_s,
        }
        return JSONResponse(own | runner.stats)

    async def swap(self, request: Request) -> Response:
        """Hot swap to another artefact: streams in flight end on their version, new requests go to the new one."""
        start = time.perf_counter()
        try:
            wanted = msgspec.json.decode(await read_body(request, MAX_BODY), type=SwapRequest)
            artifact = await asyncio.to_thread(read_artifact, Path(wanted.path), wanted.artifact_hash)
            async with self.swapping:
                self.versions[artifact.hash] = (wanted.version_id or artifact.hash[:12], wanted.generation)
                await self.ready.swap(artifact, wanted.policy, wanted.deadline_s)
                self.artifact = artifact
        except (ArtifactError, ValueError) as error:
            self.metrics.swaps.labels("refused").inc()
            raise bad(f"the swap was refused: {error}", code="bad_swap") from error
        except HostFailure as failure:
            self.metrics.swaps.labels("failed").inc()
            detail = f"the swap failed and the version before it stays: {failure.message}"
            raise ApiError(500, detail, code=failure.code) from failure
        self.hot_swap_s = time.perf_counter() - start
        self.metrics.swaps.labels("done").inc()
        version_id, generation = self.versions[artifact.hash]
        told = {"artifact_hash": artifact.hash, "version_id": version_id, "generation": generation}
        return JSONResponse({"hot_swap_s": self.hot_swap_s} | told)


def _first_artifact(options: argparse.Namespace) -> Artifact:
    """The artefact folder named on the command line, else the baseline from the data folder."""
    if options.artifact is None:
        return ArtifactStore(options.data).baseline(read_config(options.model))
    path = options.artifact.resolve()
    return read_artifact(path, path.name)


async def _hang_up_with(request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.hang_up()


def build_app(server: Server) -> Starlette:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        server.metrics.requests.labels(str(error.status)).inc()
        return JSONResponse(error.body(), error.status)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await api_error(request, ApiError(error.status_code, message))

    async def gone(request: Request, error: Exception) -> Response:
        server.metrics.requests.labels("499").inc()
        return Response(status_code=499)

    async def crash(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError(500, "the server failed on this request; its log says why"))

    return Starlette(
        routes=[
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/metrics", server.metrics_page),
            Route("/health", server.health),
            Route("/ready", server.readiness),
            Route("/internal/status", server.status),
            Route("/internal/swap", server.swap, methods=["POST"]),
        ],
        exception_handlers={ApiError: api_error, HTTPException: http_error, ClientDisconnect: gone, Exception: crash},
        lifespan=server.lifespan,
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Serves one version of one endpoint.")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--name", required=True, help="the model name clients send")
    parser.add_argument("--artifact", type=Path, help="the candidate folder, named by its hash (default: the baseline)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where the baseline is stored")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--kv-bytes", type=int, default=DEFAULT_KV_BYTES)
    parser.add_argument("--max-context", type=int, default=0, help="0: the model's own")
    parser.add_argument("--version-id", default="baseline")
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--host-log", type=Path, default=None)
    parser.add_argument("--parent-pid", type=int, default=0, help="end when this process, our parent, does")
    parser.add_argument("--ready-fd", type=int, default=-1, help="a pipe on which to say that it serves, and how")
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.parent_pid:
        end_with_parent(options.parent_pid)
    try:
        listener = Listener(options.host, options.port)
        server = Server(options, listener.port)
    except (ModelError, ArtifactError, PortInUse) as error:
        print(f"polymorph: {error}", file=sys.stderr, flush=True)
        tell_ready(options.ready_fd, {"error": str(error)})
        sys.exit(2)
    run_server(build_app(server), listener)


if __name__ == "__main__":
    main()
