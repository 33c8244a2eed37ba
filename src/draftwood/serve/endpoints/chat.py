"""POST /v1/chat/completions: conversations, formatted by the model's chat template."""

from collections.abc import Sequence

from draftwood.serve.conversations import ChatMessage, parse_messages
from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.fields import CHAT, Fields
from draftwood.serve.formats import CompletionFormat, Order, ResponseFormat
from draftwood.serve.requests import RequestLimits
from draftwood.serve.tools import encode_chat
from draftwood.text import TextCodec, Tool

Conversation = list[ChatMessage]


class ConversationEndpoint(GenerationEndpoint[Conversation]):
    is_chat = True
    prompt_field = "messages"

    def encode(self, prompt: Conversation, codec: TextCodec, tools: Sequence[Tool]) -> list[int]:
        return encode_chat(codec, prompt, tools)


class ChatCompletions(ConversationEndpoint):
    api = CHAT

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        return [parse_messages(fields, limits)]

    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        return CompletionFormat(order, codec, is_chat=True)
