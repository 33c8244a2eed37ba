"""Parsing of requests: the fields of OpenAI's API, and a few of our own.

A known field that would change the output and is not supported is rejected. A field that cannot change it is ignored,
and so are unknown fields, with a warning. Nothing here runs in the event loop, and all work is bounded by the context.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftwood.config import SamplingParams
from draftwood.errors import CONTEXT_LENGTH_EXCEEDED, OptionError, did_you_mean
from draftwood.serve.errors import MAX_PARAM, ApiError, shorten
from draftwood.serve.structured import STRUCTURE_FIELDS, parse_structured
from draftwood.serve.tools import TOOL_FIELDS, Tools, parse_tool_message, parse_tools

Fields = Mapping[str, Any]
ChatMessage = dict[str, Any]

MAX_CHARACTERS_PER_TOKEN = 32  # a text with more characters per token of the context cannot fit, so it is not encoded
MAX_TOP_LOGPROBS = 20
MAX_LOGPROBS = 1 << 19  # entries of all samples together
MAX_PREDICTION_TOKENS = 16_384  # less if the context is shorter
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 16, 256, 256
MAX_IGNORED = 8  # unknown fields that a warning names
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
    *STRUCTURE_FIELDS,
}  # fmt: skip
CHAT_FIELDS = {"messages", "top_logprobs", *TOOL_FIELDS}
COMPLETION_FIELDS = {"prompt"}
IGNORED_FIELDS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "moderation",
    "parallel_tool_calls", "tool_choice", "function_call", "verbosity", "reasoning_effort",
}  # fmt: skip
# Unsupported fields, with the values that are accepted because they have no effect.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "logit_bias": ({},),
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
    ignored: tuple[str, ...] = ()  # names of unknown fields
    tools: Tools | None = None


class RequestLimits(NamedTuple):
    """What requests may ask for, by the model and the options of the server."""

    context_length: int
    drafters: Sequence[str]  # known names
    max_samples: int = 256
    strict: bool = False  # whether unknown fields are an error

    @property
    def max_characters(self) -> int:
        return MAX_CHARACTERS_PER_TOKEN * self.context_length


def parse_body(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply, or numbers too long
        raise ApiError("The request body is not valid JSON", got=error, code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError("The request body must be a JSON object", got=type(fields).__name__, code="invalid_json")
    return fields


def check_model(model: object, served: Sequence[str]) -> str:
    """Return the name of the model. A request without a name means the only model there is."""
    if model is None:
        return served[0]
    if not isinstance(model, str):
        raise ApiError("model must be a string", got=repr(model), allowed=served, param="model")
    if model not in served:
        raise ApiError(f"Unknown model {model!r}", allowed=served, param="model", code="model_not_found")
    return model


def parse_options(fields: Fields, limits: RequestLimits, *, is_chat: bool) -> RequestOptions:
    """Parse all fields but the model and the prompt. Defaults are OpenAI's."""
    ignored = _check_field_names(fields, CHAT_FIELDS if is_chat else COMPLETION_FIELDS, limits.strict)
    values = {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}
    _check_stops(values)
    values.setdefault("temperature", 1.0)
    default = limits.context_length if is_chat else DEFAULT_COMPLETION_TOKENS
    given = (fields.get("max_completion_tokens"), fields.get("max_tokens"), default)
    values["max_tokens"] = next(each for each in given if each is not None)
    values["logprobs"] = _parse_chat_logprobs(fields) if is_chat else _parse_top_logprobs(fields, "logprobs")
    values["structured"] = parse_structured(fields)
    if type(values.get("seed")) is int:
        values["seed"] %= NUM_SEEDS  # OpenAI allows negative seeds
    stream_options = fields.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise ApiError("stream_options must be an object", got=repr(stream_options), param="stream_options")
    drafter = fields.get("drafter")
    if drafter is not None and drafter not in limits.drafters:
        raise ApiError(f"Unknown drafter {drafter!r}", allowed=limits.drafters, param="drafter")
    try:
        params = SamplingParams(**values)
    except OptionError as error:
        raise ApiError.wrap(error) from error
    stream, include_usage = _parse_flag(fields, "stream"), _parse_flag(stream_options, "include_usage")
    prediction = _parse_prediction(fields)
    check_length(len(prediction), limits, "prediction")
    tools = parse_tools(fields) if is_chat else None
    return RequestOptions(params, stream, include_usage, drafter, prediction, ignored, tools)


