"""Errors that the server returns to clients, in the format of OpenAI's API."""

from typing import Any, Self

from draftwood.errors import DraftwoodError

SHUTTING_DOWN = "The server is shutting down"
MAX_MESSAGE, MAX_PARAM = 1000, 64  # characters: errors quote what clients send
STATUS_BY_CODE = {  # all others: 400
    "invalid_api_key": 401,
    "host_not_allowed": 403,
    "model_not_found": 404,
    "unknown_url": 404,
    "method_not_supported": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "internal_error": 500,
    "server_busy": 503,
}
TYPE_BY_STATUS = {401: "authentication_error", 500: "server_error", 503: "server_error"}
MESSAGE_TYPE_BY_STATUS = {  # in Anthropic's API
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
HEADERS_BY_STATUS = {401: {"www-authenticate": "Bearer"}, 408: {"connection": "close"}, 503: {"retry-after": "1"}}


def shorten(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 4]} ..."


class ApiError(DraftwoodError):
    """A request that cannot be served. The code determines the HTTP status."""

    code = "invalid_value"

    @classmethod
    def wrap(cls, error: DraftwoodError, param: str | None = None) -> Self:
        """Report an error of the library to the client. ``param`` applies if the error names no option itself."""
        got, allowed, next_step = error.got, error.allowed, error.next_step
        return cls(
            error.what, got=got, allowed=allowed, next_step=next_step, code=error.code, param=error.param or param
        )

    @property
    def status(self) -> int:
        return STATUS_BY_CODE.get(self.code, 400)

    @property
    def headers(self) -> dict[str, str]:
        return HEADERS_BY_STATUS.get(self.status, {})

    def body(self) -> dict[str, Any]:
        kind = TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        param = self.param and shorten(self.param, MAX_PARAM)
        return {"error": {"message": shorten(str(self), MAX_MESSAGE), "type": kind, "param": param, "code": self.code}}

    def message_body(self) -> dict[str, Any]:
        """As ``body``, in the format of Anthropic's API."""
        kind = MESSAGE_TYPE_BY_STATUS.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": shorten(str(self), MAX_MESSAGE)}}


class InternalError(ApiError):
    """A bug or a failed pass. Details go to the log, never to the client."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("Internal server error")


class ServerBusyError(ApiError):
    """The queue is full, or the server is shutting down."""

    code = "server_busy"
