"""GET /health: whether the server can generate."""

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from draftwood import __version__
from draftwood.serve.responses import json_response
from draftwood.serve.state import get_state


class Health(HTTPEndpoint):
    async def get(self, _: Request) -> Response:
        is_alive = get_state(self.scope).runner.is_alive
        body = {"status": "ok" if is_alive else "failed", "version": __version__}
        return json_response(body, 200 if is_alive else 503)
