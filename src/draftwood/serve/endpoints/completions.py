"""POST /v1/completions: texts or token ids, used as they are."""

from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.requests import Fields, RequestLimits, parse_prompts
from draftwood.text import TextCodec

TextOrIds = str | list[int]


class Completions(GenerationEndpoint[TextOrIds]):
    is_chat = False
    prompt_field = "prompt"

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[TextOrIds]:
        return parse_prompts(fields, limits)

    def encode(self, prompt: TextOrIds, codec: TextCodec) -> list[int]:
        return codec.encode(prompt) if isinstance(prompt, str) else prompt
