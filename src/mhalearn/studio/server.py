"""The server: one page, a few addresses for it, and nobody else let in."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mhalearn.studio.connections import FewRequests, PromptProtocol
from mhalearn.studio.counting import count
from mhalearn.studio.own_data import ENDINGS
from mhalearn.studio.recorded import PAGE, RECORDED
from mhalearn.studio.request import (
    ACTIVATIONS,
    INPUTS,
    NORMS,
    PRESETS,
    Limits,
    Wish,
    bounds,
    list_methods,
    read_wish,
)
from mhalearn.studio.runs import Runs, StudioRun, TooManyRuns

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
_OWN_HOST = re.compile(rf"({'|'.join(map(re.escape, _NAMES))})(:[0-9]{{1,5}})?", re.IGNORECASE)
_LARGEST_BODY = 4096
# Seconds for the body of a request, which is one small object.
_BODY_SECONDS = 3.0
_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"


def make_app(limits: Limits, environment: dict[str, str] | None = None) -> Starlette:
    """The page and its addresses. Leaving the app's lifespan stops all runs."""
    runs = Runs(limits, environment)
    answers = Answers(runs)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await runs.close()

    app = Starlette(
        routes=[
            Route("/about", answers.about),
            Route("/check", answers.check, methods=["POST"]),
            Route("/data", answers.receive, methods=["POST"]),
            Route("/runs", answers.index),
            Route("/runs", answers.start, methods=["POST"]),
            Route("/runs/{number:int}/stop", answers.stop, methods=["POST"]),
            Route("/runs/{number:int}/events", answers.events),
            Route("/runs/{number:int}/report", answers.report),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ],
        middleware=[Middleware(OnlyThisPage), Middleware(FewRequests)],
        lifespan=lifespan,
    )
    app.state.runs = runs
    return app


class Answers:
    """What each address answers."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def about(self, request: Request) -> Response:
        limits = self._runs.limits
        return JSONResponse(
            {
                "bounds": bounds(limits),
                "block_bounds": bounds(limits, block=True),
                "methods": list_methods(),
                "inputs": INPUTS,
                "activations": ACTIVATIONS,
                "norms": NORMS,
                "presets": {name: dataclasses.asdict(wish) for name, wish in PRESETS.items()},
                "file_bytes": limits.file_bytes,
                "endings": ENDINGS,
                "recorded": [f"recorded/{path.name}" for path in sorted(RECORDED.glob("*.json"))],
            }
        )

    async def index(self, request: Request) -> Response:
        return JSONResponse([run.summary() for run in self._runs.newest_first()])

    async def start(self, request: Request) -> Response:
        try:
            wish = await self._read_wish(request)
            if (problem := (await self._count(wish))["problem"]) is not None:
                raise ValueError(problem)
            return JSONResponse(self._runs.start(wish).summary(), 201)
        except ValueError as error:
            return _refuse(400, str(error))
        except TooManyRuns as error:
            return _refuse(429, str(error))

    async def check(self, request: Request) -> Response:
        """What counting knows of a run, without starting it."""
        try:
            return JSONResponse(await self._count(await self._read_wish(request)))
        except ValueError as error:
            return JSONResponse({"limit": None, "ratio": None, "problem": str(error)})

    async def receive(self, request: Request) -> Response:
        """Files of the visitor's own; they stay on this machine, in a folder that is removed."""
        try:
            names, sizes = _announced(request)
            dropped = await self._runs.files.receive(names, sizes, request.stream())
            return JSONResponse(dropped.summary(), 201)
        except ValueError as error:
            return _refuse(400, str(error))
        except ClientDisconnect:
            return _refuse(400, "the file did not come to its end")

    async def _read_wish(self, request: Request) -> Wish:
        limits, files = self._runs.limits, self._runs.files
        return read_wish(await _json_body(request), limits, files.find_sizes)

    async def _count(self, wish: Wish) -> dict[str, Any]:
        return await asyncio.to_thread(count, wish, self._runs.files.find_sizes)

    async def stop(self, request: Request) -> Response:
        run = self._find(request)
        if run is None:
            return _refuse(404, "there is no such run")
        if run.is_running:
            await run.stop()
        return JSONResponse(run.summary())

    async def events(self, request: Request) -> Response:
        run = self._find(request)
        if run is None:
            return _refuse(404, "there is no such run")
        seen = request.headers.get("last-event-id", "")
        after = int(seen) if seen.isascii() and seen.isdigit() and len(seen) < 10 else 0
        return StreamingResponse(_stream(run, after), media_type="text/event-stream")

    async def report(self, request: Request) -> Response:
        run = self._find(request)
        if run is None:
            return _refuse(404, "there is no such run")
        if not run.has_report:
            return _refuse(404, "this run has no report: it is going on, or ended without a layer")
        return FileResponse(run.report, media_type="text/html")

    def _find(self, request: Request) -> StudioRun | None:
        return self._runs.find(request.path_params["number"])


