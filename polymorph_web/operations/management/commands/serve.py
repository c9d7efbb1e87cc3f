"""The whole product on this machine: gateway with its engine servers, web, worker and conductor."""

from __future__ import annotations

import errno
import fcntl
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from optimizer.builder import kinds_off
from polymorph_web.operations.supervisor import LLM_KEY, Program, Supervisor, own_environment

NEEDED_BYTES = 1 << 30
READY_S = 90.0
POLL_S = 0.1


class Command(BaseCommand):
    help = "Starts web, worker, conductor, gateway and engine servers, prints the address and a one-time sign-in link."
    requires_system_checks: list[str] = []  # `migrate` runs them, once the folder is known to be usable

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
        parser.add_argument("--port", type=int, default=8000, help="of the pages")
        parser.add_argument("--gateway-port", type=int, default=8100, help="of the OpenAI-compatible server")

    def handle(self, *args: Any, **options: Any) -> None:
        data = Path(settings.DATA_DIR)
        host, port, gateway_port = options["host"], options["port"], options["gateway_port"]
        check_machine(data, host, {"PORT": port, "GATEWAY_PORT": gateway_port})
        with one_at_a_time(data):
            empty_broker(data)
            gateway_url = f"http://127.0.0.1:{gateway_port}"
            environment = own_environment(data, {"GATEWAY_URL": gateway_url, "ALLOWED_HOSTS": allowed_hosts(host)})
            supervisor = Supervisor(data / "logs", environment, settings.BASE_DIR, self._say)
            stop = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda *_: stop.set())
            self._say("Preparing the database.")
            manage(environment, "migrate", "-v0")
            try:
                self._start(supervisor, stop, host, port, gateway_port)
                if not stop.is_set():
                    self._welcome(environment, host, port, gateway_url)
                supervisor.watch(stop)
            finally:
                supervisor.stop()
                self._say("Stopped.")

    def _start(self, supervisor: Supervisor, stop: threading.Event, host: str, port: int, gateway_port: int) -> None:
        programs = all_programs(Path(settings.DATA_DIR), host, port, gateway_port)
        self._say("Starting the gateway and the engine servers.")
        supervisor.start(programs["gateway"])
        wait_for(f"http://127.0.0.1:{gateway_port}/health", supervisor, "gateway", stop)
        manage(supervisor.environment, "setup_demo")
        for name in ("web", "worker", "conductor"):
            supervisor.start(programs[name])
        wait_for(f"http://{local(host)}:{port}/health/", supervisor, "web", stop)

    def _welcome(self, environment: dict[str, str], host: str, port: int, gateway_url: str) -> None:
        for sentence in kinds_off():
            self._say(sentence)
        address = f"http://{local(host)}:{port}"
        link = manage(environment, "signin_link", "--base", address).strip()
        self._say(f"Polymorph is running at {address}/")
        self._say(f"Sign in once with this link: {link}")
        self._say(f"The OpenAI-compatible server is at {gateway_url}/v1; the demo's model is called demo.")
        self._say("Another link: manage.py signin_link. Stop everything: Ctrl-C.")

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()


def all_programs(data: Path, host: str, port: int, gateway_port: int) -> dict[str, Program]:
    python = sys.executable
    web = [python, "-m", "uvicorn", "polymorph_web.asgi:application", "--host", host, "--port", str(port)]
    web += ["--log-level", "warning", "--timeout-graceful-shutdown", "3"]
    worker = [python, "-m", "celery", "-A", "polymorph_web", "worker", "--pool", "solo", "--loglevel", "WARNING"]
    gateway = [python, "-m", "engine.gateway", "--data", str(data), "--port", str(gateway_port)]
    found = (
        Program("gateway", gateway, patience_s=30.0),
        Program("web", web),
        # killed: Celery would wait for the run to end, or fail it; the next worker goes on from what is stored
        Program("worker", worker, stop=signal.SIGKILL, secrets=(LLM_KEY,)),
        Program("conductor", [python, "manage.py", "conduct"]),
    )
    return {program.name: program for program in found}


def check_machine(data: Path, host: str, ports: dict[str, int]) -> None:
    """Raises CommandError, with the mend, for what would stop the product later with a trace."""
    free = shutil.disk_usage(data).free
    if free < NEEDED_BYTES:
        raise CommandError(
            f"{free / 1e9:.1f} GB are free in {data} and 1 GB is needed. Free some space, or name another folder: --data."
        )
    if len(set(ports.values())) < len(ports):
        raise CommandError("The pages and the gateway need ports of their own: give two different ones.")
    for name, port in ports.items():
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                raise CommandError(port_problem(name, host, port, error)) from error


def port_problem(name: str, host: str, port: int, error: Exception) -> str:
    mend = f"choose another: make run {name}={port + 1 if port < 65535 else 8000}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use. Stop what uses it, or {mend}"
    return f"Port {port} on {host} cannot be listened on ({error}): {mend}"


class one_at_a_time:
    """Holds the data folder: two of these on one folder would fight over its engines."""

    def __init__(self, data: Path) -> None:
        self.path = data / "serve.lock"

    def __enter__(self) -> None:
        self.handle = self.path.open("w")
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.handle.close()
            raise CommandError(
                f"The data folder {self.path.parent} is served already. Stop that one, or name another folder: --data."
            ) from error

    def __exit__(self, *exc: object) -> None:
        self.handle.close()


def empty_broker(data: Path) -> None:
    """Rings of an earlier life are dropped: the database knows which runs wait, and the conductor rings for them."""
    for folder in ("queue", "processed"):
        for path in (data / "broker" / folder).glob("*"):
            path.unlink(missing_ok=True)


def allowed_hosts(host: str) -> str:
    known = list(settings.ALLOWED_HOSTS)
    return ",".join([*known, host] if host not in ("", "0.0.0.0", "::", *known) else known)


def local(host: str) -> str:
    """An address on which this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def manage(environment: Any, *arguments: str) -> str:
    """A command in a process of its own. Returns its output; raises CommandError with its last line."""
    command = [sys.executable, "manage.py", *arguments]
    done = subprocess.run(command, cwd=settings.BASE_DIR, env=dict(environment), capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CommandError(f"{arguments[0]} failed: {lines[-1] if lines else f'exit status {done.returncode}'}")
    return done.stdout


def wait_for(url: str, supervisor: Supervisor, name: str, stop: threading.Event) -> None:
    """Returns once `url` answers. Raises CommandError when the program ended or took too long."""
    deadline = time.monotonic() + READY_S
    while not stop.is_set():
        try:
            if httpx.get(url, timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        ended = supervisor.running[name].process.poll()
        if ended is not None or time.monotonic() > deadline:
            why = f"ended with status {ended}" if ended is not None else f"did not answer within {READY_S:.0f} s"
            raise CommandError(f"The {name} {why}. Its log: {supervisor.log(name)}")
        stop.wait(POLL_S)