def check_length(num_characters: int, limits: RequestLimits, param: str) -> None:
    if num_characters > limits.max_characters:
        raise too_long(f"{num_characters} characters", param)


def too_long(got: str, param: str) -> ApiError:
    what = "The text is longer than the context of the model"
    return ApiError(what, got=got, param=param, code=CONTEXT_LENGTH_EXCEEDED)


def check_samples(num_prompts: int, params: SamplingParams, limits: RequestLimits, prompt_field: str) -> None:
    """Check how many samples there are, and how many log-probabilities their response would have to hold."""
    num_samples = num_prompts * params.n
    if num_samples > limits.max_samples:
        param = "n" if num_prompts == 1 else prompt_field
        raise ApiError("Too many samples", got=num_samples, allowed=f"at most {limits.max_samples}", param=param)
    if params.logprobs is not None:
        num_logprobs = num_samples * min(params.max_tokens, limits.context_length) * (1 + params.logprobs)
        if num_logprobs > MAX_LOGPROBS:
            what, allowed = "Too many log-probabilities", f"at most {MAX_LOGPROBS} for all samples and tokens together"
            next_step = "Lower n, max_tokens or the number of alternatives."
            raise ApiError(what, got=num_logprobs, allowed=allowed, next_step=next_step, param="logprobs")


def parse_messages(fields: Fields, limits: RequestLimits) -> list[ChatMessage]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list with at least one message", param="messages")
    if len(messages) > limits.context_length:
        raise too_long(f"{len(messages)} messages", "messages")
    parsed = [_parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    texts = [text for message in parsed for text in (message["role"], message["content"])]
    calls = [json.dumps(message["tool_calls"]) for message in parsed if "tool_calls" in message]
    check_length(sum(map(len, [*texts, *calls])), limits, "messages")
    return parsed


def parse_prompts(fields: Fields, limits: RequestLimits) -> list[str | list[int]]:
    """Parse the prompts of a completion: a text, a list of texts, a list of token ids, or a list of such lists."""
    prompt = fields.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and prompt and not _is_token_ids(prompt) else [prompt]
    if not all((isinstance(each, str) and each) or _is_token_ids(each) for each in prompts):
        raise ApiError("prompt must be a text, token ids, or a list of these, and must not be empty", param="prompt")
    for each in prompts:
        check_length(len(each), limits, "prompt")  # there are fewer token ids than characters
    return list(prompts)


def _parse_message(message: object, param: str) -> ChatMessage:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(role, str):
        raise ApiError(f"{param} must be an object with 'role' and 'content'", param=param)
    if role == "function":
        raise ApiError("Messages of functions are not supported", param=param, code="unsupported_parameter")
    content = _parse_content(message.get("content"), param)
    return {"role": ROLE_ALIASES.get(role, role), "content": content, **parse_tool_message(message, param)}


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


def _check_stops(values: Fields) -> None:
    """Every stop is compared with the output after every token, in a thread that all requests share."""
    for name, max_count in (("stop", MAX_STOPS), ("stop_token_ids", MAX_STOP_TOKENS)):
        stops = values.get(name, [])
        if isinstance(stops, list) and len(stops) > max_count:
            raise ApiError(f"{name} has too many entries", got=len(stops), allowed=f"at most {max_count}", param=name)
    stop = values.get("stop", [])
    texts = stop if isinstance(stop, list) else [stop]
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > MAX_STOP_CHARACTERS:
        allowed = f"at most {MAX_STOP_CHARACTERS}"
        raise ApiError("A stop string is too long", got=f"{longest} characters", allowed=allowed, param="stop")


def _check_field_names(fields: Fields, own: set[str], strict: bool) -> tuple[str, ...]:
    """Return the names of unknown fields, unless they are an error."""
    known = SAMPLING_FIELDS | COMMON_FIELDS | own
    ignored = []
    for name, value in fields.items():
        if name in UNSUPPORTED_FIELDS and name not in own:
            if value is not None and value not in UNSUPPORTED_FIELDS[name]:
                raise ApiError(f"{name} is not supported", param=name, code="unsupported_parameter")
        elif name not in known and name not in IGNORED_FIELDS:
            ignored.append(shorten(name, MAX_PARAM))
            if strict:
                guess = did_you_mean(ignored[0], known)
                what = f"Unknown field {ignored[0]!r}"
                raise ApiError(what, next_step=guess, param=ignored[0], code="unknown_parameter")
    return tuple(ignored[:MAX_IGNORED])


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
