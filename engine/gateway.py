"""The gateway: every endpoint's address, and the keeper of the servers behind it. Torch-free.

    python -m engine.gateway --data DATA --port 8080

Clients speak the OpenAI API; `model` names the endpoint. `/admin/...` takes the bearer token in DATA/gateway.token. All
it knows lies in DATA, so it can be started again at any time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hmac
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.api_metrics import CONTENT_TYPE
from engine.api_requests import ApiError, bad, read_json
from engine.artifacts import ArtifactError, ArtifactStore
from engine.gateway_endpoint import ServedEndpoint
from engine.gateway_proxy import Proxy
from engine.gateway_records import Records
from engine.http_server import Listener, PortInUse, read_body, run_server
from engine.models.errors import ModelError
from engine.models.resolve import resolve_model
from engine.plan import CANARY, STABLE, PlanError, PlanStore, check_parallel, check_slug, write_atomically
from engine.wire import EndpointSpec, ServingPlan

log = logging.getLogger(__name__)
MAX_BODY = 16 << 20


class Gateway:
    def __init__(self, data: Path) -> None:
        self.data = data.resolve()
        self.data.mkdir(parents=True, exist_ok=True)
        self.token = _token(self.data / "gateway.token")
        self.store, self.artifacts, self.records = PlanStore(data), ArtifactStore(data), Records(data)
        self.proxy = Proxy(self.records)
        self.endpoints: dict[str, ServedEndpoint] = {}
        self.changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for slug in self.store.slugs():
            try:
                self._serve(self.store.endpoint(slug))
            except (PlanError, ArtifactError) as error:  # one damaged endpoint does not keep the others down
                log.error("endpoint %s is not served: %s", slug, error)
        try:
            yield
        finally:
            await asyncio.gather(*(e.stop() for e in self.endpoints.values()))

    def _serve(self, spec: EndpointSpec) -> ServedEndpoint:
        endpoint = ServedEndpoint(spec, self.store, self.artifacts, self.data)
        self.endpoints[spec.slug] = endpoint
        endpoint.start()
        return endpoint

    # -- clients ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        raw = await read_body(request, MAX_BODY)
        model = read_json(raw).get("model")
        endpoint = self.endpoints.get(model) if isinstance(model, str) else None
        if endpoint is None:
            raise ApiError(
                404, f"there is no model {model!r}; /v1/models lists those there are", "model", "model_not_found"
            )
        return await self.proxy.forward(request, endpoint, request.url.path, raw, self._pinned(request))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(slug) for slug in sorted(self.endpoints)]})

    async def model(self, request: Request) -> Response:
        slug = request.path_params["slug"]
        if slug not in self.endpoints:
            raise ApiError(404, f"there is no model {slug!r}", "model", "model_not_found")
        return JSONResponse(_model(slug))

    async def health(self, request: Request) -> Response:
        states = {slug: {role: s.state for role, s in e.servers.items()} for slug, e in self.endpoints.items()}
        return JSONResponse({"ok": True, "endpoints": states})

    async def readiness(self, request: Request) -> Response:
        """200 once every endpoint's stable server serves."""
        waiting = sorted(slug for slug, e in self.endpoints.items() if not e.servers[STABLE].ready)
        return JSONResponse({"ready": not waiting, "waiting_for": waiting}, 503 if waiting else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self.records.metrics(), headers={"content-type": CONTENT_TYPE})

    # -- administration ---------------------------------------------------------------------------------------------

    async def list_endpoints(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({slug: await self._described(slug) for slug in sorted(self.endpoints)})

    async def put_endpoint(self, request: Request) -> Response:
        """Serves an endpoint, new or changed. One that is already served so is left as it is."""
        self._authorise(request)
        slug = check_slug(request.path_params["slug"])
        spec = await _read(request, EndpointSpec)
        if spec.slug != slug:
            raise bad(f"the body describes endpoint {spec.slug!r} and was sent to {slug!r}", "slug")
        check_parallel(spec)
        if Path(spec.model_path).is_dir():
            await asyncio.to_thread(resolve_model, spec.model_path, self.data)
        async with self.changing:
            served = self.endpoints.get(slug)
            if served is None or served.spec != spec:
                if served is not None:
                    await served.stop()
                self.store.save_endpoint(spec)
                self._serve(spec)
        return JSONResponse(await self._described(slug))

    async def delete_endpoint(self, request: Request) -> Response:
        self._authorise(request)
        async with self.changing:
            endpoint = self._endpoint(request)
            del self.endpoints[endpoint.spec.slug]
            await endpoint.stop()
            self.store.remove(endpoint.spec.slug)
        return Response(status_code=204)

    async def get_endpoint(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse(await self._described(self._endpoint(request).spec.slug))

    async def get_plan(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse(await self._endpoint(request).described())

    async def put_plan(self, request: Request) -> Response:
        """Takes a plan and applies it in the background; GET says when that is done."""
        self._authorise(request)
        endpoint = self._endpoint(request)
        endpoint.want(await _read(request, ServingPlan))
        return JSONResponse(await endpoint.described())

    def _endpoint(self, request: Request) -> ServedEndpoint:
        slug = request.path_params["slug"]
        if slug not in self.endpoints:
            raise ApiError(404, f"there is no endpoint {slug!r}", "slug", "endpoint_not_found")
        return self.endpoints[slug]

    async def _described(self, slug: str) -> dict[str, Any]:
        endpoint = self.endpoints[slug]
        return {"spec": msgspec.to_builtins(endpoint.spec)} | await endpoint.described()

    def _authorise(self, request: Request) -> None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(sent.encode(), self.token.encode()):
            raise ApiError(401, "the admin API needs the bearer token in gateway.token", code="invalid_token")

    def _pinned(self, request: Request) -> str:
        """The role that a request with the admin token asked for; others take what they get."""
        role = request.headers.get("x-polymorph-role", "")
        if role:
            self._authorise(request)
            if role not in (STABLE, CANARY):
                raise bad(f"x-polymorph-role must be {STABLE} or {CANARY}, not {role!r}", "x-polymorph-role")
        return role


def _model(slug: str) -> dict[str, Any]:
    return {"id": slug, "object": "model", "created": int(time.time()), "owned_by": "polymorph"}


async def _read(request: Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await read_body(request, MAX_BODY), type=kind)
    except msgspec.DecodeError as error:
        raise bad(f"the body is not a {kind.__name__}: {error}") from error


def _token(path: Path) -> str:
    """The admin token, made on first use, readable by its owner only."""
    if not path.is_file():
        write_atomically(path, secrets.token_urlsafe(32).encode() + b"\n", 0o600)
    return path.read_text().strip()


def build_app(gateway: Gateway) -> Starlette:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        retry = {"retry-after": "5"} if error.status == 503 else {}
        return JSONResponse(error.body(), error.status, headers=retry)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return await api_error(
            request, ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        )

    async def plan_error(request: Request, error: Exception) -> Response:
        conflict = isinstance(error, PlanError) and error.conflict
        return await api_error(request, ApiError(409 if conflict else 400, str(error)))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def crash(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError(500, "the gateway failed on this request; its log says why"))

    one = "/admin/endpoints/{slug}"
    return Starlette(
        routes=[
            Route("/v1/models", gateway.models),
            Route("/v1/models/{slug}", gateway.model),
            Route("/v1/completions", gateway.generate, methods=["POST"]),
            Route("/v1/chat/completions", gateway.generate, methods=["POST"]),
            Route("/health", gateway.health),
            Route("/ready", gateway.readiness),
            Route("/metrics", gateway.metrics),
            Route("/admin/endpoints", gateway.list_endpoints),
            Route(one, gateway.get_endpoint),
            Route(one, gateway.put_endpoint, methods=["PUT"]),
            Route(one, gateway.delete_endpoint, methods=["DELETE"]),
            Route(f"{one}/plan", gateway.get_plan),
            Route(f"{one}/plan", gateway.put_plan, methods=["PUT"]),
        ],
        exception_handlers={
            ApiError: api_error,
            HTTPException: http_error,
            PlanError: plan_error,
            ModelError: plan_error,
            ClientDisconnect: gone,
            Exception: crash,
        },
        lifespan=gateway.lifespan,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves every endpoint of a data folder.")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="127.0.0.1")
    options = parser.parse_args()
    options.data.mkdir(parents=True, exist_ok=True)
    lock = (options.data / "gateway.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        listener = Listener(options.host, options.port)
        gateway = Gateway(options.data)
    except BlockingIOError:
        sys.exit(f"polymorph: another gateway serves {options.data}. End it, or give another --data folder.")
    except (PortInUse, PlanError, OSError) as error:
        sys.exit(f"polymorph: {error}")
    run_server(build_app(gateway), listener)
    os.close(lock.fileno())


if __name__ == "__main__":
    main()
