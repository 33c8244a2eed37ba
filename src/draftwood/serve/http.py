"""HTTP as ASGI has it: bodies in, JSON and event streams out, errors in the form that OpenAI's clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = Mapping[str, str]

MOST_BYTES = 16 << 20  # of a body
NAMES = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}


class HttpError(Exception):
    """An answer that is an error; ``param`` is the field of the request that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers: Headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = NAMES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """Whoever asked has hung up."""


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a header, empty if it is missing."""
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


async def read_json(receive: Receive) -> dict[str, Any]:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            raise HttpError(413, f"The request is larger than {MOST_BYTES >> 20} MiB")
        if not message.get("more_body"):
            break
    try:
        found = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or numbers that nobody means
        raise HttpError(400, f"The request is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise HttpError(400, f"The request is no JSON object\n  got: {type(found).__name__}")
    return found


async def send_json(send: Send, status: int, body: Mapping[str, Any], headers: Headers | None = None) -> None:
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    await send_bytes(send, status, "application/json", content, headers)


async def send_bytes(send: Send, status: int, kind: str, content: bytes, headers: Headers | None = None) -> None:
    await _start(send, status, {"content-type": kind, "content-length": str(len(content)), **(headers or {})})
    await send({"type": "http.response.body", "body": content})


class EventStream:
    """Server-sent events. Until the first of them an error can still be an answer of its own."""

    def __init__(self, send: Send, headers: Headers) -> None:
        self._send, self._headers = send, headers
        self.is_open = False

    async def event(self, body: Mapping[str, Any]) -> None:
        await self._line(json.dumps(body, ensure_ascii=False))

    async def end(self) -> None:
        await self._line("[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: HttpError) -> None:
        await self.event(error.body())
        await self.end()

    async def _line(self, text: str) -> None:
        if not self.is_open:
            self.is_open = True
            kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await _start(self._send, 200, {**kind, **self._headers})
        body = f"data: {text}\n\n".encode("utf-8", "replace")
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def _start(send: Send, status: int, headers: Headers) -> None:
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def until_gone(receive: Receive) -> None:
    """Returns when the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(work: Awaitable[Any], gone: asyncio.Task[None]) -> Any:
    """What ``work`` gives, or an error as soon as the client is gone."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
