"""Parsing of requests: the fields of OpenAI's API, and a few of our own. Other APIs are translated to them first.

Nothing here runs in the event loop, and all work is bounded by the context.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from draftwood.config import MAX_BUDGET, SamplingParams
from draftwood.errors import CONTEXT_LENGTH_EXCEEDED, OptionError
from draftwood.serve.errors import ApiError
from draftwood.serve.fields import SAMPLING_FIELDS, Fields
from draftwood.serve.structured import parse_structured
from draftwood.serve.thoughts import Thinking
from draftwood.serve.tools import Tools, parse_tools

MAX_CHARACTERS_PER_TOKEN = 32  # a text with more characters per token of the context cannot fit, so it is not encoded
MAX_TOP_LOGPROBS = 20
MAX_LOGPROBS = 1 << 19  # entries of all samples together
MAX_PREDICTION_TOKENS = 16_384  # less if the context is shorter
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 16, 256, 256
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
NUM_SEEDS = 2**63
REASONING_FORMATS = ("auto", "none")  # of llama.cpp: thoughts apart from the answer, or within it
NO_MARKS: Mapping[str, int] = {}
MAX_BIASES, MAX_BIAS = 1024, 100.0  # the second one is OpenAI's


class RequestOptions(NamedTuple):
    """All fields of a request but the model and the prompt."""

    params: SamplingParams
    stream: bool
    include_usage: bool  # in the last chunk of a stream
    include_cycles: bool  # in every chunk of a stream
    drafter: str | None
    budget: int | None
    prediction: str  # the expected output, or empty
    echo: bool  # whether the response repeats the prompt
    tools: Tools | None
    splits_thoughts: bool = True  # whether the response has thoughts apart from the answer
    thinking: Thinking = "no"  # whether thoughts are looked for
    marks: Mapping[str, int] = NO_MARKS  # those of thoughts that are special tokens


class RequestLimits(NamedTuple):
    """What requests may ask for, by the model and the options of the server."""

    context_length: int
    drafters: Sequence[str]  # known names
    max_samples: int = 256
    max_budget: int = MAX_BUDGET
    vocab_size: int = 1 << 31
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
    values = {name: fields[name] for name in SAMPLING_FIELDS if fields.get(name) is not None}
    _check_stops(values)
    values.setdefault("temperature", 1.0)
    default = limits.context_length if is_chat else DEFAULT_COMPLETION_TOKENS
    given = (fields.get("max_completion_tokens"), fields.get("max_tokens"), default)
    values["max_tokens"] = next(each for each in given if each is not None)
    values["logprobs"] = _parse_chat_logprobs(fields) if is_chat else _parse_top_logprobs(fields, "logprobs")
    values["structured"] = parse_structured(fields)
    if "logit_bias" in values:
        values["logit_bias"] = _parse_biases(values["logit_bias"], limits)
    if type(values.get("seed")) is int:
        values["seed"] %= NUM_SEEDS  # OpenAI allows negative seeds
    stream_options = parse_object(fields, "stream_options")
    echo = parse_flag(fields, "echo")
    if echo and values["logprobs"] is not None:
        raise ApiError("echo with logprobs is not supported", param="echo", code="unsupported_parameter")
    drafter = fields.get("drafter")
    if drafter is not None and drafter not in limits.drafters:
        raise ApiError(f"Unknown drafter {drafter!r}", allowed=limits.drafters, param="drafter")
    try:
        params = SamplingParams(**values)
    except OptionError as error:
        raise ApiError.wrap(error) from error
    prediction = _parse_prediction(fields)
    check_length(len(prediction), limits, "prediction")
    return RequestOptions(
        params,
        parse_flag(fields, "stream"),
        parse_flag(stream_options, "include_usage"),
        parse_flag(stream_options, "include_cycles"),
        drafter,
        _parse_int(fields, "budget", 1, limits.max_budget),
        prediction,
        echo,
        parse_tools(fields) if is_chat else None,
        _parse_choice(fields, "reasoning_format", REASONING_FORMATS) == "auto",
    )


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


def parse_prompts(fields: Fields, limits: RequestLimits) -> list[str | list[int]]:
    """Parse the prompts of a completion: a text, a list of texts, a list of token ids, or a list of such lists."""
    prompt = fields.get("prompt")
    prompts: list[Any] = prompt if isinstance(prompt, list) and prompt and not _is_token_ids(prompt) else [prompt]
    if not all((isinstance(each, str) and each) or _is_token_ids(each) for each in prompts):
        raise ApiError("prompt must be a text, token ids, or a list of these, and must not be empty", param="prompt")
    for each in prompts:
        check_length(len(each), limits, "prompt")  # there are fewer token ids than characters
    return list(prompts)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _parse_prediction(fields: Fields) -> str:
    prediction = fields.get("prediction")
    if prediction is None:
        return ""
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise ApiError("prediction must be an object with type 'content' and a content", param="prediction")
    return parse_content(prediction.get("content"), "prediction")


def parse_content(content: object, param: str, kinds: Collection[str] = ("text",)) -> str:
    """Return the text of a message. Text parts, which have one of these types, are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(_is_text_part(part, kinds) for part in content):
        return "".join(part["text"] for part in content)
    allowed = f"a string, or parts of type {', '.join(map(repr, kinds))}"
    raise ApiError("content must be text", allowed=allowed, param=param)


def _is_text_part(part: object, kinds: Collection[str]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)


def _parse_biases(given: object, limits: RequestLimits) -> dict[int, float]:
    """Biases by token id, which JSON has as texts."""
    what = "logit_bias must be an object with token ids and numbers"
    if not isinstance(given, dict):
        raise ApiError(what, got=repr(given)[:80], param="logit_bias")
    if len(given) > MAX_BIASES:
        raise ApiError("logit_bias has too many entries", got=len(given), allowed=MAX_BIASES, param="logit_bias")
    biases = {}
    for name, value in given.items():
        is_id = name.isascii() and name.isdigit() and len(name) < 10 and int(name) < limits.vocab_size
        if not is_id or isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_BIAS:
            allowed = f"token ids below {limits.vocab_size}, and numbers from -100 to 100"
            raise ApiError(what, got=f"{name[:20]}: {value!r}"[:80], allowed=allowed, param="logit_bias")
        biases[int(name)] = float(value)
    return biases


def parse_object(fields: Fields, name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise ApiError(f"{name} must be an object", got=repr(value)[:80], param=name)
    return value


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


def _parse_chat_logprobs(fields: Fields) -> int | None:
    if parse_flag(fields, "logprobs"):
        return _parse_top_logprobs(fields, "top_logprobs") or 0
    if fields.get("top_logprobs"):
        raise ApiError("top_logprobs requires logprobs to be true", param="top_logprobs")
    return None


def _parse_top_logprobs(fields: Fields, name: str) -> int | None:
    """Return the number of alternatives per token."""
    return _parse_int(fields, name, 0, MAX_TOP_LOGPROBS)


def _parse_int(fields: Fields, name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise ApiError(f"{name} must be an integer", got=repr(value), allowed=f"{low} to {high}", param=name)
    return value


def _parse_choice(fields: Fields, name: str, allowed: Sequence[str]) -> str:
    """One of the texts; the first one is the default."""
    value = fields.get(name)
    if value is not None and value not in allowed:
        raise ApiError(f"{name} is unknown", got=repr(value)[:80], allowed=allowed, param=name)
    return allowed[0] if value is None else str(value)


def parse_flag(fields: Fields, name: str, default: bool = False) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false", got=repr(value)[:80], param=name)
    return default if value is None else value
