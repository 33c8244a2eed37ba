"""POST /v1/responses: OpenAI's responses. The whole conversation comes with the request; nothing is stored."""

from draftwood.serve.conversations import parse_input
from draftwood.serve.endpoints.chat import Conversation, ConversationEndpoint
from draftwood.serve.errors import ApiError
from draftwood.serve.fields import RESPONSES, Fields
from draftwood.serve.formats import Order, ResponseFormat, ResponsesFormat
from draftwood.serve.requests import RequestLimits, parse_object
from draftwood.text import TextCodec


class Responses(ConversationEndpoint):
    api = RESPONSES
    prompt_field = "input"

    def translate(self, fields: Fields) -> Fields:
        kind = parse_object(parse_object(fields, "text"), "format").get("type", "text")
        if kind != "text":
            what = "text.format is not supported"
            raise ApiError(what, got=repr(kind)[:80], allowed="text", param="text", code="unsupported_parameter")
        return {**fields, "max_completion_tokens": fields.get("max_output_tokens"), "stream_options": None}

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        return [parse_input(fields, limits)]

    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        return ResponsesFormat(order, codec)
