"""Responses: JSON, errors, event streams."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftwood.serve.errors import ApiError

_ENCODER = json.JSONEncoder(ensure_ascii=False)
MESSAGES_PATH = "/v1/messages"  # errors of Anthropic's API have another format


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None, path: str = "") -> Response:
    """In the format of the API that ``path`` belongs to."""
    body = error.message_body() if path.startswith(MESSAGES_PATH) else error.body()
    return json_response(body, error.status, {**error.headers, **(headers or {})})


def encode_event(body: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + encode_json(body) + b"\n\n"


def encode_json(body: Mapping[str, Any] | str) -> bytes:
    # A client may send half of a surrogate pair, and an error may quote it.
    return _ENCODER.encode(body).encode("utf-8", "replace")


class EventStreamResponse(Response):
    """Server-sent events. Headers are sent with the first event: an error before it can have its own status."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        self.status_code, self.background, self._events = 200, None, events
        self.init_headers({"cache-control": "no-cache", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not started:
                    started = True
                    headers = self.raw_headers
                    await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
