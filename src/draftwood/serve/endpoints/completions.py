"""POST /v1/completions: texts or token ids, used as they are."""

from collections.abc import Sequence

from draftwood.serve.endpoints.generation import GenerationEndpoint
from draftwood.serve.fields import COMPLETIONS, Fields
from draftwood.serve.formats import CompletionFormat, Order, ResponseFormat
from draftwood.serve.requests import RequestLimits, parse_prompts
from draftwood.text import TextCodec, Tool

TextOrIds = str | list[int]


class Completions(GenerationEndpoint[TextOrIds]):
    api = COMPLETIONS
    is_chat = False
    prompt_field = "prompt"

    def parse_prompts(self, fields: Fields, limits: RequestLimits) -> list[TextOrIds]:
        return parse_prompts(fields, limits)

    def encode(self, prompt: TextOrIds, codec: TextCodec, tools: Sequence[Tool]) -> list[int]:
        return codec.encode(prompt) if isinstance(prompt, str) else prompt

    def new_format(self, order: Order, codec: TextCodec) -> ResponseFormat:
        return CompletionFormat(order, codec, is_chat=False)
