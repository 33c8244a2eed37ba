"""POST /v1/responses: OpenAI's responses. The whole conversation comes with the request; nothing is stored."""

from collections.abc import Mapping
from typing import Any

from draftwood.serve.conversations import parse_input
from draftwood.serve.endpoints.chat import Conversation, ConversationEndpoint
from draftwood.serve.fields import RESPONSES, Fields
from draftwood.serve.formats import Order, ResponseFormat, ResponsesFormat
from draftwood.serve.requests import RequestLimits, parse_object
from draftwood.text import TextCodec


class Responses(ConversationEndpoint):
    api = RESPONSES
    prompt_field = "input"

    def translate(self, fields: Fields) -> Fields:
        return {
            **fields,
            "max_completion_tokens": fields.get("max_output_tokens"),
            "stream_options": None,
            "response_format": _nest(parse_object(parse_object(fields, "text"), "format") or None, "json_schema"),
            "tools": _nest_all(fields.get("tools")),
            "tool_choice": _nest(fields.get("tool_choice"), "function"),
        }

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        return [parse_input(fields, limits)]

    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        return ResponsesFormat(order, codec)


def _nest(given: Any, kind: str) -> Any:
    """What chats have within an object of its own, responses have beside its type."""
    if not isinstance(given, Mapping) or given.get("type") != kind:
        return given
    return {"type": kind, kind: {name: value for name, value in given.items() if name != "type"}}


def _nest_all(tools: Any) -> Any:
    return [_nest(tool, "function") for tool in tools] if isinstance(tools, list) else tools
