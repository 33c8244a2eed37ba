"""GET /openapi.json: a description of the API for tools."""

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from draftwood.serve.openapi import openapi_document
from draftwood.serve.responses import json_response
from draftwood.serve.state import get_state


class OpenApi(HTTPEndpoint):
    async def get(self, _: Request) -> Response:
        state = get_state(self.scope)
        limits = state.limits._replace(drafters=state.drafters)
        return json_response(openapi_document(limits, needs_key=bool(state.options.api_keys)))
