"""POST /v1/completions: texts or token ids, used as they are."""

from __future__ import annotations

from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.requests import Fields, parse_prompts

TextOrIds = str | list[int]


class Completions(GenerationEndpoint[TextOrIds]):
    is_chat = False
    prompt_field = "prompt"

    def parse_prompts(self, fields: Fields) -> list[TextOrIds]:
        return parse_prompts(fields)

    def texts(self, prompt: TextOrIds) -> list[str]:
        return [prompt] if isinstance(prompt, str) else []

    def encode(self, prompt: TextOrIds) -> list[int]:
        return self.server.llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
