"""POST /v1/chat/completions: conversations, formatted by the model's chat template."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.serve.conversations import ChatMessage, parse_messages
from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.fields import CHAT, Fields
from draftwood.serve.formats import CompletionFormat, Order, ResponseFormat
from draftwood.serve.requests import RequestLimits, check_length
from draftwood.serve.tools import encode_chat, parse_tools
from draftwood.text import TextCodec, Tool


class Conversation(NamedTuple):
    messages: list[ChatMessage]
    tools: Sequence[Tool]


class ConversationEndpoint(GenerationEndpoint[Conversation]):
    is_chat = True
    prompt_field = "messages"

    @abstractmethod
    def parse_conversation(self, fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
        """Read and check the messages of a request."""

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        tools = parse_tools(self.translate(fields))
        definitions = () if tools is None else tools.definitions
        check_length(len(json.dumps(definitions)), limits, "tools")
        return [Conversation(self.parse_conversation(fields, limits), definitions)]

    def encode(self, prompt: Conversation, codec: TextCodec) -> list[int]:
        return encode_chat(codec, prompt.messages, prompt.tools)


class ChatCompletions(ConversationEndpoint):
    api = CHAT

    def parse_conversation(self, fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
        return parse_messages(fields, limits)

    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        return CompletionFormat(order, codec, is_chat=True)
