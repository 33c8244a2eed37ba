"""Parsing of requests: the fields of OpenAI's API, and a few of our own.

A field that would change the output and is not supported is rejected. A field that cannot change it is ignored.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

from draftwood.config import SamplingParams
from draftwood.errors import CONTEXT_LENGTH_EXCEEDED, OptionError, did_you_mean
from draftwood.serve.errors import ApiError

Fields = Mapping[str, Any]
ChatMessage = dict[str, str]

MAX_BODY_BYTES = 16 << 20
MAX_TOP_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
NUM_SEEDS = 2**63
ROLE_ALIASES = {"developer": "system"}  # chat templates only know the second name

# Names as in SamplingParams. The first line is in OpenAI's API too.
SAMPLING_FIELDS = {
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "n", "stop",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos",
}  # fmt: skip
COMMON_FIELDS = {
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "logprobs", "prediction", "drafter",
}  # fmt: skip
CHAT_FIELDS = {"messages", "top_logprobs"}
COMPLETION_FIELDS = {"prompt"}
IGNORED_FIELDS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "moderation",
    "parallel_tool_calls", "tool_choice", "function_call", "verbosity", "reasoning_effort",
}  # fmt: skip
# Unsupported fields, with the values that are accepted because they have no effect.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "audio": (), "web_search_options": (),
    "suffix": ("",), "echo": (False,), "best_of": (1,),
}  # fmt: skip


class RequestOptions(NamedTuple):
    """All fields of a request but the model and the prompt."""

    params: SamplingParams
    stream: bool
    include_usage: bool  # in the last chunk of a stream
    drafter: str | None
    prediction: str  # the expected output, or empty


async def read_json(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            limit = f"at most {MAX_BODY_BYTES >> 20} MiB"
            raise ApiError("The request body is too large", allowed=limit, code="request_too_large")
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply, or numbers too long
        raise ApiError("The request body is not valid JSON", got=error, code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError("The request body must be a JSON object", got=type(fields).__name__, code="invalid_json")
    return fields


def check_model(model: object, served: Sequence[str]) -> None:
    if not isinstance(model, str):
        raise ApiError("model must be a string", got=repr(model), allowed=served, param="model")
    if model not in served:
        raise ApiError(f"Unknown model {model!r}", allowed=served, param="model", code="model_not_found")


def parse_options(fields: Fields, *, is_chat: bool, context_length: int, drafters: Sequence[str]) -> RequestOptions:
    """Parse all fields but the model and the prompt. Defaults are OpenAI's. ``drafters``: the known names."""
    _check_field_names(fields, CHAT_FIELDS if is_chat else COMPLETION_FIELDS)
    values = {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}
    values.setdefault("temperature", 1.0)
    default = context_length if is_chat else DEFAULT_COMPLETION_TOKENS
    limits = (fields.get("max_completion_tokens"), fields.get("max_tokens"), default)
    values["max_tokens"] = next(limit for limit in limits if limit is not None)
    values["logprobs"] = _parse_chat_logprobs(fields) if is_chat else _parse_top_logprobs(fields, "logprobs")
    if type(values.get("seed")) is int:
        values["seed"] %= NUM_SEEDS  # OpenAI allows negative seeds
    stream_options = fields.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise ApiError("stream_options must be an object", got=repr(stream_options), param="stream_options")
    drafter = fields.get("drafter")
    if drafter is not None and drafter not in drafters:
        raise ApiError(f"Unknown drafter {drafter!r}", allowed=drafters, param="drafter")
    try:
        params = SamplingParams(**values)
    except OptionError as error:
        raise ApiError.wrap(error) from error
    stream, include_usage = _parse_flag(fields, "stream"), _parse_flag(stream_options, "include_usage")
    return RequestOptions(params, stream, include_usage, drafter, _parse_prediction(fields))


def check_length(text: str, max_characters: int, param: str) -> None:
    if len(text) > max_characters:
        what, got = "The text is longer than the context of the model", f"{len(text)} characters"
        raise ApiError(what, got=got, param=param, code=CONTEXT_LENGTH_EXCEEDED)


def parse_messages(fields: Fields, max_characters: int) -> list[ChatMessage]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list with at least one message", param="messages")
    parsed = [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    for message in parsed:
        check_length(message["content"], max_characters, "messages")
    return parsed


def parse_prompts(fields: Fields, max_characters: int) -> list[str | list[int]]:
    """Parse the prompts of a completion: a text, a list of texts, a list of token ids, or a list of such lists."""
    prompt = fields.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not _is_token_ids(prompt) else [prompt]
    if not all((isinstance(each, str) and each) or _is_token_ids(each) for each in prompts):
        raise ApiError("prompt must be a text, token ids, or a list of these, and must not be empty", param="prompt")
    for text in (each for each in prompts if isinstance(each, str)):
        check_length(text, max_characters, "prompt")
    return list(prompts)


def _parse_message(message: object, param: str) -> ChatMessage:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise ApiError(f"{param} must be an object with 'role' and 'content'", param=param)
    if message.get("tool_calls") or role in ("tool", "function"):
        raise ApiError("Tool calls are not supported", param=param, code="unsupported_parameter")
    return {"role": ROLE_ALIASES.get(role, role), "content": _parse_content(message.get("content"), param)}


def _parse_content(content: object, param: str) -> str:
    """Return the text of a message. Text parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    raise ApiError("content must be text", allowed="a string, or parts of type 'text'", param=param)


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _parse_prediction(fields: Fields) -> str:
    prediction = fields.get("prediction")
    if prediction is None:
        return ""
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise ApiError("prediction must be an object with type 'content' and a content", param="prediction")
    return _parse_content(prediction.get("content"), "prediction")


def _check_field_names(fields: Fields, own: set[str]) -> None:
    known = SAMPLING_FIELDS | COMMON_FIELDS | own
    for name, value in fields.items():
        if name in UNSUPPORTED_FIELDS:
            if value is not None and value not in UNSUPPORTED_FIELDS[name]:
                raise ApiError(f"{name} is not supported", param=name, code="unsupported_parameter")
        elif name not in known and name not in IGNORED_FIELDS:
            guess = did_you_mean(name, known)
            raise ApiError(f"Unknown field {name!r}", next_step=guess, param=name, code="unknown_parameter")


def _parse_chat_logprobs(fields: Fields) -> int | None:
    if _parse_flag(fields, "logprobs"):
        return _parse_top_logprobs(fields, "top_logprobs") or 0
    if fields.get("top_logprobs"):
        raise ApiError("top_logprobs requires logprobs to be true", param="top_logprobs")
    return None


def _parse_top_logprobs(fields: Fields, name: str) -> int | None:
    """Return the number of alternatives per token."""
    top = fields.get(name)
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS):
        raise ApiError(f"{name} must be an integer", got=repr(top), allowed=f"0 to {MAX_TOP_LOGPROBS}", param=name)
    return top


def _parse_flag(fields: Fields, name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false", got=repr(value), param=name)
    return bool(value)
