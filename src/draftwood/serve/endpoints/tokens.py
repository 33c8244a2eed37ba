"""POST /tokenize and /detokenize: between texts and token ids, in the forms of vLLM and llama.cpp."""

import asyncio
from abc import abstractmethod
from typing import Any

from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from draftwood.errors import DraftwoodError
from draftwood.serve.conversations import parse_messages
from draftwood.serve.errors import ApiError
from draftwood.serve.fields import Fields
from draftwood.serve.requests import check_length, check_model, parse_body, parse_flag
from draftwood.serve.responses import json_response
from draftwood.serve.state import ServerState, get_state


class TokenEndpoint(HTTPEndpoint):
    async def post(self, request: Request) -> Response:
        state = get_state(self.scope)
        body = await state.bodies.read(request)
        return await asyncio.to_thread(lambda: json_response(self._respond(body, state)))

    def _respond(self, body: bytes, state: ServerState) -> dict[str, Any]:
        fields = parse_body(body)
        check_model(fields.get("model"), state.options.names)
        try:
            return self.convert(fields, state)
        except DraftwoodError as error:
            raise (error if isinstance(error, ApiError) else ApiError.wrap(error)) from error

    @abstractmethod
    def convert(self, fields: Fields, state: ServerState) -> dict[str, Any]:
        """The response to these fields."""


class Tokenize(TokenEndpoint):
    def convert(self, fields: Fields, state: ServerState) -> dict[str, Any]:
        codec, name = state.llm.tokenizer, "content" if fields.get("prompt") is None else "prompt"
        if fields.get("messages") is not None:
            starts_answer = parse_flag(fields, "add_generation_prompt", True)
            tokens = codec.apply_chat(parse_messages(fields, state.limits), starts_answer)
        else:
            text = fields.get(name)
            if not isinstance(text, str):
                raise ApiError("There is no text", allowed="a text as prompt or content, or messages", param="prompt")
            check_length(len(text), state.limits, name)
            special = parse_flag(fields, "add_special_tokens", parse_flag(fields, "add_special", True))
            tokens = codec.encode(text, add_special=special)
        found = {"tokens": tokens, "count": len(tokens), "max_model_len": state.llm.info.context_length}
        if parse_flag(fields, "return_token_strs"):
            found["token_strs"] = [codec.token_text(token) for token in tokens]
        return found


class Detokenize(TokenEndpoint):
    def convert(self, fields: Fields, state: ServerState) -> dict[str, Any]:
        tokens, vocab_size = fields.get("tokens"), state.llm.tokenizer.vocab_size
        if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < vocab_size for each in tokens):
            raise ApiError("tokens must be a list of token ids", allowed=f"0 to {vocab_size - 1}", param="tokens")
        check_length(len(tokens), state.limits, "tokens")
        text = state.llm.tokenizer.decode(tokens, skip_special=False)
        return {"prompt": text, "content": text}