async def _stream(run: StudioRun, after: int) -> AsyncIterator[str]:
    """What a run tells from there on, as server-sent events; the last one is its summary.

    Between two messages the server gets a turn, in which it hears of a page that was closed; the
    rest would be written to nobody, with a complaint for each.
    """
    yield "retry: 1000\n\n"
    async for number, message in run.follow(after):
        yield f"id: {number}\ndata: {message}\n\n"
        await asyncio.sleep(0)
    yield f"event: over\ndata: {json.dumps(run.summary())}\n\n"


class OnlyThisPage:
    """Lets in requests that name this machine, and changes only from the page itself.

    A foreign site can have its name point to 127.0.0.1 (DNS rebinding), or post a form here. The
    first shows in the Host header, the second in Origin, which no script can set.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [
                    (b"content-security-policy", _policy(scope["path"])),
                    (b"x-content-type-options", b"nosniff"),
                    (b"cross-origin-resource-policy", b"same-origin"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        refusal = _objection(scope["method"], Headers(scope=scope))
        answer = self._app if refusal is None else _refuse(403, refusal)
        await answer(scope, receive, guarded)


def _objection(method: str, headers: Headers) -> str | None:
    host = headers.get("host", "")
    if not _OWN_HOST.fullmatch(host):
        return f"open the studio under {' or '.join(_NAMES)}, not under another name"
    if method in ("GET", "HEAD"):
        return None
    if headers.get("origin", f"http://{host}").lower() != f"http://{host}".lower():
        return "only the studio's own page may do that"
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return "only the studio's own page may do that"
    return None


def _policy(path: str) -> bytes:
    """Reports bring their own style; nothing else may come with them, and no script at all."""
    if path.endswith("/report"):
        return b"default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
    return _POLICY.encode()


def _refuse(code: int, why: str) -> Response:
    return JSONResponse({"error": " ".join(why.split())}, code)


def _announced(request: Request) -> tuple[list[str], list[int]]:
    """Names and sizes of the files in a body, from its address: one `file` each, SIZE:NAME."""
    if request.headers.get("content-type", "") != "application/octet-stream":
        raise ValueError("send files as application/octet-stream")
    files = [one.partition(":") for one in request.query_params.getlist("file")]
    if not all(size.isascii() and size.isdigit() and len(size) < 12 for size, _, _ in files):
        raise ValueError("announce each file as file=SIZE:NAME")
    return [name for _, _, name in files], [int(size) for size, _, _ in files]


async def _json_body(request: Request) -> Any:
    body = b""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > _LARGEST_BODY:
                    raise ValueError(f"a request has at most {_LARGEST_BODY} bytes")
    except TimeoutError:
        raise ValueError(f"the body did not come within {_BODY_SECONDS:g} seconds") from None
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ValueError("send JSON, with Content-Type: application/json")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("this is not JSON") from None


def serve(
    port: int,
    *,
    cache: Path | None = None,
    limits: Limits | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until interrupted, on loopback only. `ready` hears the address once it answers.

    port: 0 takes any that is free. cache: where runs keep compiled programs for one another.
    An OSError says that the port is taken.
    """
    app = make_app(limits or Limits(), _environment(cache))
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # elsewhere it would let two servers share a port
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with listening:
        listening.bind((HOST, port))
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            http=PromptProtocol,
            server_header=False,
            timeout_graceful_shutdown=5,
            lifespan="on",
        )
        _Server(config, app.state.runs, lambda: ready(address)).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Says when it answers, and stops its runs first of all, which ends the streams that wait."""

    def __init__(self, config: uvicorn.Config, runs: Runs, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._runs, self._ready = runs, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._runs.close()
        await super().shutdown(sockets)


def _environment(cache: Path | None) -> dict[str, str]:
    """What runs are started with: JAX finds the folder for compiled programs there."""
    environment = dict(os.environ)
    if cache is not None:
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    return environment
