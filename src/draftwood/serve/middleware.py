"""ASGI middleware: metrics, CORS headers, unexpected errors and API keys."""

import asyncio
import hmac
import logging
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.serve.errors import SHUTTING_DOWN, ApiError, InternalError, ServerBusyError
from draftwood.serve.responses import error_response
from draftwood.serve.state import ServerState, get_state

LOG = logging.getLogger("draftwood.serve")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected


class RequestMiddleware:
    """Counts responses by path and status, adds CORS headers, and responds to unexpected errors.

    Trailing slashes of paths are removed. Errors of the API have handlers of their own, see ``app.py``.
    """

    def __init__(self, app: ASGIApp, state: ServerState, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, state.metrics, paths
        origin = state.options.allow_origin
        self._headers = {} if origin is None else {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": "*, authorization, content-type",
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, status = scope["path"].rstrip("/") or "/", 0
        error: ApiError | None = None

        async def send_response(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        try:
            await self._app({**scope, "path": path}, receive, send_response)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # the request outlived the grace period of a shutdown
            error = ServerBusyError(SHUTTING_DOWN)
        except Exception:
            LOG.exception("%s failed", path)
            error = InternalError()
        if error is not None and not status:  # otherwise the response has started
            await error_response(error)(scope, receive, send_response)
        self._metrics.count_response(path if path in self._paths else "other", status)


class ApiKeyMiddleware:
    """Rejects requests without the server's API key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = get_state(scope).options.api_key
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        if key is not None and not (is_bearer and hmac.compare_digest(given.strip().encode("latin-1"), key.encode())):
            what = "The API key is wrong" if given else "The request has no API key"
            raise ApiError(what, allowed="the header 'Authorization: Bearer KEY'", code="invalid_api_key")
        await self._app(scope, receive, send)
