"""POST /v1/chat/completions: conversations, formatted by the model's chat template."""

from __future__ import annotations

from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.requests import ChatMessage, Fields, parse_messages

Conversation = list[ChatMessage]


class ChatCompletions(GenerationEndpoint[Conversation]):
    is_chat = True
    prompt_field = "messages"

    def parse_prompts(self, fields: Fields) -> list[Conversation]:
        return [parse_messages(fields)]

    def texts(self, prompt: Conversation) -> list[str]:
        return [message["content"] for message in prompt]

    def encode(self, prompt: Conversation) -> list[int]:
        return self.server.llm.tokenizer.apply_chat(prompt)
