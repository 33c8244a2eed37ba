"""GET /v1/models and /v1/models/NAME: the names of the served model."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from draftwood.serve.endpoints.base import Endpoint
from draftwood.serve.requests import check_model
from draftwood.serve.responses import json_response


class Models(Endpoint):
    async def get(self, request: Request) -> Response:
        names = self.server.options.names
        name = request.path_params.get("name")
        if name is None:
            return json_response({"object": "list", "data": [self._describe(each) for each in names]})
        check_model(name, names)
        return json_response(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        llm = self.server.llm
        return {
            "id": name,
            "object": "model",
            "created": self.server.created,
            "owned_by": "draftwood",
            "max_model_len": llm.info.context_length,
            "drafter": llm.drafter,
        }
