"""POST /v1/chat/completions: conversations, formatted by the model's chat template."""

from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.requests import ChatMessage, Fields, RequestLimits, parse_messages
from draftwood.text import TextCodec

Conversation = list[ChatMessage]


class ChatCompletions(GenerationEndpoint[Conversation]):
    is_chat = True
    prompt_field = "messages"

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[Conversation]:
        return [parse_messages(fields, limits)]

    def encode(self, prompt: Conversation, codec: TextCodec) -> list[int]:
        return codec.apply_chat(prompt)
