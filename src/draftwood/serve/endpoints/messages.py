"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, for agents that speak it."""

import asyncio
from collections.abc import Mapping
from typing import Any

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
from draftwood.serve.tools import parse_tools
from draftwood.text import TextCodec


class Messages(ConversationEndpoint):
    api = MESSAGES

    def translate(self, fields: Fields) -> Fields:
        if fields.get("max_tokens") is None:
            raise ApiError("max_tokens is missing", allowed="1 or more", param="max_tokens")
        choice = fields.get("tool_choice")
        is_single = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True
        return {
            **fields,
            "stop": fields.get("stop_sequences"),
            "tools": _translate_tools(fields.get("tools")),
            "tool_choice": _translate_choice(choice),
            "parallel_tool_calls": not is_single,
        }

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        return [parse_anthropic(fields, limits)]

    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        return MessageFormat(order, codec)


def _translate_tools(tools: Any) -> Any:
    """As functions of OpenAI's chats. A tool that is none, or a built-in one, is refused there."""
    if not isinstance(tools, list):
        return tools
    return [_translate_tool(tool) if isinstance(tool, Mapping) else tool for tool in tools]


def _translate_tool(tool: Mapping[str, Any]) -> Any:
    if tool.get("type", "custom") != "custom":
        return tool
    names = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    return {"type": "function", "function": {to: tool[name] for to, name in names.items() if name in tool}}


def _translate_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"auto": "auto", "any": "required", "none": "none"}.get(kind, choice) if isinstance(kind, str) else choice


class CountTokens(Messages):
    """The size of a prompt, without an answer."""

    async def post(self, request: Request) -> Response:
        body = await get_state(self.scope).bodies.read(request)
        return json_response({"input_tokens": await asyncio.to_thread(self._count, body)})

    def _count(self, body: bytes) -> int:
        state, fields = get_state(self.scope), {"max_tokens": 1, **parse_body(body)}
        check_model(fields.get("model"), state.options.names)
        try:
            tools = parse_tools(self.translate(fields))
            (prompt,) = self.parse_prompts(fields, state.limits)
            return len(self.encode(prompt, state.llm.tokenizer, () if tools is None else tools.definitions))
        except DraftwoodError as error:
            raise (error if isinstance(error, ApiError) else ApiError.wrap(error, "messages")) from error
