"""Connections: how many there may be, and how long one may make the server wait.

A connection waits while its client still has something to send: headers, a body, the next request. Waiting connections
are closed after a time, and the one that waits longest makes room for a new one, so idle clients never keep others out.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftwood.serve.errors import ServerBusyError
from draftwood.serve.responses import error_response

BACKLOG = 128  # connections that the system holds; as many may be accepted before one of them can be refused
MAX_HEADER_BYTES = 16 << 10  # of a request
RESERVED_FILES = BACKLOG + 128  # for everything but connections


class ConnectionLimits:
    """``seconds``: how long a client may take to send its headers, to send the next request, or to read nothing."""

    def __init__(
        self, max_connections: int, max_per_address: int, seconds: float, on_refusal: Callable[[], None] = lambda: None
    ) -> None:
        self.seconds, self._on_refusal = seconds, on_refusal
        self._max, self._max_per_address = _fit_open_files(max_connections), max_per_address
        self._open: dict[LimitedConnection, None] = {}  # the one that began to wait first comes first

    @property
    def num_open(self) -> int:
        return len(self._open)

    def admit(self, new: LimitedConnection) -> bool:
        """Whether the connection may stay. Others that wait are closed if necessary, first those of its own address."""
        own = [connection for connection in self._open if connection.address == new.address]
        for group, limit in ((own, self._max_per_address), (self._open, self._max)):
            if len(group) >= limit:
                longest = next((connection for connection in group if connection.is_waiting), None)
                if longest is None:
                    self._on_refusal()
                    return False
                self.remove(longest)
                longest.transport.abort()
        self._open[new] = None
        return True

    def move_to_end(self, connection: LimitedConnection) -> None:
        if connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def remove(self, connection: LimitedConnection) -> None:
        self._open.pop(connection, None)


class ResponseParts(h11.Connection):
    """Frames the parts of a chunked response itself: h11 checks each of them at length."""

    _is_chunked = False  # whether the response that is being sent is

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override] # it has overloads
        if self._is_chunked and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        output = super().send(event)
        self._is_chunked = isinstance(event, h11.Response) and b"\r\nTransfer-Encoding: chunked\r\n" in (output or b"")
        return output


class LimitedConnection(H11Protocol):
    """Uvicorn's protocol for HTTP/1.1, with limits for clients that are slow in either direction."""

    limits: ClassVar[ConnectionLimits]  # set by a subclass

    _waiting: asyncio.TimerHandle | None = None  # closes the connection if no request arrives
    _stalled: asyncio.TimerHandle | None = None  # closes the connection if the client does not read

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = ResponseParts(h11.SERVER, MAX_HEADER_BYTES)

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def is_waiting(self) -> bool:
        return not self._has_request or self.cycle.more_body

    @property
    def _has_request(self) -> bool:
        """Whether headers have arrived whose response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limits.admit(self):
            self._update_deadline()
        else:
            transport.write(REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.remove(self)
        for timer in (self._waiting, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.limits.move_to_end(self)
        self._update_deadline()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the response to its headers has begun
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._close_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()

    def _update_deadline(self) -> None:
        """The time for headers does not start again with every byte. The time of bodies is checked by their reader."""
        if self._has_request:
            if self._waiting is not None:
                self._waiting.cancel()
            self._waiting = None
        elif self._waiting is None:
            self._waiting = self._close_later()

    def _close_later(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.limits.seconds, self.transport.abort)


def _fit_open_files(max_connections: int) -> int:
    """Raise the limit of open files as far as necessary. Returns the number of connections that fit into it."""
    if sys.platform == "win32":  # it has no such limit
        return max_connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return max_connections
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    except (OSError, ValueError):
        possible = soft
    return max(1, possible - RESERVED_FILES)


def _encode_refusal() -> bytes:
    response = error_response(ServerBusyError("The server has too many connections"), {"connection": "close"})
    lines = [b"HTTP/1.1 503 Service Unavailable", *(name + b": " + value for name, value in response.raw_headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


REFUSAL = _encode_refusal()
