"""ASGI middleware: metrics, logs, CORS headers, unexpected errors, requests from web pages, API keys."""

import asyncio
import hmac
import time
from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftwood.serve.errors import SHUTTING_DOWN, ApiError, InternalError, ServerBusyError
from draftwood.serve.logs import LOG
from draftwood.serve.responses import error_response
from draftwood.serve.state import CLIENT, NOTES, ServerState, get_state

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected


class RequestMiddleware:
    """Counts and logs responses by path and status, adds CORS headers, and responds to unexpected errors.

    Trailing slashes of paths are removed. Errors of endpoints have handlers of their own, see ``app.py``.
    """

    def __init__(self, app: ASGIApp, state: ServerState, paths: Collection[str]) -> None:
        self._app, self._state, self._paths = app, state, paths
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
        path, status, start = scope["path"].rstrip("/") or "/", 0, time.monotonic()
        error: ApiError | None = None
        address = (scope["client"] or ("",))[0]
        scope = {**scope, "path": path, CLIENT: f"address {address}", NOTES: {}}

        async def send_response(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        try:
            await self._app(scope, receive, send_response)
        except ClientDisconnect:
            status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # the request outlived the grace period of a shutdown
            error = ServerBusyError(SHUTTING_DOWN)
        except ApiError as refusal:  # of a middleware
            error = refusal
        except Exception:  # noqa: BLE001 - logged; the client gets no details
            LOG.exception("%s failed", path[:64])
            error = InternalError()
        if error is not None and not status:  # otherwise the response has started
            await error_response(error, path=path)(scope, receive, send_response)
        known = path if path in self._paths else "other"
        self._state.metrics.count_response(known, status)
        entry = {"client": address, "method": scope["method"], "path": known, "status": status}
        self._state.request_log.write({**entry, "seconds": round(time.monotonic() - start, 4), **scope[NOTES]})


class WebPageMiddleware:
    """Rejects what a web page could make a browser send to a server without a key.

    A page may send forms and plain text to any address, but JSON only with the server's permission (CORS). A page whose
    domain name was pointed to this machine needs no permission, but its requests carry that name.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._needs_key = app, bool(state.options.api_keys)
        self._hosts = {"localhost", *map(str.lower, state.options.allow_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._needs_key:
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", "localhost"))
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if scope["method"] == "POST" and kind != "application/json":
                code, got = "unsupported_media_type", kind or "none"
                raise ApiError("The content type is not supported", got=got, allowed="application/json", code=code)
        await self._app(scope, receive, send)

    def _check_host(self, given: str) -> None:
        host = given[: given.rfind("]") + 1] or given.partition(":")[0]
        if host.lower() not in self._hosts and not _is_address(host.strip("[]")):
            raise ApiError(
                "The server is not known under this host name",
                got=host,
                allowed=[*sorted(self._hosts), "IP addresses"],
                next_step="Start the server with --allow-host NAME or with --api-key.",
                code="host_not_allowed",
            )


class ApiKeyMiddleware:
    """Rejects requests without one of the server's API keys."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keys = get_state(scope).options.api_keys
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        token = given.strip().encode("latin-1")
        matches = [hmac.compare_digest(token, key.encode()) for key in keys]  # all of them: the time tells nothing
        if keys and not any(matches):
            what = "The API key is wrong" if given else "The request has no API key"
            raise ApiError(
                what, allowed="the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'", code="invalid_api_key"
            )
        if keys:
            scope[CLIENT] = f"key {matches.index(True)}"
        await self._app(scope, receive, send)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
