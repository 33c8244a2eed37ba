"""GET /health: whether the server can generate."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from draftwood import __version__
from draftwood.serve.endpoints.base import Endpoint
from draftwood.serve.responses import json_response


class Health(Endpoint):
    async def get(self, _: Request) -> Response:
        is_alive = self.server.runner.is_alive
        body = {"status": "ok" if is_alive else "failed", "version": __version__}
        return json_response(body, 200 if is_alive else 503)
