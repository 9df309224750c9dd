"""How long a connection may be silent, and how many requests are answered at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for the head of a request, from the connection or its first byte: a page sends it at once.
HEAD_SECONDS = 3.0
# Requests at a time: a browser sends six, and each tab keeps one to watch its run.
_REQUESTS = 64


class PromptProtocol(H11Protocol):
    """Hangs up on who does not send the head of a request in time, byte by byte or not at all."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class FewRequests:
    """Refuses requests beyond a number. Connections that ask nothing do not count, as they would
    in uvicorn's own limit: silent ones must not keep the page from being answered."""

    def __init__(self, app: ASGIApp, most: int = _REQUESTS) -> None:
        self._app, self._most, self._going = app, most, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._going >= self._most:
            answer = JSONResponse({"error": "too many requests at a time: close some tabs"}, 503)
            await answer(scope, receive, send)
            return
        self._going += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._going -= 1
