"""Errors that the server returns to clients, in the format of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftwood.errors import DraftwoodError

SHUTTING_DOWN = "The server is shutting down"


class ApiError(DraftwoodError):
    """A request that cannot be served. Subclasses set the HTTP status and headers of the response."""

    code = "invalid_value"
    type = "invalid_request_error"
    status = 400
    headers: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def wrap(cls, error: DraftwoodError, param: str | None = None) -> ApiError:
        """Report an error of the library to the client. ``param`` applies if the error names no option itself."""
        return cls(
            error.what,
            got=error.got,
            allowed=error.allowed,
            next_step=error.next_step,
            code=error.code,
            param=error.param or param,
        )

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


class ApiKeyError(ApiError):
    code = "invalid_api_key"
    type = "authentication_error"
    status = 401
    headers: ClassVar[Mapping[str, str]] = {"www-authenticate": "Bearer"}


class UnknownModelError(ApiError):
    code = "model_not_found"
    status = 404


class UnknownPathError(ApiError):
    code = "unknown_url"
    status = 404


class MethodError(ApiError):
    code = "method_not_supported"
    status = 405


class BodySizeError(ApiError):
    code = "request_too_large"
    status = 413


class InternalError(ApiError):
    """A bug or a failed pass. Details go to the log, never to the client."""

    code = "internal_error"
    type = "server_error"
    status = 500

    def __init__(self) -> None:
        super().__init__("Internal server error")


class ServerBusyError(ApiError):
    """The queue is full, or the server is shutting down."""

    code = "server_busy"
    type = "server_error"
    status = 503
    headers: ClassVar[Mapping[str, str]] = {"retry-after": "1"}
