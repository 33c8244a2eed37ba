"""Request bodies: each limited in size and time, all that are being read together in size."""

import asyncio

from starlette.requests import Request

from draftwood.serve.errors import ApiError

MAX_HELD_BYTES = 64 << 20  # of all bodies that are being read
MIN_BODY_BYTES, MAX_BODY_BYTES = 256 << 10, 8 << 20
BYTES_PER_TOKEN = 128  # what a token of the context may take in JSON: far more than any text needs


class BodyReader:
    """If all bodies together grow too large, the one that takes longest is given up."""

    def __init__(self, context_length: int, seconds: float) -> None:
        self.max_bytes = min(max(MIN_BODY_BYTES, BYTES_PER_TOKEN * context_length), MAX_BODY_BYTES)
        self._seconds = seconds
        self._held: dict[asyncio.Timeout, int] = {}  # bytes of each body that is being read, oldest first

    @property
    def num_held(self) -> int:
        return sum(self._held.values())

    async def read(self, request: Request) -> bytes:
        body = bytearray()
        timeout = asyncio.timeout(self._seconds)
        try:
            async with timeout:
                self._check_size(int(request.headers.get("content-length", "0")[:18]))  # digits, says the parser
                async for part in request.stream():
                    body += part
                    self._check_size(len(body))
                    self._hold(timeout, len(body))
        except TimeoutError:
            allowed = f"{self._seconds:g} seconds, less while the server is busy"
            what = "The request body did not arrive in time"
            raise ApiError(what, allowed=allowed, code="request_timeout") from None
        finally:
            self._held.pop(timeout, None)
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            limit = f"at most {self.max_bytes >> 10} KiB, by the context of the model"
            raise ApiError("The request body is too large", allowed=limit, code="request_too_large")

    def _hold(self, timeout: asyncio.Timeout, num_bytes: int) -> None:
        self._held[timeout] = num_bytes
        while self.num_held > MAX_HELD_BYTES and len(self._held) > 1:
            oldest = next(iter(self._held))
            del self._held[oldest]
            oldest.reschedule(0)  # expires at once
