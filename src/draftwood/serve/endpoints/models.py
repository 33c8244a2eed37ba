"""GET /v1/models and /v1/models/NAME: the names of the served model."""

from typing import Any

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from draftwood.serve.requests import check_model
from draftwood.serve.responses import json_response
from draftwood.serve.state import ServerState, get_state


class Models(HTTPEndpoint):
    async def get(self, request: Request) -> Response:
        state, name = get_state(self.scope), request.path_params.get("name")
        if name is None:
            return json_response({"object": "list", "data": [_describe(each, state) for each in state.options.names]})
        check_model(name, state.options.names)
        return json_response(_describe(name, state))


def _describe(name: str, state: ServerState) -> dict[str, Any]:
    llm = state.llm
    about: dict[str, Any] = {"max_model_len": llm.info.context_length, "max_budget": llm.budget, "drafter": llm.drafter}
    about["drafters"] = state.drafters  # those that a request may name; others need options
    return {"id": name, "object": "model", "created": state.created, "owned_by": "draftwood", **about}
