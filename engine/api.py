"""The OpenAI-compatible server of one endpoint version. No torch: the model runs in an engine host behind a pipe.

    python -m engine.api --model FOLDER --name demo --artifact DIR --port 8001
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engine.api_requests import ApiError, Ask, bad, check_ids, read_chat, read_completion
from engine.api_responses import Choice, Writer
from engine.artifacts import Artifact, ArtifactError, read_artifact
from engine.client import DEFAULT_KV_BYTES, HostClient, HostFailure
from engine.models.errors import ModelError
from engine.models.tokenizer import Tokenizer
from engine.runner import EngineRunner
from engine.sequence import GenerationRequest, InvalidRequest, TokenEvent
from engine.stream import TextStream

MAX_BODY = 16 << 20
SEED_STEP = 0x9E3779B97F4A7C15  # choices of one seeded request draw from seeds this far apart


class Server:
    """State of the process: the runner, which version it serves, and counters."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tokenizer = Tokenizer(options.model)
        self.artifact: Artifact = read_artifact(options.artifact, options.artifact.resolve().name)
        self.version_id, self.generation = options.version_id, options.generation
        self.versions = {self.artifact.hash: self.version_id}
        self.ids = itertools.count(1)
        self.started = time.perf_counter()
        self.cold_start_s = self.hot_swap_s = None
        self.runner: EngineRunner | None = None
        self.registry = CollectorRegistry()
        self.requests = Counter("polymorph_requests", "Requests answered.", ["status"], registry=self.registry)
        self.output_tokens = Counter("polymorph_output_tokens", "Tokens generated.", registry=self.registry)
        self.prompt_tokens = Counter("polymorph_prompt_tokens", "Prompt tokens received.", registry=self.registry)
        self.swaps = Counter("polymorph_swaps", "Hot swaps done.", registry=self.registry)
        self.ttft = Histogram("polymorph_ttft_seconds", "Time to first token.", registry=self.registry)
        self.e2el = Histogram("polymorph_e2el_seconds", "End-to-end latency.", registry=self.registry)
        for name in ("running", "waiting", "kv_blocks", "kv_blocks_free", "preemptions", "lanes"):
            gauge = Gauge(f"polymorph_{name}", f"Engine: {name.replace('_', ' ')}.", registry=self.registry)
            gauge.set_function(lambda name=name: self.engine_stat(name))

    def engine_stat(self, name: str) -> float:
        engine = self.runner.engine if self.runner else None
        return float(engine.stats()[name]) if engine else 0.0

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        o = self.options
        host = HostClient(o.model, dtype=o.dtype, threads=o.threads, kv_bytes=o.kv_bytes, log=o.host_log)
        runner = EngineRunner(host, self.artifact, asyncio.get_running_loop(), max_context=o.max_context)
        try:
            await asyncio.to_thread(runner.start)
        except HostFailure as failure:
            print(f"polymorph: {failure}\n{failure.log_tail}", file=sys.stderr)
            host.close()
            os._exit(3)
        self.runner, self.cold_start_s = runner, time.perf_counter() - self.started
        try:
            yield
        finally:
            await asyncio.to_thread(runner.close)

    @property
    def ready(self) -> EngineRunner:
        if self.runner is None or not self.runner.healthy:
            raise ApiError(503, "the engine is restarting; send the request again in a moment", code="engine_restarting")
        return self.runner

    # -- generation -------------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        return await self.generate(request, await self.read(request, read_completion))

    async def chat(self, request: Request) -> Response:
        return await self.generate(request, await self.read(request, read_chat))

    async def read(self, request: Request, reader: Any) -> Ask:
        raw = await request.body()
        if len(raw) > MAX_BODY:
            raise ApiError(413, f"the body has {len(raw)} bytes and at most {MAX_BODY} are taken")
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise bad(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise bad("the body must be a JSON object")
        if body.get("model") != self.options.name:
            message = f"there is no model {body.get('model')!r} here; this is {self.options.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        ask: Ask = reader(body, self.tokenizer)
        check_ids(ask.sampling, self.tokenizer.vocab_size)
        return ask

    async def generate(self, http: Request, ask: Ask) -> Response:
        runner, start = self.ready, time.perf_counter()
        requests, choices = self.plan(ask, runner)
        headers = {
            "x-polymorph-version": self.version_id,
            "x-polymorph-artifact": self.artifact.hash,
            "x-polymorph-generation": str(self.generation),
        }
        events = self.run(runner, requests, choices, ask, start)
        writer = Writer(ask, self.options.name)
        if ask.stream:
            media = "text/event-stream"
            return StreamingResponse(self.stream(events, writer, choices, ask), media_type=media, headers=headers)
        watch = asyncio.create_task(_disconnected(http))
        try:
            async for _ in _until(events, watch):
                pass
        finally:
            watch.cancel()
            await events.aclose()
        self.requests.labels("200").inc()
        return JSONResponse(writer.whole(list(choices.values())), headers=headers)

    def plan(self, ask: Ask, runner: EngineRunner) -> tuple[list[GenerationRequest], dict[int, Choice]]:
        requests, choices = [], {}
        context = runner.engine.max_context if runner.engine else 0
        for p, prompt in enumerate(ask.prompts):
            for k in range(ask.n):
                limit = context - len(prompt) if ask.max_tokens is None else ask.max_tokens
                sampling = replace(ask.sampling, seed=(ask.sampling.seed + k * SEED_STEP) % (1 << 62)) if k else ask.sampling
                request = GenerationRequest(next(self.ids), prompt, max(limit, 1), sampling, self.tokenizer.eos_ids)
                try:
                    runner.check(request)
                except InvalidRequest as error:
                    raise bad(str(error), error.param, error.code) from error
                requests.append(request)
                choices[request.id] = Choice(len(choices), p, TextStream(self.tokenizer, ask.stop, ask.include_stop))
        self.prompt_tokens.inc(sum(len(p) for p in ask.prompts))
        return requests, choices

    async def run(
        self, runner: EngineRunner, requests: list[GenerationRequest], choices: dict[int, Choice], ask: Ask, start: float
    ) -> AsyncIterator[tuple[Choice, str]]:
        """Yields (choice, new text) for each token; raises ApiError when the engine fails. Closing it early aborts."""
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        open_ids = {r.id for r in requests}
        for request in requests:
            runner.submit(request, events)
        try:
            while open_ids:
                event = await events.get()
                if event.finish_reason == "error":
                    raise ApiError(503, event.error or "the engine failed", code="engine_failed")
                if event.request_id not in open_ids:
                    continue
                choice = choices[event.request_id]
                if choice.tokens == 0:
                    self.ttft.observe(time.perf_counter() - start)
                text = choice.take(event, ask, self.tokenizer, self.tokenizer.eos_ids)
                self.output_tokens.inc()
                if choice.finish_reason:
                    open_ids.discard(event.request_id)
                    if event.finish_reason is None:  # a stop string ended it, which the engine cannot know
                        runner.abort(event.request_id)
                yield choice, text
            self.e2el.observe(time.perf_counter() - start)
        finally:
            for request_id in open_ids:
                runner.abort(request_id)

    async def stream(self, events: Any, writer: Writer, choices: dict[int, Choice], ask: Ask) -> AsyncIterator[str]:
        try:
            for choice in choices.values():
                if opening := writer.first(choice):
                    yield _sse(opening)
            async for choice, text in events:
                if text or choice.finish_reason or (ask.logprobs >= 0 and choice.logprobs):
                    yield _sse(writer.part(choice, text))
            if ask.include_usage:
                yield _sse(writer.end(list(choices.values())))
            self.requests.labels("200").inc()
        except ApiError as error:
            self.requests.labels(str(error.status)).inc()
            yield _sse(error.body())
        finally:
            await events.aclose()
        yield "data: [DONE]\n\n"

    # -- the rest ---------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        entry = {"id": self.options.name, "object": "model", "created": int(time.time()), "owned_by": "polymorph"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        healthy = self.runner is not None and self.runner.healthy
        return JSONResponse({"ok": healthy}, 200 if healthy else 503)

    async def status(self, request: Request) -> Response:
        runner = self.ready
        try:
            host = await runner.host_status()
        except HostFailure as failure:
            raise ApiError(503, str(failure), code=failure.code) from failure
        return JSONResponse(
            {
                "pid": os.getpid(),
                "host_pid": host.pid,
                "artifact_hash": self.artifact.hash,
                "version_id": self.version_id,
                "generation": self.generation,
                "weights_mapping": host.weights_mapping,
                "sandbox": host.sandbox,
                "dispatch": host.dispatch,
                "cold_start_s": self.cold_start_s,
                "hot_swap_s": self.hot_swap_s,
                "host_restarts": runner.restarts,
                **(runner.engine.stats() if runner.engine else {}),
            }
        )

    async def swap(self, request: Request) -> Response:
        """Hot swap to another artefact: `{artifact_hash, path, version_id, generation, policy, deadline_s}`."""
        body = await request.json()
        start = time.perf_counter()
        try:
            artifact = await asyncio.to_thread(read_artifact, Path(body["path"]), body["artifact_hash"])
            await self.ready.swap(artifact, body.get("policy", "drain"), float(body.get("deadline_s", 30)))
        except (ArtifactError, KeyError, ValueError) as error:
            raise ApiError(400, f"the swap was refused: {error}", code="bad_swap") from error
        except HostFailure as failure:
            detail = f"the swap failed and the version before it stays: {failure.message}"
            raise ApiError(500, detail, code=failure.code) from failure
        self.artifact, self.version_id = artifact, str(body.get("version_id", artifact.hash[:12]))
        self.generation = int(body.get("generation", self.generation))
        self.hot_swap_s = time.perf_counter() - start
        self.swaps.inc()
        return JSONResponse({"hot_swap_s": self.hot_swap_s, "artifact_hash": artifact.hash, "generation": self.generation})


def _sse(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _disconnected(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _until(events: AsyncIterator[Any], gone: asyncio.Task[None]) -> AsyncIterator[Any]:
    """Passes `events` on until they end. Raises ClientDisconnect when the client goes first."""
    while True:
        following = asyncio.ensure_future(anext(events, None))
        await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await following
            raise ClientDisconnect
        item = following.result()
        if item is None:
            return
        yield item


def build_app(server: Server) -> Starlette:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        server.requests.labels(str(error.status)).inc()
        return JSONResponse(error.body(), error.status)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await api_error(request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def crash(request: Request, error: Exception) -> Response:
        return JSONResponse(ApiError(500, "the server failed on this request; its log says why").body(), 500)

    return Starlette(
        routes=[
            Route("/v1/models", server.models),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/metrics", server.metrics),
            Route("/health", server.health),
            Route("/ready", server.health),
            Route("/internal/status", server.status),
            Route("/internal/swap", server.swap, methods=["POST"]),
        ],
        exception_handlers={ApiError: api_error, HTTPException: http_error, ClientDisconnect: gone, Exception: crash},
        lifespan=server.lifespan,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves one version of one endpoint.")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--name", required=True, help="the model name clients send")
    parser.add_argument("--artifact", type=Path, required=True, help="the candidate folder, named by its hash")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-bytes", type=int, default=DEFAULT_KV_BYTES)
    parser.add_argument("--max-context", type=int, default=0)
    parser.add_argument("--version-id", default="baseline")
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--host-log", type=Path, default=None)
    options = parser.parse_args()
    try:
        server = Server(options)
    except (ModelError, ArtifactError) as error:
        print(f"polymorph: {error}", file=sys.stderr)
        sys.exit(1)
    uvicorn.run(build_app(server), host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
