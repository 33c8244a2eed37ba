"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, for agents that speak it."""

import asyncio

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from draftwood.errors import DraftwoodError
from draftwood.serve.conversations import parse_anthropic
from draftwood.serve.endpoints.chat import Conversation, ConversationEndpoint
from draftwood.serve.errors import ApiError
from draftwood.serve.fields import MESSAGES, Fields
from draftwood.serve.formats import MessageFormat, Order, ResponseFormat
from draftwood.serve.requests import RequestLimits, check_model, parse_body
from draftwood.serve.responses import json_response
from draftwood.serve.state import get_state
from draftwood.text import TextCodec


class Messages(ConversationEndpoint):
    api = MESSAGES

    def translate(self, fields: Fields) -> Fields:
        if fields.get("max_tokens") is None:
            raise ApiError("max_tokens is missing", allowed="1 or more", param="max_tokens")
        return {**fields, "stop": fields.get("stop_sequences")}

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        return [parse_anthropic(fields, limits)]

    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        return MessageFormat(order, codec)


class CountTokens(HTTPEndpoint):
    """The size of a prompt, without an answer."""

    async def post(self, request: Request) -> Response:
        body = await get_state(self.scope).bodies.read(request)
        return json_response({"input_tokens": await asyncio.to_thread(self._count, body)})

    def _count(self, body: bytes) -> int:
        state, fields = get_state(self.scope), parse_body(body)
        check_model(fields.get("model"), state.options.names)
        try:
            return len(state.llm.tokenizer.apply_chat(parse_anthropic(fields, state.limits)))
        except DraftwoodError as error:
            raise (error if isinstance(error, ApiError) else ApiError.wrap(error, "messages")) from error
