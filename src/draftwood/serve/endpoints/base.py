"""Base class of the endpoints."""

from __future__ import annotations

from starlette.endpoints import HTTPEndpoint

from draftwood.serve.state import ServerState


class Endpoint(HTTPEndpoint):
    """Subclasses define ``get`` or ``post``. Starlette creates one instance per request."""

    @property
    def server(self) -> ServerState:
        state: ServerState = self.scope["app"].state.server
        return state
