"""POST /v1/chat/completions: conversations, formatted by the model's chat template."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.requests import ChatMessage, Fields, RequestLimits, check_length, parse_messages
from draftwood.serve.tools import encode_chat, parse_tools
from draftwood.text import TextCodec, Tool


class Conversation(NamedTuple):
    messages: list[ChatMessage]
    tools: Sequence[Tool]


class ChatCompletions(GenerationEndpoint[Conversation]):
    is_chat = True
    prompt_field = "messages"

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        tools = parse_tools(fields)
        definitions = () if tools is None else tools.definitions
        check_length(len(json.dumps(definitions)), limits, "tools")
        return [Conversation(parse_messages(fields, limits), definitions)]

    def encode(self, prompt: Conversation, codec: TextCodec) -> list[int]:
        return encode_chat(codec, prompt.messages, prompt.tools)
