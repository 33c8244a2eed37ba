"""ASGI middleware: metrics, CORS headers, unexpected errors and API keys."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.serve.errors import SHUTTING_DOWN, ApiKeyError, InternalError, ServerBusyError
from draftwood.serve.metrics import Metrics
from draftwood.serve.responses import error_response
from draftwood.serve.state import ServerState

LOG = logging.getLogger("draftwood.serve")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected


class MetricsMiddleware:
    """Counts responses by path and status. Ignores trailing slashes, for the count and for the routes."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, status = scope["path"].rstrip("/") or "/", 0

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app({**scope, "path": path}, receive, record_status)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        self._metrics.count_response(path if path in self._paths else "other", status)


class CorsMiddleware:
    """Allows scripts of web pages to call the API. Every response gets the headers, also to clients without origin."""

    def __init__(self, app: ASGIApp, allow_origin: str) -> None:
        self._app = app
        self._headers = {
            "access-control-allow-origin": allow_origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": "*, authorization, content-type",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        is_preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        await (Response(status_code=204) if is_preflight else self._app)(scope, receive, add_headers)


class ErrorMiddleware:
    """Turns unexpected errors and a shutdown into a response. Errors of the API have handlers of their own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def record_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        error: ServerBusyError | InternalError
        try:
            await self._app(scope, receive, record_start)
            return
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:  # the request outlived the grace period of a shutdown
            error = ServerBusyError(SHUTTING_DOWN)
        except Exception:
            LOG.exception("%s failed", scope["path"])
            error = InternalError()
        if not started:
            await error_response(error)(scope, receive, send)


class ApiKeyMiddleware:
    """Rejects requests without the server's API key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server: ServerState = scope["app"].state.server
        key = server.options.api_key
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if key is not None:
            if not given:
                raise ApiKeyError("The request has no API key", allowed="Authorization: Bearer KEY")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
                raise ApiKeyError("The API key is wrong")
        await self._app(scope, receive, send)
